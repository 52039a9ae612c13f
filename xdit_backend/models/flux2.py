"""Flux.2: two streams, then one sequence, text first; modulation shared by all blocks; rotary positions with four
axes; references."""

import functools

import torch
import torch.nn.functional as F

from ..protocol.errors import ConfigError
from .common.family import Detection, Family, Inputs, SmallConfig
from .common.forward_state import ForwardValue
from .common.inputs import Packed, blocks, config_of, from_conditioning, has, needs_diffusers, size, timestep
from .common.key_mapping import SWAPPED, table
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.reference_latents import AT_ZERO, at_zero
from .common.rope_scaling import scales_and_shifts
from .common.tp_plan import COLWISE, ROWWISE, Fused, into, parent_of

LATENT, IMAGE, ALL = Packed((1, 1), "index", 10), ("image", "reference"), ("text", "image", "reference")

KEYS = table(
    (r"^time_in\.", "time_guidance_embed.timestep_embedder."),
    (r"^guidance_in\.", "time_guidance_embed.guidance_embedder."),
    (r"\.in_layer\.", ".linear_1."), (r"\.out_layer\.", ".linear_2."), (r"^txt_in\.", "context_embedder."),
    (r"^img_in\.", "x_embedder."),
    (r"_modulation(\w*)\.lin\.", r"_modulation\1.linear."),
    (r"\.img_attn\.qkv\.", (".attn.to_q.", ".attn.to_k.", ".attn.to_v."), (1, 1, 1)),
    (r"\.txt_attn\.qkv\.", (".attn.add_q_proj.", ".attn.add_k_proj.", ".attn.add_v_proj."), (1, 1, 1)),
    (r"\.txt_attn\.norm\.(q|k)(?:uery|ey)_norm\.(?:scale|weight)$", r".attn.norm_added_\1.weight"),
    (r"(?:\.img_attn)?\.norm\.(q|k)(?:uery|ey)_norm\.(?:scale|weight)$", r".attn.norm_\1.weight"),
    (r"\.img_attn\.proj\.", ".attn.to_out.0."), (r"\.txt_attn\.proj\.", ".attn.to_add_out."),
    (r"\.img_mlp\.0\.", ".ff.linear_in."), (r"\.img_mlp\.2\.", ".ff.linear_out."),
    (r"\.txt_mlp\.0\.", ".ff_context.linear_in."),
    (r"\.txt_mlp\.2\.", ".ff_context.linear_out."), (r"\.linear1\.", ".attn.to_qkv_mlp_proj."),
    (r"\.linear2\.", ".attn.to_out."),
    (r"^double_blocks\.", "transformer_blocks."), (r"^single_blocks\.", "single_transformer_blocks."),
    (r"^final_layer\.linear\.", "proj_out."), (r"^final_layer\.adaLN_modulation\.1\.", "norm_out.linear.", SWAPPED))


def _adapt(model, config):
    """Embed timesteps unrounded, as in ComfyUI. References are at the latent's timestep, or at timestep zero."""
    embed, forward, now, num_images = model.time_guidance_embed, model.forward, [], ForwardValue(model)

    def timed(*, at_zero, timestep, guidance, **inputs):
        if at_zero:
            timestep = torch.cat([timestep, torch.zeros_like(timestep)])
            guidance = None if guidance is None else torch.cat([guidance, guidance])
        now[:] = [timestep, guidance]
        num_images.set(len(inputs["hidden_states"]))
        return forward(timestep=timestep, guidance=guidance, **inputs)

    def embedded(rounded, guidance):
        sines = [None if each is None else embed.time_proj(1000 * each).to(rounded.dtype) for each in now]
        time = embed.timestep_embedder(sines[0])
        return time if guidance is None or embed.guidance_embedder is None else time + embed.guidance_embedder(sines[1])
    embed.forward, model.forward = embedded, timed
    text, last = model.double_stream_modulation_txt.forward, model.norm_out.forward
    model.double_stream_modulation_txt.forward = lambda temb: text(temb[:num_images.get()])
    # the output of references is dropped
    model.norm_out.forward = lambda hidden_states, temb: last(hidden_states, temb[:len(hidden_states)])
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        block.forward = _at_two_times(block.forward)


def _at_two_times(forward):
    """Wrap a block's forward for tokens at two timesteps. References use the second half of the modulations; they
    alone have a position other than 0 along the first axis, and so a sine other than 0 there."""
    @functools.wraps(forward)
    def timed(*, hidden_states, image_rotary_emb, **arguments):
        name = "temb_mod_img" if "temb_mod_img" in arguments else "temb_mod"
        if len(arguments[name]) > len(hidden_states):
            image, zero = arguments[name][:, None].chunk(2)
            is_reference = image_rotary_emb[1][-hidden_states.shape[1]:, :1] != 0
            arguments[name] = torch.where(is_reference, zero, image)
        return forward(hidden_states=hidden_states, image_rotary_emb=image_rotary_emb, **arguments)
    return timed


