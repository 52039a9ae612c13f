"""Krea 2: one sequence, text first. The text is hidden states of several layers, which are fused first;
grouped-query attention; references."""

import functools

import torch
import torch.nn.functional as F

from ..protocol.errors import ConfigError
from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import (
    Packed,
    blocks,
    config_of,
    from_conditioning,
    full_shape,
    has,
    needs_diffusers,
    size,
    timestep,
)
from .common.key_mapping import table
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.reference_latents import AT_ZERO, at_zero
from .common.tp_plan import COLWISE, ROWWISE, styled

LATENT, ALL = Packed((1, 2, 2)), ("text", "image", "reference")
NORM, OF_TEXT = ".attn.qknorm.qnorm.scale", "txtfusion.layerwise_blocks.0"
HEAD_SIZE = size(f"blocks.0{NORM}", 0)

KEYS = table(
    (r"^first\.", "img_in."), (r"^tmlp\.0\.", "time_embed.linear_1."), (r"^tmlp\.2\.", "time_embed.linear_2."),
    (r"^tproj\.1\.", "time_mod_proj."), (r"^txtmlp\.0\.scale$", "txt_in.norm.weight"),
    (r"^txtmlp\.1\.", "txt_in.linear_1."),
    (r"^txtmlp\.3\.", "txt_in.linear_2."), (r"^txtfusion\.", "text_fusion."), (r"^blocks\.", "transformer_blocks."),
    (r"^last\.norm\.scale$", "final_layer.norm.weight"), (r"^last\.linear\.", "final_layer.linear."),
    (r"^last\.modulation\.lin$", "final_layer.scale_shift_table"), (r"\.mod\.lin$", ".scale_shift_table"),
    (r"\.attn\.w([qkv])\.", r".attn.to_\1."), (r"\.attn\.wo\.", ".attn.to_out.0."),
    (r"\.attn\.gate\.", ".attn.to_gate."),
    (r"\.qknorm\.([qk])norm\.scale$", r".norm_\1.weight"), (r"\.mlp\.", ".ff."),
    (r"\.prenorm\.scale$", ".norm1.weight"), (r"\.postnorm\.scale$", ".norm2.weight"))


def _convert(tensors, config):
    """Reshape a block's six modulations, which files store as one vector."""
    return {name: tensor.reshape(6, -1) if name.startswith("transformer_blocks.") and name.endswith("_table")
            else tensor
            for name, tensor in KEYS(tensors, config).items()}


def _adapt(model, config):
    """Add one to the weights of norms in float32 whatever dtype they are stored in, as ComfyUI does. References are
    at the latent's timestep, or at timestep zero."""
    def normed(norm, hidden_states):
        weight = norm.weight.float() + 1.0 if hidden_states.dtype.itemsize < 4 else norm.weight + 1.0
        return F.rms_norm(hidden_states.to(weight.dtype), (norm.dim,), weight, norm.eps).to(hidden_states.dtype)
    for module in model.modules():
        if type(module).__name__ == "Krea2RMSNorm":
            module.forward = functools.partial(normed, module)
    forward, last = model.forward, model.final_layer.forward

    def timed(*, at_zero, timestep, **inputs):
        return forward(timestep=torch.cat([timestep, torch.zeros_like(timestep)]) if at_zero else timestep, **inputs)
    model.forward = timed
    # the output of references is dropped
    model.final_layer.forward = lambda hidden_states, temb: last(hidden_states, temb[:len(hidden_states)])
    for block in model.transformer_blocks:
        block.forward = _at_two_times(block.forward)


def _at_two_times(forward):
    """Wrap a block's forward for tokens at two timesteps. References use the second half of the modulations; they
    alone have a position other than 0 along the first axis, and so a sine other than 0 there."""
    def timed(hidden_states, temb, image_rotary_emb, attention_mask=None):
        if len(temb) > len(hidden_states):
            image, zero = temb.chunk(2)
            temb = torch.where(image_rotary_emb[1][:, :1] != 0, zero, image)
        return forward(hidden_states, temb, image_rotary_emb, attention_mask)
    return timed


def _heads(layer, block="blocks.0"):
    return lambda shapes: shapes[f"{block}.attn.{layer}.weight"][0] // shapes[block + NORM][0]


def _axes(shapes):
    """Split a head's channels over the axes as ComfyUI does."""
    sixteenth = HEAD_SIZE(shapes) // 16
    return HEAD_SIZE(shapes) - 12 * sixteenth, 6 * sixteenth, 6 * sixteenth


