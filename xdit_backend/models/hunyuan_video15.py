"""HunyuanVideo 1.5: two streams, image first; the text stream has CLIP vision tokens, glyph features and text. An
input image is additional channels."""

import torch

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import (
    Unpacked,
    all_text,
    because,
    blocks,
    compute_dtype_of,
    config_of,
    from_conditioning,
    has,
    needs_diffusers,
    size,
    timestep,
)
from .common.key_mapping import table
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.position_slicing import Cut
from .hunyuan_video import KEYS as SHARED_KEYS

LATENT, BOTH, TABLE = Unpacked((1, 1, 1)), ("image", "text"), TokenArgument(0, ("image",))
NAMES = has("txt_in.individual_token_refiner.blocks.0.norm1.weight", "vision_in.proj.0.weight", "byt5_in.fc1.weight")

KEYS = table(                                                  # applied after HunyuanVideo's table
    (r"^time_text_embed\.timestep_embedder\.", "time_embed.timestep_embedder."),
    (r"^time_r_in\.linear_", "time_embed.timestep_embedder_r.linear_"),
    (r"^cond_type_embedding\.", "cond_type_embed."),
    (r"^byt5_in\.layernorm\.", "context_embedder_2.norm."), (r"^byt5_in\.fc(\d)\.", r"context_embedder_2.linear_\1."),
    (r"^vision_in\.proj\.0\.", "image_embedder.norm_in."), (r"^vision_in\.proj\.1\.", "image_embedder.linear_1."),
    (r"^vision_in\.proj\.3\.", "image_embedder.linear_2."), (r"^vision_in\.proj\.4\.", "image_embedder.norm_out."))

def _or_no_tokens(name, width):
    """Rule for a conditioning (B, T, C); zero tokens without it."""
    rule = from_conditioning(name)

    def tokens(call):
        found = rule(call)
        return call.latent.new_zeros(len(call.latent), 0, call.config[width]) if found is None else found
    return tokens


def _all_glyphs(call):
    glyphs = call.conditioning.get("txt_byt5")
    return torch.ones(len(call.latent), 0 if glyphs is None else glyphs.shape[1], dtype=torch.bool,
                      device=call.latent.device)


def _num_text_tokens(conditioning):
    return sum(conditioning[name].shape[1] for name in ("context", "txt_byt5", "clip_fea") if name in conditioning)


def _adapt(model, config):
    """Compute the sinusoids of the timestep in the compute dtype, and attend without diffusers' square mask of all
    tokens, which masks none here."""
    from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
    embed, dtype = model.time_embed, compute_dtype_of(model)

    def embedded(times, timestep_r=None):
        found = embed.timestep_embedder(embed.time_proj(times).to(dtype()))
        return (found if timestep_r is None
                else found + embed.timestep_embedder_r(embed.time_proj(timestep_r).to(dtype())))
    embed.forward = embedded

    def without_mask(forward):
        return lambda attention_mask=None, **arguments: forward(**arguments)
    for block in model.transformer_blocks:
        block.attn.set_processor(HunyuanVideoAttnProcessor2_0())
        block.attn.forward = without_mask(block.attn.forward)


HUNYUAN_VIDEO15 = Family(
    name="HunyuanVideo 1.5", title="HunyuanVideo 1.5 text- and image-to-video",
    transformer="HunyuanVideo15Transformer3DModel", adapt_model=_adapt, keep_in_compute_dtype=("cond_type_embed",),
    pixels=lambda config: (4, 16, 16),
    activation_factors={"alone": 12.3, "residual": 4.4, "whole": 7.4, "outside": 3.3, "held": 1.3, "block": 11.9,
                        "exchange": 14.1, "own": 0.0},
    detection=Detection(
        recognise=lambda shapes: NAMES(shapes) and not has("time_r_in.")(shapes),
        refusals=(because("it takes guidance as an input", has("guidance_in.")), needs_diffusers("0.36")),
        config=config_of(
            patch_size=1, patch_size_t=1, in_channels=size("img_in.proj.weight", 1),
            out_channels=size("final_layer.linear.weight", 0),
            num_attention_heads=size("img_in.proj.weight", 0, 128), attention_head_dim=128,
            num_layers=blocks("double_blocks."), num_refiner_layers=blocks("txt_in.individual_token_refiner.blocks."),
            text_embed_dim=size("txt_in.input_embedder.weight", 1),
            text_embed_2_dim=size("byt5_in.fc1.weight", 1), image_embed_dim=size("vision_in.proj.0.weight", 0),
            rope_axes_dim=(16, 56, 56), use_meanflow=False),
        convert=lambda tensors, config: KEYS(SHARED_KEYS(tensors, config), config)),
    inputs=Inputs(
        latent=LATENT,
        conditioning={"context": "text_embed_dim", "txt_byt5": "text_embed_2_dim", "clip_fea": "image_embed_dim"},
        ignored=("y", "guidance"), lengths={"text": _num_text_tokens},
        arguments={"hidden_states": LATENT, "timestep": timestep(),
                   "encoder_hidden_states": from_conditioning("context"),
                   "encoder_attention_mask": all_text, "encoder_attention_mask_2": _all_glyphs,
                   "encoder_hidden_states_2": _or_no_tokens("txt_byt5", "text_embed_2_dim"),
                   "image_embeds": _or_no_tokens("clip_fea", "image_embed_dim")}),
    plan=ModelPlan(
        takes_output_patches=True,
        blocks=(BlockList("transformer_blocks", "double_blocks.", returns=BOTH, image_fraction=0.5,
                          control="input", patched="double"),),
        streams={"hidden_states": "image", "encoder_hidden_states": "text"}, attention={"attn": BOTH}, needs_text=True,
        tokens={"freqs_cis": TABLE}, masks={"attention_mask": ()}, positions={"rope": Cut(TABLE)},
        cacheable={"norm1.linear": "step", "norm1_context.linear": "step"},
        cacheable_outside={"context_embedder": "step", "context_embedder_2": "run", "image_embedder": "run"}),
    testing=SmallConfig(
        {"patch_size": 1, "patch_size_t": 1, "in_channels": 9, "out_channels": 4, "num_layers": 4,
         "num_attention_heads": 4, "attention_head_dim": 16, "num_refiner_layers": 1, "text_embed_dim": 24,
         "text_embed_2_dim": 20, "image_embed_dim": 12, "rope_axes_dim": (4, 6, 6)},
        "comfy.ldm.hunyuan_video.model:HunyuanVideo",
        {"in_channels": 65, "out_channels": 32, "vec_in_dim": None, "context_in_dim": 48, "hidden_size": 256,
         "mlp_ratio": 4.0, "num_heads": 2, "depth": 3, "depth_single_blocks": 0, "axes_dim": [16, 56, 56], "theta": 256,
         "patch_size": [1, 1, 1], "qkv_bias": True, "guidance_embed": False, "byt5": True, "meanflow": False,
         "use_cond_type_embedding": True, "vision_in_dim": 1152, "meanflow_sum": True}))
