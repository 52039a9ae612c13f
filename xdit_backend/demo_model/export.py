"""Export of the demo model to the files that ComfyUI reads: names of SD3's and TAESD's publishers, weights in 8 and
16 bits."""

import json
import re

import torch
from safetensors.torch import save_file

from .autoencoder import SCALE, SHIFT
from .transformer import ROUNDED, is_block_matrix

NAMES = {
    "pos_embed.proj": "x_embedder.proj", "pos_embed.pos_embed": "pos_embed", "context_embedder": "context_embedder",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "norm_out.linear": "final_layer.adaLN_modulation.1", "proj_out": "final_layer.linear",
}
IN_BLOCKS = {
    "norm1.linear": "x_block.adaLN_modulation.1", "norm1_context.linear": "context_block.adaLN_modulation.1",
    "attn.norm_q": "x_block.attn.ln_q", "attn.norm_k": "x_block.attn.ln_k",
    "attn.norm_added_q": "context_block.attn.ln_q", "attn.norm_added_k": "context_block.attn.ln_k",
    "attn.to_out.0": "x_block.attn.proj", "attn.to_add_out": "context_block.attn.proj",
    "ff.net.0.proj": "x_block.mlp.fc1", "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1", "ff_context.net.2": "context_block.mlp.fc2",
}
JOINED = {"x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
          "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")}

OF_UNET = (("norm1.", "in_layers.0."), ("conv1.", "in_layers.2."), ("time_emb_proj.", "emb_layers.1."),
           ("norm2.", "out_layers.0."),
           ("conv2.", "out_layers.3."), ("conv_shortcut.", "skip_connection."))
OUTSIDE_UNET = (("conv_in.", "input_blocks.0.0."), ("conv_norm_out.", "out.0."), ("conv_out.", "out.2."),
           ("time_embedding.linear_1.", "time_embed.0."), ("time_embedding.linear_2.", "time_embed.2."),
           ("mid_block.resnets.0.", "middle_block.0."), ("mid_block.attentions.0.", "middle_block.1."),
           ("mid_block.resnets.1.", "middle_block.2."))


def transformer_tensors(state):
    """Convert the state dict of diffusers' SD3Transformer2DModel to SD3's own names, with the matrices of the blocks
    in 8 bits."""
    state = {name: tensor.to(ROUNDED if is_block_matrix(name, tensor) else torch.float16)
             for name, tensor in state.items()}
    last = max(int(match[1]) for match in map(re.compile(r"transformer_blocks\.(\d+)\.").match, state) if match)
    tensors = {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        match = re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", module)
        if not match:
            file_name = NAMES.get(name) or f"{NAMES[module]}.{kind}"
        elif match[2] in IN_BLOCKS:
            file_name = f"joint_blocks.{match[1]}.{IN_BLOCKS[match[2]]}.{kind}"
        else:
            continue
        # The publisher's last modulations are (shift, scale), diffusers' (scale, shift).
        swapped = module == "norm_out.linear" or module == f"transformer_blocks.{last}.norm1_context.linear"
        tensors[file_name] = torch.cat(tensor.chunk(2)[::-1]) if swapped else tensor
    for block in range(last + 1):
        for file_name, names in JOINED.items():
            for kind in ("weight", "bias"):
                tensors[f"joint_blocks.{block}.{file_name}.{kind}"] = torch.cat(
                    [state[f"transformer_blocks.{block}.{name}.{kind}"] for name in names])
    return tensors


def unet_tensors(state, num_layers, dtype):
    """Convert the state dict of a UNet2DConditionModel with SD 1.5's structure and num_layers layers per level to
    the publisher's names."""
    return {_in_unets_file(name, num_layers): tensor.to(dtype) for name, tensor in state.items()}


def _in_unets_file(name, num_layers):
    """Map diffusers' name to the publisher's, for a U-Net with SD 1.5's structure."""
    prefix, rest = next(((new, name.removeprefix(old)) for old, new in OUTSIDE_UNET if name.startswith(old)),
                        ("", name))
    match = re.match(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.*)", rest)
    if match is not None:
        side, level, kind, layer, rest = match[1], int(match[2]), match[3], int(match[4]), match[5]
        first = level * (num_layers + 1) + (side == "down")
        number = first + (num_layers if kind.endswith("samplers") else layer)
        prefix = f"{'in' if side == 'down' else 'out'}put_blocks.{number}."
        prefix += {"resnets": "0.", "attentions": "1.", "downsamplers": "0.",
                   "upsamplers": "1." if level == 0 else "2."}[kind]
        rest = rest.replace("conv.", "op.", 1) if kind == "downsamplers" else rest
    if "resnets" in name:
        rest = next((rest.replace(old, new, 1) for old, new in OF_UNET if rest.startswith(old)), rest)
    return prefix + rest


def autoencoder_tensors(state):
    """Convert the state dict of diffusers' AutoencoderTiny to TAESD's names, in 16 bits."""
    tensors = {"vae_scale": torch.tensor(SCALE), "vae_shift": torch.tensor(SHIFT)}
    for name, tensor in state.items():
        side, _, index, rest = name.split(".", 3)
        tensors[f"taesd_{side}.{int(index) + (side == 'decoder')}.{rest}"] = tensor.half()
    return tensors


def write(path, tensors, **metadata):
    """Write a safetensors file with metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"} | metadata)


def write_all(folder, autoencoder_state, recogniser_state, state, quality_set):
    """Write the four files of the demo model to the paths where the pack looks for them. quality_set: from
    features.quality_set."""
    prompts, quality_tensors = quality_set
    write(folder / "diffusion_models" / "xdit_demo.safetensors", transformer_tensors(state["transformer"]))
    write(folder / "vae" / "xdit_demo_vae.safetensors", autoencoder_tensors(autoencoder_state))
    write(folder / "xdit_demo_text.safetensors", {name: tensor.half() for name, tensor in state["text"].items()})
    write(folder / "xdit_demo_recogniser.safetensors",
          {name: tensor.half() for name, tensor in recogniser_state.items()} | quality_tensors,
          prompts=json.dumps(prompts))
