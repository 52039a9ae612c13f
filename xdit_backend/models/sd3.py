"""Stable Diffusion 3 and 3.5: two streams, joint attention, image first."""

import math

from .plan import BlockList, Family, ModelPlan, count_blocks, pad_to_patches
from .positions import embedded_patch

HEAD_SIZE = 64


def _config(shapes):
    hidden, channels, patch_size = shapes["x_embedder.proj.weight"][:3]
    dual = {int(name.split(".")[1]) for name in shapes if name.endswith("x_block.attn2.qkv.weight")}
    return {
        "sample_size": 128, "patch_size": patch_size, "in_channels": channels,
        "out_channels": shapes["final_layer.linear.weight"][0] // patch_size ** 2,
        "num_layers": count_blocks(shapes, "joint_blocks."),
        "attention_head_dim": HEAD_SIZE, "num_attention_heads": hidden // HEAD_SIZE,
        "caption_projection_dim": shapes["context_embedder.weight"][0],
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "pooled_projection_dim": shapes["y_embedder.mlp.0.weight"][1],
        "pos_embed_max_size": math.isqrt(shapes["pos_embed"][1]),
        "qk_norm": "rms_norm" if "joint_blocks.0.x_block.attn.ln_q.weight" in shapes else None,
        "dual_attention_layers": tuple(sorted(dual)),
    }


def _convert(tensors, config):
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
    return convert_sd3_transformer_checkpoint_to_diffusers(tensors)


def _inputs(latent, timestep, conditioning, config, patch=None):
    return {"hidden_states": pad_to_patches(latent, (config["patch_size"],) * 2), "timestep": timestep,
            "encoder_hidden_states": conditioning["context"], "pooled_projections": conditioning["y"]}


SD3 = Family(
    name="SD3",
    transformer="SD3Transformer2DModel",
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "joint_blocks.", returns=("text", "image"), image_share=0.5),),
        streams={"hidden_states": "image", "encoder_hidden_states": "text"},
        attention={"attn": ("image", "text"), "attn2": ("image",)},
        once={"norm1.linear": "step", "norm1_context.linear": "step"},
        positions={"pos_embed": embedded_patch},
    ),
    recognise=lambda shapes: "joint_blocks.0.context_block.attn.qkv.weight" in shapes,
    refuse=lambda shapes: "it has a context processor (SD3.5 variants with extra text layers)"
    if any(name.startswith("context_processor.") for name in shapes) else None,
    config=_config,
    convert=_convert,
    inputs=_inputs,
    prediction=lambda output, latent: output[..., :latent.shape[-2], :latent.shape[-1]],
    conditioning=("context", "y"),
)
