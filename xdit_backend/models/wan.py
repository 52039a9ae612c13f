"""Wan 2.1 text-to-video: one stream over frames, rows and columns; text by cross-attention; rotary positions."""

from .plan import BlockList, Family, ModelPlan, TokenArgument, count_blocks, pad_to_patches
from .positions import rotary_patch

HEAD_SIZE = 128
PATCH_SIZE = (1, 2, 2)


def _config(shapes):
    hidden, channels = shapes["patch_embedding.weight"][:2]
    return {
        "patch_size": PATCH_SIZE, "in_channels": channels,
        "out_channels": shapes["head.head.weight"][0] // 4,
        "num_attention_heads": hidden // HEAD_SIZE, "attention_head_dim": HEAD_SIZE,
        "text_dim": shapes["text_embedding.0.weight"][1], "freq_dim": shapes["time_embedding.0.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.0.weight"][0], "num_layers": count_blocks(shapes, "blocks."),
        "cross_attn_norm": "blocks.0.norm3.weight" in shapes,
    }


def _convert(tensors, config):
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
    return convert_wan_transformer_to_diffusers(tensors)


def _inputs(latent, timestep, conditioning, config, patch=None):
    return {"hidden_states": pad_to_patches(latent, PATCH_SIZE), "timestep": timestep,
            "encoder_hidden_states": conditioning["context"]}


def _refuse(shapes):
    if shapes["patch_embedding.weight"][1] != shapes["head.head.weight"][0] // 4 or "img_emb.proj.0.bias" in shapes:
        return "it takes pictures as well (image-to-video); text-to-video models work"
    extra = sorted({name.split(".")[0] for name in shapes} - {
        "patch_embedding", "text_embedding", "time_embedding", "time_projection", "blocks", "head", "scaled_fp8"})
    return f"it has parts that text-to-video models lack ({', '.join(extra)})" if extra else None


WAN = Family(
    name="Wan 2.1",
    transformer="WanTransformer3DModel",
    plan=ModelPlan(
        blocks=(BlockList("blocks", "blocks."),),
        streams={"hidden_states": "image"},
        tokens={"rotary_emb": TokenArgument(1, ("image",))},
        attention={"attn1": ("image",)},
        positions={"rope": rotary_patch},
    ),
    recognise=lambda shapes: "blocks.0.self_attn.norm_q.weight" in shapes and "head.modulation" in shapes
    and "patch_embedding.weight" in shapes,
    refuse=_refuse,
    config=_config,
    convert=_convert,
    inputs=_inputs,
    prediction=lambda output, latent: output[..., :latent.shape[-2], :latent.shape[-1]],
    conditioning=("context",),
    patch_size=lambda config: tuple(config["patch_size"]),
)