def _text_width(shapes):
    """Width of a token's hidden states of all layers, concatenated. Tensors of a folder have other names."""
    fusion, norm = (("txtfusion", "txtmlp.0.scale") if "txtmlp.0.scale" in shapes
                    else ("text_fusion", "txt_in.norm.weight"))
    return shapes[f"{fusion}.projector.weight"][1] * shapes[norm][0]


def _image(call):
    frames = full_shape(call)[2]
    if frames > 1:
        raise ConfigError("Use an empty image latent, with batch_size for several images: Krea 2 generates images, and "
                          f"this latent has {frames} frames.")
    return LATENT(call)


def _text(call):
    return from_conditioning("context")(call).unflatten(-1, (call.config["num_text_layers"], -1))


def _positions(call):
    """Positions (T, 3); those of the text are zero."""
    return torch.cat([torch.zeros(call.conditioning["context"].shape[1], 3, device=call.latent.device),
                      LATENT.positions(call)])


def _at_zero(call):
    return at_zero(call.conditioning, "")


def _beyond(arguments):
    frames = [reference.shape[2] for reference in arguments.get("ref_latents") or () if reference.ndim == 5]
    return "reference latents of several frames" if any(count > 1 for count in frames) else None


KREA2 = Family(
    name="Krea 2", title="Krea 2 Raw, Turbo", transformer="Krea2Transformer2DModel", adapt_model=_adapt,
    num_channels=lambda config: config["in_channels"] // 4, num_key_heads=lambda config: config["num_key_value_heads"],
    activation_factors={"alone": 12.75, "residual": 4.75, "whole": 7.75, "outside": 6.75, "held": 1.6, "block": 12.55,
                        "exchange": 12.4, "own": 0.0},
    detection=Detection(
        recognise=has("txtfusion.projector.weight", "blocks.0.attn.gate.weight"), refusals=(needs_diffusers("0.39"),),
        config=config_of(
            in_channels=size("first.weight", 1), num_layers=blocks("blocks."), attention_head_dim=HEAD_SIZE,
            num_attention_heads=_heads("wq"),
            num_key_value_heads=_heads("wk"), intermediate_size=size("blocks.0.mlp.gate.weight", 0),
            timestep_embed_dim=size("tmlp.0.weight", 1), text_hidden_dim=size("txtmlp.0.scale", 0),
            num_text_layers=size("txtfusion.projector.weight", 1), text_num_attention_heads=_heads("wq", OF_TEXT),
            text_num_key_value_heads=_heads("wk", OF_TEXT),
            text_intermediate_size=size(f"{OF_TEXT}.mlp.gate.weight", 0),
            num_layerwise_text_blocks=blocks("txtfusion.layerwise_blocks."),
            num_refiner_text_blocks=blocks("txtfusion.refiner_blocks."),
            axes_dims_rope=_axes, rope_theta=1000.0, norm_eps=1e-5, _text_width=_text_width),
        convert=_convert, config_from_tensors=("_text_width",)),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0,
        conditioning={"context": "_text_width", "ref_latents": None, "ref_latents_method": None}, unsupported=_beyond,
        only_with={"ref_latents": "ref_latents_method"}, lengths={"reference": LATENT.num_reference_tokens},
        choices={"ref_latents_method": dict.fromkeys(("index", "offset", "uxo"), "index") | {AT_ZERO: AT_ZERO}},
        arguments={"hidden_states": _image, "timestep": timestep(), "encoder_hidden_states": _text,
                   "position_ids": _positions, "at_zero": _at_zero}),
    plan=ModelPlan(
        takes_output_patches=True, blocks=(BlockList("transformer_blocks", "blocks.", returns=(ALL,)),),
        streams={"hidden_states": ALL}, attention={"attn": ALL}, tokens={"image_rotary_emb": TokenArgument(0, ALL)},
        tp_plan=styled(COLWISE, "attn.to_gate", "ff.gate", "ff.up") | {"ff.down": ROWWISE},
        cacheable_outside={"text_fusion": "run", "txt_in": "run", "time_mod_proj": "step"}),
    testing=SmallConfig(
        {"in_channels": 16, "num_layers": 4, "attention_head_dim": 16, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 96, "timestep_embed_dim": 32, "text_hidden_dim": 24,
         "num_text_layers": 3, "text_num_attention_heads": 2, "text_num_key_value_heads": 2,
         "text_intermediate_size": 32, "axes_dims_rope": (4, 6, 6), "_text_width": 72},
        "comfy.ldm.krea2.model:SingleStreamDiT",
        {"features": 256, "heads": 8, "kvheads": 4, "layers": 2, "channels": 16, "tdim": 64, "txtdim": 64,
         "txtlayers": 3, "txtheads": 4, "txtkvheads": 4, "multiplier": 2}, frames=1, detected="Krea2"))
