"""Flux.1: two streams, then one; joint attention, text first; rotary positions. Images as additional channels, or as
references."""

import torch

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.forward_state import ForwardValue
from .common.inputs import Packed, blocks, config_of, from_conditioning, has, size, timestep
from .common.key_mapping import SWAPPED, table
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.tp_plan import PARALLEL_MLP

LATENT, IMAGE, ALL = Packed((2, 2), "offset"), ("image", "reference"), ("text", "image", "reference")
NORM = "double_blocks.0.img_attn.norm.key_norm."
BLOCKS = has(NORM, "single_blocks.0.linear1.weight", "double_blocks.0.img_mod.lin.weight")

KEYS = table(
    (r"^time_in\.", "time_text_embed.timestep_embedder."), (r"^guidance_in\.", "time_text_embed.guidance_embedder."),
    (r"^vector_in\.", "time_text_embed.text_embedder."), (r"^txt_in\.", "context_embedder."),
    (r"^img_in\.", "x_embedder."),
    (r"\.in_layer\.", ".linear_1."), (r"\.out_layer\.", ".linear_2."),
    (r"\.img_mod\.lin\.", ".norm1.linear."), (r"\.txt_mod\.lin\.", ".norm1_context.linear."),
    (r"\.modulation\.lin\.", ".norm.linear."),
    (r"\.img_attn\.qkv\.", (".attn.to_q.", ".attn.to_k.", ".attn.to_v."), (1, 1, 1)),
    (r"\.txt_attn\.qkv\.", (".attn.add_q_proj.", ".attn.add_k_proj.", ".attn.add_v_proj."), (1, 1, 1)),
    (r"\.linear1\.", (".attn.to_q.", ".attn.to_k.", ".attn.to_v.", ".proj_mlp."), (1, 1, 1, 4)),
    (r"\.txt_attn\.norm\.(q|k)(?:uery|ey)_norm\.(?:scale|weight)$", r".attn.norm_added_\1.weight"),
    (r"(?:\.img_attn)?\.norm\.(q|k)(?:uery|ey)_norm\.(?:scale|weight)$", r".attn.norm_\1.weight"),
    (r"\.img_attn\.proj\.", ".attn.to_out.0."), (r"\.txt_attn\.proj\.", ".attn.to_add_out."),
    (r"\.linear2\.", ".proj_out."),
    (r"\.img_mlp\.0\.", ".ff.net.0.proj."), (r"\.img_mlp\.2\.", ".ff.net.2."),
    (r"\.txt_mlp\.0\.", ".ff_context.net.0.proj."), (r"\.txt_mlp\.2\.", ".ff_context.net.2."),
    (r"^double_blocks\.", "transformer_blocks."), (r"^single_blocks\.", "single_transformer_blocks."),
    (r"^final_layer\.linear\.", "proj_out."), (r"^final_layer\.adaLN_modulation\.1\.", "norm_out.linear.", SWAPPED))


def _head_size(shapes):
    """Size of an attention head. Files saved by ComfyUI call the scale of a norm its weight."""
    return next(shapes[NORM + leaf][0] for leaf in ("scale", "weight") if NORM + leaf in shapes)


def _adapt(model, config):
    """Allow a workflow to disable guidance, as ComfyUI's model does, and insert style tokens before the text's."""
    embed, styles = model.time_text_embed, ForwardValue(model)
    forward, run, of_text = embed.forward, model.forward, model.context_embedder.forward

    def styled(*, style=None, **inputs):
        styles.set(style)
        return run(**inputs)

    def with_style(text):
        style = styles.get()
        return of_text(text) if style is None else torch.cat([style, of_text(text)], 1)
    model.forward, model.context_embedder.forward = styled, with_style

    def embedded(timestep, *guidance_and_text):
        if len(guidance_and_text) == 2 or not config["guidance_embeds"]:
            return forward(timestep, *guidance_and_text)
        text, = guidance_and_text
        return embed.timestep_embedder(embed.time_proj(timestep).to(text.dtype)) + embed.text_embedder(text)
    embed.forward = embedded


def _num_texts(conditioning):
    return conditioning["context"].shape[1] + (conditioning["style"].shape[1] if "style" in conditioning else 0)