def _text_positions(call):
    """Positions of the text tokens, (T, 4), counted along the axis that images do not use."""
    count = call.conditioning["context"].shape[1]
    return F.pad(torch.arange(float(count), device=call.latent.device)[:, None], (3, 0))


def _image_positions(call):
    """Positions of the image tokens, (T, 4). References at timestep zero are recognised by their position along the
    first axis, so that the image must be at 0. Raises ConfigError otherwise."""
    if "rope_scales" in call.conditioning and at_zero(call.conditioning, LATENT.method):
        if scales_and_shifts(call.conditioning["rope_scales"])[0, 1]:
            raise ConfigError("Set shift_t of Scale ROPE to 0: xDiT recognises the tokens of Flux.2's reference images "
                              "at timestep 0, which this workflow uses, by these positions.")
    return F.pad(LATENT.positions(call), (0, 1))


def _attention_and_mlp(block, path, linear):
    """Queries, keys, values, and the gated feed-forward's two halves."""
    attention = parent_of(block, path)
    return (attention.inner_dim,) * 3 + (attention.mlp_hidden_dim,) * attention.mlp_mult_factor


def _of_both(block, path, linear):
    inner = parent_of(block, path).inner_dim
    return inner, linear.in_features - inner


TP_PLAN = {"ff*.linear_in": into("linear_in", "linear_out"), "ff*.linear_out": ROWWISE,
           "attn.to_qkv_mlp_proj": Fused(COLWISE, _attention_and_mlp), "attn.to_out": Fused(ROWWISE, _of_both)}

FLUX2 = Family(
    name="Flux.2", title="Flux.2 dev, klein", transformer="Flux2Transformer2DModel", adapt_model=_adapt,
    pixels=lambda config: (1, 16, 16),
    activation_factors={"alone": 21.7, "narrowing": 0.95, "residual": 3.8, "whole": 8.2, "outside": 4.4, "held": 1.55,
                        "block": 20.0, "exchange": 22.2, "own": 0.0},
    detection=Detection(
        recognise=has("double_stream_modulation_img.lin.weight", "double_blocks.0.img_attn.qkv.weight"),
        refusals=(needs_diffusers("0.37"),),
        config=config_of(
            patch_size=1, in_channels=size("img_in.weight", 1), out_channels=size("final_layer.linear.weight", 0),
            num_layers=blocks("double_blocks."), num_single_layers=blocks("single_blocks."), attention_head_dim=128,
            num_attention_heads=size("img_in.weight", 0, 128), joint_attention_dim=size("txt_in.weight", 1),
            mlp_ratio=3.0,
            rope_theta=2000, guidance_embeds=has("guidance_in.in_layer.weight"), axes_dims_rope=(32, 32, 32, 32)),
        convert=KEYS),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0,
        conditioning={"context": "joint_attention_dim", "guidance": None, "ref_latents": None,
                      "ref_latents_method": None, "rope_scales": None},
        ignored=("y",), choices={"ref_latents_method": {word: word for word in ("index", "offset", "uxo", AT_ZERO)}},
        lengths={"reference": LATENT.num_reference_tokens},
        arguments={"hidden_states": LATENT, "timestep": timestep(),
                   "encoder_hidden_states": from_conditioning("context"),
                   "guidance": from_conditioning("guidance", where="guidance_embeds"), "img_ids": _image_positions,
                   "txt_ids": _text_positions, "at_zero": lambda call: at_zero(call.conditioning, LATENT.method)}),
    plan=ModelPlan(
        takes_output_patches=True, cached_references="reference",
        blocks=(BlockList("transformer_blocks", "double_blocks.", returns=("text", IMAGE), image_fraction=0.5,
                          control="input", patched="double",
                          streams={"hidden_states": IMAGE, "encoder_hidden_states": "text"}),
                BlockList("single_transformer_blocks", "single_blocks.", "num_single_layers", returns=(ALL,),
                          control="output", patched="single")),
        streams={"hidden_states": ALL}, attention={"attn": ALL}, tokens={"image_rotary_emb": TokenArgument(0, ALL)},
        tp_plan=TP_PLAN, cacheable_outside={"context_embedder": "run"} | dict.fromkeys(
            ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation"), "step")),
    testing=SmallConfig(
        {"patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
         "num_attention_heads": 4, "joint_attention_dim": 24, "axes_dims_rope": (4, 4, 4, 4), "guidance_embeds": True},
        "comfy.ldm.flux.model:Flux",
        {"image_model": "flux2", "in_channels": 128, "out_channels": 128, "patch_size": 1, "vec_in_dim": None,
         "context_in_dim": 64, "hidden_size": 256, "mlp_ratio": 3.0, "num_heads": 2, "depth": 2,
         "depth_single_blocks": 2, "axes_dim": [32, 32, 32, 32], "theta": 2000, "qkv_bias": False,
         "guidance_embed": True, "txt_ids_dims": [3], "global_modulation": True, "mlp_silu_act": True,
         "ops_bias": False, "default_ref_method": "index", "ref_index_scale": 10.0}))
