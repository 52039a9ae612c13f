"""PixArt-Sigma: one stream; text by cross-attention; sine positions added before the blocks."""

import math

import torch

from ..protocol.errors import ConfigError
from .plan import BlockList, Family, ModelPlan, count_blocks

NUM_HEADS, PATCH_SIZE = 16, 2

# name in the publisher's file -> names in diffusers; several names: the tensor is cut into as many equal parts
NAMES = {
    "x_embedder.proj": ("pos_embed.proj",),
    "t_embedder.mlp.0": ("adaln_single.emb.timestep_embedder.linear_1",),
    "t_embedder.mlp.2": ("adaln_single.emb.timestep_embedder.linear_2",),
    "t_block.1": ("adaln_single.linear",),
    "y_embedder.y_proj.fc1": ("caption_projection.linear_1",),
    "y_embedder.y_proj.fc2": ("caption_projection.linear_2",),
    "final_layer.linear": ("proj_out",),
}
BLOCK_NAMES = {
    "attn.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "attn.proj": ("attn1.to_out.0",),
    "cross_attn.q_linear": ("attn2.to_q",),
    "cross_attn.kv_linear": ("attn2.to_k", "attn2.to_v"),
    "cross_attn.proj": ("attn2.to_out.0",),
    "mlp.fc1": ("ff.net.0.proj",),
    "mlp.fc2": ("ff.net.2",),
}
UNUSED = ("pos_embed", "y_embedder.y_embedding")              # computed by the model; for training


def _config(shapes):
    hidden, channels = shapes["x_embedder.proj.weight"][:2]
    return {
        "interpolation_scale": _interpolation_scale(shapes), "patch_size": PATCH_SIZE, "in_channels": channels,
        "out_channels": shapes["final_layer.linear.weight"][0] // PATCH_SIZE ** 2,
        "num_layers": count_blocks(shapes, "blocks."),
        "num_attention_heads": NUM_HEADS, "attention_head_dim": hidden // NUM_HEADS, "cross_attention_dim": hidden,
        "caption_channels": shapes["y_embedder.y_proj.fc1.weight"][1],
        "attention_bias": True, "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000,
        "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "norm_eps": 1e-6,
        "use_additional_conditions": False,
    }


def _interpolation_scale(shapes):
    """How many times 512 pixels the model's own size is, as a table of positions in the file tells it; else None."""
    return math.isqrt(shapes["pos_embed"][1]) * PATCH_SIZE // 64 if "pos_embed" in shapes else None


def _convert(tensors, config):
    converted = {"scale_shift_table": tensors["final_layer.scale_shift_table"]}
    for name, tensor in tensors.items():
        if name in UNUSED or name == "final_layer.scale_shift_table":
            continue
        prefix, rest, names = "", name, NAMES
        if name.startswith("blocks."):
            _, index, rest = name.split(".", 2)
            prefix, names = f"transformer_blocks.{index}.", BLOCK_NAMES
        stem, _, kind = rest.rpartition(".")
        targets = [f"{target}.{kind}" for target in names[stem]] if stem in names else [rest]
        for target, part in zip(targets, tensor.chunk(len(targets))):
            converted[prefix + target] = part
    return converted


def _inputs(latent, timestep, conditioning, config, patch=None):
    height, width = patch.whole if patch else latent.shape[2], latent.shape[3]
    if height % PATCH_SIZE or width % PATCH_SIZE or height + width < 66:
        raise ConfigError(f"PixArt-Sigma cannot draw {width * 8} x {height * 8} pixels. Its model takes sides that are multiples of 16, "
                          f"and together at least 528.")
    return {"hidden_states": latent, "timestep": timestep, "encoder_hidden_states": conditioning["context"],
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


def _amend(model, config):
    """Positions as ComfyUI's model computes them: scaled by the latent's size, in the precision of the latent."""
    embed = model.pos_embed
    embed.pos_embed = None                                     # diffusers' forward then embeds alone
    embedded = embed.forward
    embed.forward = lambda latent, patch=None: embedded(latent) + _positions(latent, patch, config)


def _positions(latent, patch, config):
    """Sines of the columns and the rows of a latent or of its patch: (1, tokens, hidden).

    Rows and columns count up to the rounded mean side of the latent, in tokens, divided by the scale: what the file says, else by the
    latent's own size.
    """
    whole = patch.whole if patch else latent.shape[2]
    num_rows, num_columns = whole // PATCH_SIZE, latent.shape[3] // PATCH_SIZE
    side = round((whole + latent.shape[3]) // 2 / 64)          # in units of 512 pixels
    frequencies = _hidden(config) // 4
    dtype, device = latent.dtype, latent.device
    exponents = torch.arange(frequencies, dtype=dtype, device=device) / frequencies

    def sines(count):
        spread = count / (side * 64 // PATCH_SIZE)
        scaled = torch.arange(count, dtype=dtype, device=device) / spread / float(config.get("interpolation_scale") or side)
        angles = scaled[:, None] * (1.0 / 10000 ** exponents)
        return torch.cat([angles.sin(), angles.cos()], 1)      # (count, hidden / 2)

    start = patch.start // PATCH_SIZE if patch else 0
    rows, columns = sines(num_rows)[start:start + latent.shape[2] // PATCH_SIZE], sines(num_columns)
    shape = (len(rows), len(columns), -1)
    return torch.cat([columns.expand(shape), rows[:, None].expand(shape)], 2).flatten(0, 1)[None]


def _hidden(config):
    return config["num_attention_heads"] * config["attention_head_dim"]


def _refuse(shapes):
    if "ar_embedder.mlp.0.weight" in shapes:
        return "it takes the picture's size as an input (PixArt-Alpha); PixArt-Sigma models work"
    if _interpolation_scale(shapes) == 0:
        return "its table of positions is of less than 512 pixels, for which ComfyUI's model has no positions either"
    return None


PIXART = Family(
    name="PixArt-Sigma",
    transformer="PixArtTransformer2DModel",
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "blocks."),),
        streams={"hidden_states": "image"},
        attention={"attn1": ("image",)},
        once={"attn2.to_k": "run", "attn2.to_v": "run"},
        positions={"pos_embed": lambda module, forward, latent, patch: forward(latent, patch)},
    ),
    recognise=lambda shapes: "t_block.1.weight" in shapes and "y_embedder.y_proj.fc1.weight" in shapes,
    refuse=_refuse,
    config=_config,
    convert=_convert,
    amend=_amend,
    inputs=_inputs,
    prediction=lambda output, latent: output[:, :latent.shape[1]],
    conditioning=("context",),
    ignored=("c_size", "c_ar"),
    num_channels=lambda config: config["in_channels"],         # the other half is the variance, which nothing uses
)
