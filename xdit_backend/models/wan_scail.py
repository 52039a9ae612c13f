"""Wan SCAIL, ComfyUI's own module: Wan that follows a pose. Reference images are frames before the first, and the
pose's tokens come after the last."""

import dataclasses
from types import MethodType

from ..protocol.errors import ConfigError
from .common.family import SmallConfig
from .common.inputs import config_of, from_conditioning, full_shape, has, num_tokens_of, only_prefixes, optional_size
from .common.native_module import native_arguments
from .common.plan import ModelPlan, TokenArgument
from .common.position_slicing import Cut
from .common.rope_scaling import moves
from .common.wan import ARGUMENTS, RULES, SMALL
from .wan import LATENT, MODULES
from .wan_camera import HEAD, WAN_CAMERA

ALL, NATIVE = ("reference", "image", "pose"), "comfy.ldm.wan.model:SCAILWanModel"


def latent(call):
    """The latent, which ComfyUI's model pads itself and whose rows and columns position the pose. Raises ConfigError
    if a reference does not fit."""
    reference = call.conditioning.get("reference_latent")
    if reference is not None:
        sides, needed = tuple(reference.shape[-2:]), tuple(full_shape(call)[-2:])
        if sides != needed:
            raise ConfigError("Use one node that makes the reference image and the latent with the same width and "
                              f"height: the reference has {sides[0]} x {sides[1]}, and this latent needs {needed[0]} x "
                              f"{needed[1]}.")
        if call.patch is not None and call.patch.dim == 3:
            raise ConfigError("Make a video of 5 frames or more, or set pipefusion_degree to 1: the reference images "
                              "of SCAIL are additional frames of the video, so that a video of one frame cannot be cut "
                              "into rows.")
    return call.latent


def _full_sizes(rows, args, kwargs):
    """The arguments of rope_encode for the full latent: its frames, including those of references, rows and columns."""
    sizes, reference = list(args[:3]), kwargs.get("reference_latent")
    sizes[rows.axis] = rows.patch.whole
    if rows.axis == 0 and reference is not None:
        sizes[0] += reference.shape[2]
    return [*sizes, *args[3:]], kwargs


def _adapt(model, config):
    """Drop arguments that are None, since ComfyUI's forward takes a reference of None for one."""
    model._forward = MethodType(_without_none, model)


def _without_none(self, *args, **kwargs):
    return type(self)._forward(self, *args, **{name: value for name, value in kwargs.items() if value is not None})


def reference_shape(config, shape, tokens):
    return shape[0], config["in_dim"], 2, *shape[3:]


def pose_shape(config, shape, tokens):
    return shape[0], config["in_dim"], shape[2], *(max(1, side // 2) for side in shape[3:])


WAN_SCAIL = dataclasses.replace(
    WAN_CAMERA, name="Wan SCAIL", title="Wan SCAIL", transformer=NATIVE, adapt_model=_adapt,
    keep_in_compute_dtype=("patch_embedding", "patch_embedding_pose"),
    detection=dataclasses.replace(
        WAN_CAMERA.detection,
        recognise=lambda shapes: (has(HEAD, "head.modulation", "patch_embedding_pose.weight")(shapes)
                                  and "patch_embedding_mask.weight" not in shapes),
        refusals=(only_prefixes(MODULES | {"patch_embedding_pose"}),),
        config=config_of(**RULES, model_type="scail", flf_pos_embed_token_number=optional_size("img_emb.emb_pos", 1),
                         _image_dim=optional_size("img_emb.proj.1.weight", 1))),
    inputs=dataclasses.replace(
        WAN_CAMERA.inputs,
        conditioning={"context": "text_dim", "rope_scales": None, "clip_fea": "_image_dim", "reference_latent": None,
                      "pose_latents": None},
        ignored=("denoise_mask",),
        arguments=native_arguments(latent, "context", clip_fea=from_conditioning("clip_fea", where="_image_dim"),
                                   pose_latents=from_conditioning("pose_latents"),
                                   reference_latent=from_conditioning("reference_latent"),
                                   transformer_options=moves),
        lengths={"reference": num_tokens_of(LATENT, "reference_latent"),
                 "pose": num_tokens_of(LATENT, "pose_latents")}),
    plan=ModelPlan(
        blocks=tuple(dataclasses.replace(each, returns=(ALL,)) for each in WAN_CAMERA.plan.blocks),
        streams={"x": ALL}, attention={"self_attn": ALL}, tp_plan=WAN_CAMERA.plan.tp_plan,
        tokens={"freqs": TokenArgument(1, ALL)},
        positions={"rope_encode": Cut(TokenArgument(1, ALL), _full_sizes)},
        cacheable_outside={"text_embedding": "run"}),
    testing=SmallConfig(SMALL | {"model_type": "scail", "_image_dim": 1280}, NATIVE,
                        ARGUMENTS | {"model_type": "scail", "in_dim": 20},
                        input_shapes={"reference_latent": reference_shape, "pose_latents": pose_shape}))
