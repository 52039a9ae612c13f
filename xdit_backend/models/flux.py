"""Flux.1 (dev, schnell and models of their shape): two streams, then one; joint attention, text first; rotary positions."""

import torch

from .plan import BlockList, Family, ModelPlan, TokenArgument, count_blocks, pad_to_patches

HEAD_SIZE = 128
PATCH = 2                                                     # latent pixels a token has along each side


def _config(shapes):
    hidden, channels = shapes["img_in.weight"]
    return {
        "patch_size": 1, "in_channels": channels, "out_channels": shapes["final_layer.linear.weight"][0],
        "num_layers": count_blocks(shapes, "double_blocks."), "num_single_layers": count_blocks(shapes, "single_blocks."),
        "attention_head_dim": HEAD_SIZE, "num_attention_heads": hidden // HEAD_SIZE,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "axes_dims_rope": (16, 56, 56),
    }


def _convert(tensors, config):
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers
    return convert_flux_transformer_checkpoint_to_diffusers(tensors)


def _inputs(latent, timestep, conditioning, config, patch=None):
    latent = pad_to_patches(latent, (PATCH, PATCH))
    batch, channels, height, width = latent.shape
    rows, columns = height // PATCH, width // PATCH
    # (B, C, rows, PATCH, columns, PATCH) -> (B, rows * columns, C * PATCH * PATCH)
    tokens = latent.view(batch, channels, rows, PATCH, columns, PATCH).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    first_row = patch.start // PATCH if patch else 0
    positions = torch.zeros(rows, columns, 3, device=latent.device)
    positions[..., 1] = first_row + torch.arange(rows, device=latent.device)[:, None]
    positions[..., 2] = torch.arange(columns, device=latent.device)
    text, pooled = conditioning["context"], conditioning.get("y")
    if pooled is None:                                         # as ComfyUI's model does
        pooled = latent.new_zeros(batch, config["pooled_projection_dim"])
    inputs = {"hidden_states": tokens, "timestep": timestep, "encoder_hidden_states": text,
              "pooled_projections": pooled, "img_ids": positions.view(-1, 3),
              "txt_ids": torch.zeros(text.shape[1], 3, device=latent.device)}
    if config["guidance_embeds"]:
        inputs["guidance"] = conditioning["guidance"].expand(batch)
    return inputs


def _prediction(output, latent):
    rows, columns = -(-latent.shape[-2] // PATCH), -(-latent.shape[-1] // PATCH)
    # (B, rows * columns, C * PATCH * PATCH) -> (B, C, rows * PATCH, columns * PATCH)
    picture = output.unflatten(1, (rows, columns)).unflatten(3, (-1, PATCH, PATCH)).permute(0, 3, 1, 4, 2, 5)
    return picture.flatten(4, 5).flatten(2, 3)[..., :latent.shape[-2], :latent.shape[-1]]


def _refuse(shapes):
    if any(".img_mod.lin.weight" in name for name in shapes) and "vector_in.in_layer.weight" not in shapes:
        return "it has no pooled text input (a Flux variant such as Chroma)"
    if shapes["img_in.weight"][0] != 24 * HEAD_SIZE:
        return f"its width is {shapes['img_in.weight'][0]}, and the converter knows {24 * HEAD_SIZE}"
    return None


FLUX = Family(
    name="Flux.1",
    transformer="FluxTransformer2DModel",
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "double_blocks.", returns=("text", "image"), image_share=0.5),
                BlockList("single_transformer_blocks", "single_blocks.", returns=("text", "image"))),
        streams={"hidden_states": "image", "encoder_hidden_states": "text"},
        tokens={"image_rotary_emb": TokenArgument(0, ("text", "image"))},
        attention={"attn": ("text", "image")},
        once={"norm1.linear": "step", "norm1_context.linear": "step", "norm.linear": "step"},
        exact={"time_text_embed": (("timestep", "guidance"), 1000.0)},
    ),
    recognise=lambda shapes: "double_blocks.0.img_attn.norm.key_norm.scale" in shapes
    and "single_blocks.0.linear1.weight" in shapes and "img_in.weight" in shapes
    and len(shapes["img_in.weight"]) == 2 and "double_blocks.0.img_mod.lin.weight" in shapes,
    refuse=_refuse,
    config=_config,
    convert=_convert,
    inputs=_inputs,
    prediction=_prediction,
    conditioning=("context", "y", "guidance"),
    patch_size=lambda config: (PATCH, PATCH),
    num_blocks=lambda config: config["num_layers"] + config["num_single_layers"],
    num_channels=lambda config: config["out_channels"] // PATCH ** 2,
)
