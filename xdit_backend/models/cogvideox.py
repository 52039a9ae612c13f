"""CogVideoX from text, and from an image as additional channels: one attention over text and video, text first;
rotary positions."""

import torch

from ..memory.staging import on_device
from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import (
    Packed,
    Unpacked,
    blocks,
    config_of,
    frames_first,
    from_conditioning,
    has,
    optional_size,
    size,
    timestep,
)
from .common.key_mapping import table
from .common.plan import BlockList, ModelPlan, TokenArgument

LATENT, HEAD_SIZE, SPACING, TABLE = Unpacked((1, 2, 2)), 64, 1.875, TokenArgument(0, ("image",))
LEARNED = "patch_embed.pos_embedding"      # table of learned positions, which another family has

KEYS = table(
    (r"^blocks\.", "transformer_blocks."), (r"\.([qkv])\.", r".attn1.to_\1."), (r"\.norm_([qk])\.", r".attn1.norm_\1."),
    (r"\.attn_out\.", ".attn1.to_out.0."), (r"\.ff_proj\.", ".ff.net.0.proj."), (r"\.ff_out\.", ".ff.net.2."),
    (r"^(time|ofs)_embedding_linear_", r"\1_embedding.linear_"))


def is_cogvideox(shapes, num_dims):
    """num_dims: of the weight of the patch projection; 4 if tokens have one frame, 2 if they have two."""
    return has("blocks.0.norm1.linear.weight", "patch_embed.text_proj.weight")(shapes) \
        and len(shapes.get("patch_embed.proj.weight", ())) == num_dims


def rotary(patch, spacing):
    """Rule for cosines and sines of tokens' frames, rows and columns, (tokens, head size) each.

    patch: latent pixels of a token. spacing: distance of rows and columns.
    """
    def tables(call):
        positions = Packed(patch).positions(call) * on_device(torch.tensor([1.0, spacing, spacing]), call.latent.device)
        head = call.config["attention_head_dim"]
        sizes = head // 4, head // 8 * 3, head // 8 * 3
        angles = torch.cat([torch.outer(axis, 1.0 / 10000.0 ** (torch.arange(0, each, 2, device=axis.device) / each))
                            for axis, each in zip(positions.unbind(1), sizes)], 1).repeat_interleave(2, 1)
        return angles.cos(), angles.sin()
    return tables


COGVIDEOX = Family(
    name="CogVideoX", title="CogVideoX", transformer="CogVideoXTransformer3DModel", adapt_model=frames_first,
    keep_in_compute_dtype=("patch_embed",), pixels=lambda config: (4, 8, 8),
    activation_factors={"alone": 13.1, "residual": 3.3, "whole": 7.0, "outside": 3.2, "held": 1.17, "block": 12.0,
                        "exchange": 14.0, "own": 0.9},
    detection=Detection(
        recognise=lambda shapes: is_cogvideox(shapes, 4) and not has(LEARNED)(shapes),
        config=config_of(
            patch_size=2, patch_size_t=None, in_channels=size("patch_embed.proj.weight", 1),
            out_channels=size("proj_out.weight", 0, 4),
            num_attention_heads=size("patch_embed.proj.weight", 0, HEAD_SIZE), attention_head_dim=HEAD_SIZE,
            num_layers=blocks("blocks."), time_embed_dim=size("time_embedding_linear_1.weight", 0),
            text_embed_dim=size("patch_embed.text_proj.weight", 1),
            ofs_embed_dim=optional_size("ofs_embedding_linear_1.weight", 1), use_rotary_positional_embeddings=True,
            use_learned_positional_embeddings=False, sample_width=90, sample_height=60, sample_frames=49),
        convert=KEYS, config_from_tensors=("sample_width", "sample_height", "sample_frames")),
    inputs=Inputs(
        latent=LATENT, conditioning={"context": "text_embed_dim", "ofs": None}, ignored=("y",),
        arguments={"hidden_states": LATENT, "encoder_hidden_states": from_conditioning("context"),
                   "timestep": timestep(), "ofs": from_conditioning("ofs", where="ofs_embed_dim"),
                   "image_rotary_emb": rotary(LATENT.patch, SPACING)}),
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "blocks.", returns=("image", "text")),),
        streams={"hidden_states": "image", "encoder_hidden_states": "text"}, attention={"attn1": ("text", "image")},
        tokens={"image_rotary_emb": TABLE}, cacheable={"norm1.linear": "step", "norm2.linear": "step"},
        cacheable_outside={"patch_embed.text_proj": "run"}),
    testing=SmallConfig(
        {"patch_size": 2, "in_channels": 6, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 16,
         "num_layers": 4, "time_embed_dim": 24, "ofs_embed_dim": 24, "text_embed_dim": 20,
         "use_rotary_positional_embeddings": True},
        "comfy.ldm.cogvideo.model:CogVideoXTransformer3DModel",
        {"in_channels": 16, "out_channels": 16, "num_attention_heads": 2, "attention_head_dim": 64, "num_layers": 3,
         "time_embed_dim": 64, "text_embed_dim": 48, "use_rotary_positional_embeddings": True}))
