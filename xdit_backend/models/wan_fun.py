"""Wan Fun-Control (2.1 V1.1, 2.2), ComfyUI's own module: Wan that follows a control video, concatenated to the
latent's channels. A reference image is a frame before the first, with its own embedding."""

import dataclasses

from ..protocol.errors import ConfigError
from .common.family import SmallConfig
from .common.inputs import config_of, from_conditioning, has, only_prefixes, optional_size
from .common.native_module import native_arguments
from .common.plan import ModelPlan, TokenArgument
from .common.position_slicing import Cut
from .common.rope_scaling import moves
from .common.wan import ARGUMENTS, RULES, SMALL, even_with
from .wan import LATENT, MODULES
from .wan_camera import HEAD, WAN_CAMERA
from .wan_scail import WAN_SCAIL

ALL, NATIVE = ("reference", "image"), "comfy.ldm.wan.model:WanModel"
REFERENCED = even_with(LATENT, "Wan Fun-Control", "reference_latent", "reference image")


def num_reference_tokens(conditioning):
    """Number of tokens of a reference image (B, C, rows, columns)."""
    if "reference_latent" not in conditioning:
        return 0
    rows, columns = conditioning["reference_latent"].shape[-2:]
    return rows // 2 * (columns // 2)


def _latent(call):
    if call.timestep.ndim > 1:
        raise ConfigError("Remove the noise mask, or use Load Diffusion Model: with a noise mask, each frame of this "
                          "model has its own timestep, which xDiT does not support for Wan Fun-Control.")
    if "reference_latent" in call.conditioning and call.patch is not None and call.patch.dim == 3:
        raise ConfigError("Make a video of 5 frames or more, or set pipefusion_degree to 1: the reference image of Wan "
                          "Fun-Control is an additional frame of the video, so that a video of one frame cannot be cut "
                          "into rows.")
    return REFERENCED(call)


def _positions(module, forward, rows, tokens, args, kwargs):
    """Positions of the full latent, and of the reference image, which is a frame before its first."""
    def full_with_reference(rows, args, kwargs):
        sizes = list(args[:3])
        sizes[rows.axis] = rows.patch.whole + (rows.axis == 0 and tokens.held("reference") > 0)
        return [*sizes, *args[3:]], kwargs
    return Cut(TokenArgument(1, ALL), full_with_reference)(module, forward, rows, tokens, args, kwargs)


WAN_FUN = dataclasses.replace(
    WAN_CAMERA, name="Wan Fun-Control", title="Wan Fun-Control (2.1 V1.1, 2.2)", transformer=NATIVE,
    adapt_model=WAN_SCAIL.adapt_model, pixels=lambda config: (4, 16, 16) if config["out_dim"] == 48 else (4, 8, 8),
    activation_factors={"alone": 8.6, "residual": 3.2, "whole": 4.97, "outside": 4.26, "held": 1.3, "block": 9.83,
                        "exchange": 13.81, "attends": 5.06, "early": 0.67, "cut": 1.76},
    detection=dataclasses.replace(
        WAN_CAMERA.detection,
        recognise=lambda shapes: (has(HEAD, "head.modulation", "ref_conv.weight")(shapes)
                                  and "patch_embedding_global.weight" not in shapes),
        refusals=(only_prefixes(MODULES | {"ref_conv"}),),
        config=config_of(**RULES, model_type=lambda shapes: "i2v" if has("img_emb.")(shapes) else "t2v",
                         flf_pos_embed_token_number=optional_size("img_emb.emb_pos", 1),
                         in_dim_ref_conv=optional_size("ref_conv.weight", 1),
                         _image_dim=optional_size("img_emb.proj.1.weight", 1))),
    inputs=dataclasses.replace(
        WAN_CAMERA.inputs,
        conditioning={"context": "text_dim", "rope_scales": None, "clip_fea": "_image_dim", "reference_latent": None},
        ignored=("denoise_mask",),
        arguments=native_arguments(_latent, "context",
                                   clip_fea=from_conditioning("clip_fea", where="_image_dim"),
                                   reference_latent=from_conditioning("reference_latent"),
                                   transformer_options=moves),
        lengths={"reference": num_reference_tokens}),
    plan=ModelPlan(
        blocks=tuple(dataclasses.replace(each, returns=(ALL,)) for each in WAN_CAMERA.plan.blocks),
        streams={"x": ALL}, attention={"self_attn": ALL}, tp_plan=WAN_CAMERA.plan.tp_plan,
        tokens={"freqs": TokenArgument(1, ALL)},
        positions={"rope_encode": _positions}, cacheable_outside={"text_embedding": "run"}),
    testing=SmallConfig(SMALL | {"model_type": "i2v", "in_dim": 12, "in_dim_ref_conv": 4, "_image_dim": 1280},
                        NATIVE,
                        ARGUMENTS | {"model_type": "i2v", "in_dim": 48, "in_dim_ref_conv": 16},
                        input_shapes={"reference_latent": lambda config, shape, tokens: (
                            shape[0], config["in_dim_ref_conv"], *shape[3:])}))
