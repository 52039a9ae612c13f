"""Check of a VAE's file: the reason for which the distributed VAE nodes would reject it, from its header."""

import os

import torch

import comfy.sd

from ....xdit_backend.autoencoders import supported
from ....xdit_backend.protocol.errors import CheckpointError
from ..model.checkpoint_cache import CHECKPOINTS
from ..vae.vae_detection import kind_of, name_of

PIXELS = "pixel_space"                     # an entry of ComfyUI's Load VAE that is not a file
VAE_PREFIXES = ("first_stage_model.", "vae.")
VAE_FOLDERS = ("vae", "checkpoints")


def refused_vae(name, path):
    """Reason for which Distributed VAE Decode would reject the VAE of this file, or None. ComfyUI's VAE is created from
    the shapes alone. path: None for a file that is not on this machine."""
    if name == PIXELS:
        return f"{name} has no layers to run on the workers: its latents are the image's pixels."
    if path is None or not path.endswith((".safetensors", ".sft")):
        return None
    try:
        header = CHECKPOINTS.open(path)
    except CheckpointError as error:
        return str(error)
    shapes = ({key.removeprefix(prefix): shape for prefix in VAE_PREFIXES
               for key, shape in (header.shapes | header.other_tensors).items()
              if key.startswith(prefix)} or header.shapes)
    try:
        with torch.device("meta"):
            vae = comfy.sd.VAE(sd={key: torch.empty(shape) for key, shape in shapes.items()}, metadata=header.metadata)
    # raised for shapes of no VAE; ComfyUI's loader reports the details
    except (RuntimeError, KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None
    model = vae.first_stage_model
    if model is None or kind_of(model) is not None:
        return None
    return f"The VAE in {os.path.basename(path)} ({name_of(model)}) is not one of {supported()}."
