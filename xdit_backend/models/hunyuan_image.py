"""HunyuanImage 2.1: HunyuanVideo's blocks for images. Two streams, then one; joint attention, image first; text and
glyph features."""

import torch

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import (
    Unpacked,
    all_text,
    blocks,
    compute_dtype_of,
    config_of,
    from_conditioning,
    has,
    needs_diffusers,
    optional_size,
    size,
    timestep,
)
from .common.key_mapping import table
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.position_slicing import Cut
from .common.tp_plan import PARALLEL_MLP
from .hunyuan_video import KEYS as SHARED_KEYS

LATENT, BOTH, TABLE = Unpacked((1, 1)), ("image", "text"), TokenArgument(0, ("image",))

KEYS = table(                                                  # applied after HunyuanVideo's table
    (r"^time_text_embed\.(timestep|guidance)_embedder\.", r"time_guidance_embed.\1_embedder."),
    (r"^time_r_in\.linear_", "time_guidance_embed.timestep_embedder_r.linear_"),
    (r"^byt5_in\.layernorm\.", "context_embedder_2.norm."), (r"^byt5_in\.fc(\d)\.", r"context_embedder_2.linear_\1."))


def is_image(shapes):
    """Whether these are HunyuanVideo's blocks without the modules that only video models have."""
    return has("txt_in.individual_token_refiner.blocks.0.norm1.weight", "img_in.proj.weight")(shapes) \
        and not has("vision_in.")(shapes) and not has("vector_in.")(shapes)


def is_distilled(shapes):
    """Whether the model is conditioned on the timestep of the next step, or on guidance."""
    return has("time_r_in.")(shapes) or has("guidance_in.")(shapes)


def is_of_rows_and_columns(shapes):
    """Whether it is such a model and not the refiner, which takes frames."""
    return is_image(shapes) and len(shapes["img_in.proj.weight"]) != 5


def _recognise(shapes):
    return is_of_rows_and_columns(shapes) and not is_distilled(shapes)


def _all_glyphs(call):
    glyphs = from_conditioning("txt_byt5")(call)
    return None if glyphs is None else torch.ones(glyphs.shape[:2], dtype=torch.bool, device=glyphs.device)


def _num_text_tokens(conditioning):
    return sum(conditioning[name].shape[1] for name in ("context", "txt_byt5") if name in conditioning)


def _adapt(model, config):
    """Compute the sinusoids of timestep and guidance in the compute dtype; diffusers uses the dtype of the timestep.
    Allow a workflow to disable guidance."""
    embed, dtype = model.time_guidance_embed, compute_dtype_of(model)

    def sines(times):
        return embed.time_proj(times).to(dtype())

    def embedded(times, timestep_r=None, guidance=None):
        found = embed.timestep_embedder(sines(times))
        if timestep_r is not None:
            found = (found + embed.timestep_embedder_r(sines(timestep_r))) / 2
        return found if guidance is None else found + embed.guidance_embedder(sines(guidance))
    embed.forward = embedded


HUNYUAN_IMAGE = Family(
    name="HunyuanImage", title="HunyuanImage 2.1", transformer="HunyuanImageTransformer2DModel", adapt_model=_adapt,
    pixels=lambda config: (1, 32, 32),
    activation_factors={"alone": 17.0, "residual": 4.7, "whole": 8.0, "outside": 4.9, "held": 0.35, "block": 16.6,
                        "exchange": 20.0, "own": 0.0},
    detection=Detection(
        recognise=_recognise, refusals=(needs_diffusers("0.36"),),
        config=config_of(
            patch_size=lambda shapes: list(shapes["img_in.proj.weight"][2:]), in_channels=size("img_in.proj.weight", 1),
            out_channels=size("final_layer.linear.weight", 0), num_attention_heads=size("img_in.proj.weight", 0, 128),
            attention_head_dim=128, num_layers=blocks("double_blocks."), num_single_layers=blocks("single_blocks."),
            num_refiner_layers=blocks("txt_in.individual_token_refiner.blocks."), guidance_embeds=False,
            text_embed_dim=size("txt_in.input_embedder.weight", 1),
            text_embed_2_dim=optional_size("byt5_in.fc1.weight", 1), rope_axes_dim=(64, 64), use_meanflow=False),
        convert=lambda tensors, config: KEYS(SHARED_KEYS(tensors, config), config)),
    inputs=Inputs(
        latent=LATENT, conditioning={"context": "text_embed_dim", "txt_byt5": "text_embed_2_dim"},
        ignored=("y", "guidance"), lengths={"text": _num_text_tokens},
        arguments={"hidden_states": LATENT, "timestep": timestep(),
                   "encoder_hidden_states": from_conditioning("context"),
                   "encoder_attention_mask": all_text, "encoder_attention_mask_2": _all_glyphs,
                   "encoder_hidden_states_2": from_conditioning("txt_byt5", where="text_embed_2_dim")}),
    plan=ModelPlan(
        tp_plan=PARALLEL_MLP,
        blocks=(BlockList("transformer_blocks", "double_blocks.", returns=BOTH, image_fraction=0.5, control="input",
                          patched="double"),
                BlockList("single_transformer_blocks", "single_blocks.", "num_single_layers", returns=BOTH,
                          control="output", patched="single")),
        streams={"hidden_states": "image", "encoder_hidden_states": "text"}, attention={"attn": BOTH}, needs_text=True,
        tokens={"image_rotary_emb": TABLE}, masks={"attention_mask": ()}, positions={"rope": Cut(TABLE)},
        cacheable={"norm1.linear": "step", "norm1_context.linear": "step", "norm.linear": "step"},
        cacheable_outside={"context_embedder": "step", "context_embedder_2": "run"}, takes_output_patches=True),
    testing=SmallConfig(
        {"patch_size": (1, 1), "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 2,
         "num_attention_heads": 4, "attention_head_dim": 16, "num_refiner_layers": 1, "text_embed_dim": 24,
         "text_embed_2_dim": 20, "rope_axes_dim": (8, 8)},
        "comfy.ldm.hunyuan_video.model:HunyuanVideo",
        {"in_channels": 64, "out_channels": 64, "vec_in_dim": None, "context_in_dim": 48, "hidden_size": 256,
         "mlp_ratio": 4.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2, "axes_dim": [64, 64], "theta": 256,
         "patch_size": [1, 1], "qkv_bias": True, "guidance_embed": False, "byt5": True, "meanflow": False,
         "meanflow_sum": False, "vision_in_dim": None, "use_cond_type_embedding": False}))
