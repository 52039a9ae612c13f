"""Wan SCAIL-2, ComfyUI's own module: SCAIL with masks that identify the persons in reference images and pose."""

import dataclasses

import torch

from ..protocol.errors import ConfigError
from .common.family import SmallConfig
from .common.inputs import from_conditioning, full_shape, has, only_prefixes, size
from .common.native_module import number
from .common.wan import ARGUMENTS, SMALL
from .wan import LATENT, MODULES
from .wan_camera import HEAD
from .wan_scail import WAN_SCAIL, latent, pose_shape, reference_shape

NATIVE = "comfy.ldm.wan.model:SCAIL2WanModel"
MASKS = {"ref_mask_latents": "reference images", "sam_latents": "pose"}


def _latent(call):
    """The latent, as in SCAIL. Raises ConfigError for masks of another size than what they mask."""
    conditioning, full = call.conditioning, full_shape(call)
    reference, pose = conditioning.get("reference_latent"), conditioning.get("pose_latents")
    full[2] += 0 if reference is None else reference.shape[2]
    for name, shape in (("ref_mask_latents", full), ("sam_latents", None if pose is None else pose.shape)):
        if name in conditioning and LATENT.counts(conditioning[name].shape) != LATENT.counts(shape):
            raise ConfigError(f"Use one node that makes the {MASKS[name]}, the matching mask and the latent: the mask "
                              f"has {tuple(conditioning[name].shape[2:])} frames, rows and columns, and this latent "
                              f"needs {tuple(shape[2:])}.")
    return latent(call)


def _mask_of_references(call):
    """Mask (B, C, frames of references and of the latent, rows, columns); for a patch, of its own frames, or rows."""
    mask = from_conditioning("ref_mask_latents")(call)
    if mask is None or call.patch is None:
        return mask
    if call.patch.dim == 3:
        return mask.narrow(3, call.patch.start, call.latent.shape[3])
    of_references, of_video = mask.split([mask.shape[2] - call.patch.whole, call.patch.whole], 2)
    return torch.cat([of_references, of_video.narrow(2, call.patch.start, call.latent.shape[2])], 2)


WAN_SCAIL2 = dataclasses.replace(
    WAN_SCAIL, name="Wan SCAIL-2", title="Wan SCAIL-2", transformer=NATIVE,
    keep_in_compute_dtype=(*WAN_SCAIL.keep_in_compute_dtype, "patch_embedding_mask"),
    detection=dataclasses.replace(
        WAN_SCAIL.detection,
        recognise=has(HEAD, "head.modulation", "patch_embedding_pose.weight", "patch_embedding_mask.weight"),
        refusals=(only_prefixes(MODULES | {"patch_embedding_pose", "patch_embedding_mask"}),),
        config=dataclasses.replace(WAN_SCAIL.detection.config, rules=WAN_SCAIL.detection.config.rules | {
            "model_type": "scail2", "mask_in_dim": size("patch_embedding_mask.weight", 1)})),
    inputs=dataclasses.replace(
        WAN_SCAIL.inputs,
        conditioning=WAN_SCAIL.inputs.conditioning | dict.fromkeys((*MASKS, "ref_mask_flag")),
        counts=("ref_mask_flag",), only_with={"sam_latents": "pose_latents"},
        arguments=WAN_SCAIL.inputs.arguments | {"x": _latent, "sam_latents": from_conditioning("sam_latents"),
                                                "ref_mask_latents": _mask_of_references,
                                                "ref_mask_flag": number("ref_mask_flag")}),
    testing=SmallConfig(SMALL | {"model_type": "scail2", "mask_in_dim": 6, "_image_dim": 1280}, NATIVE,
                        ARGUMENTS | {"model_type": "scail2", "in_dim": 20},
                        input_shapes=WAN_SCAIL.testing.input_shapes | {
                            "ref_mask_latents": lambda config, shape, tokens: (
                                shape[0], config["mask_in_dim"],
                                shape[2] + reference_shape(config, shape, tokens)[2], *shape[3:]),
                            "sam_latents": lambda config, shape, tokens: (
                                shape[0], config["mask_in_dim"], *pose_shape(config, shape, tokens)[2:]),
                            "ref_mask_flag": lambda config, shape, tokens: (0,)}))