def _text_positions(call):
    """Positions of style and text tokens, (T, 3): all zero."""
    return torch.zeros(_num_texts(call.conditioning), 3, device=call.latent.device)


def _pooled(call):
    """The pooled text, truncated to the model's width as in ComfyUI."""
    return from_conditioning("y", else_zeros="pooled_projection_dim")(call)[:, :call.config["pooled_projection_dim"]]


FLUX = Family(
    name="Flux.1", title="Flux.1 dev, schnell, Krea, Kontext, Fill, Canny, Depth", transformer="FluxTransformer2DModel",
    cfg="at cfg above 1", adapt_model=_adapt,
    num_channels=lambda config: (config.get("out_channels") or config["in_channels"]) // 4,
    activation_factors={"alone": 17.4, "residual": 3.4, "whole": 7.9, "outside": 3.3, "held": 0.5, "block": 17.3,
                        "exchange": 18.8, "own": 0.0},
    detection=Detection(
        recognise=lambda shapes: BLOCKS(shapes) and has("vector_in.")(shapes) and len(shapes.get("img_in.weight",
                                                                                                 ())) == 2,
        config=config_of(
            patch_size=1, in_channels=size("img_in.weight", 1), out_channels=size("final_layer.linear.weight", 0),
            num_layers=blocks("double_blocks."), num_single_layers=blocks("single_blocks."),
            attention_head_dim=_head_size,
            num_attention_heads=lambda shapes: shapes["img_in.weight"][0] // _head_size(shapes),
            joint_attention_dim=size("txt_in.weight", 1), pooled_projection_dim=size("vector_in.in_layer.weight", 1),
            guidance_embeds=has("guidance_in.in_layer.weight"), axes_dims_rope=(16, 56, 56)),
        convert=KEYS),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0,
        conditioning={"context": "joint_attention_dim", "y": "pooled_projection_dim", "guidance": None,
                      "ref_latents": None, "ref_latents_method": None, "style": None, "rope_scales": None},
        choices={"ref_latents_method": {word: word for word in ("offset", "index", "uxo")}},
        lengths={"text": _num_texts, "reference": LATENT.num_reference_tokens},
        arguments={"hidden_states": LATENT, "timestep": timestep(),
                   "encoder_hidden_states": from_conditioning("context"),
                   "pooled_projections": _pooled, "guidance": from_conditioning("guidance", where="guidance_embeds"),
                   "img_ids": LATENT.positions, "txt_ids": _text_positions, "style": from_conditioning("style")}),
    plan=ModelPlan(
        tp_plan=PARALLEL_MLP, takes_output_patches=True, cached_references="reference",
        blocks=(BlockList("transformer_blocks", "double_blocks.", returns=("text", IMAGE), image_fraction=0.5,
                          control="input", patched="double"),
                BlockList("single_transformer_blocks", "single_blocks.", "num_single_layers", returns=("text", IMAGE),
                          control="output", patched="single")),
        streams={"hidden_states": IMAGE, "encoder_hidden_states": "text"}, attention={"attn": ALL},
        tokens={"image_rotary_emb": TokenArgument(0, ALL)},
        full_precision_inputs={"time_text_embed": (("timestep", "guidance"), 1000.0)},
        cacheable={"norm1.linear": "step", "norm1_context.linear": "step", "norm.linear": "step"},
        cacheable_outside={"context_embedder": "run"}),
    testing=SmallConfig(
        {"patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
         "num_attention_heads": 4, "joint_attention_dim": 24, "pooled_projection_dim": 16, "guidance_embeds": True,
         "axes_dims_rope": (4, 4, 8)},
        "comfy.ldm.flux.model:Flux",
        {"image_model": "flux", "in_channels": 16, "out_channels": 16, "patch_size": 2, "vec_in_dim": 32,
         "context_in_dim": 64, "hidden_size": 256, "mlp_ratio": 4.0, "num_heads": 2, "depth": 2,
         "depth_single_blocks": 2, "axes_dim": [16, 56, 56], "theta": 10000, "qkv_bias": True, "guidance_embed": True,
         "txt_ids_dims": []}))
