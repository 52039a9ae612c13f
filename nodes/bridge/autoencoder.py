"""Decode with ComfyUI's ordinary VAE on the worker group: its weights go to the workers once."""

import uuid
import weakref

import torch

import comfy.ldm.models.autoencoder as autoencoder
import comfy.model_management
from comfy.ldm.modules.diffusionmodules.model import Decoder

from ...xdit_backend.protocol.errors import UnsupportedError
from ...xdit_backend.protocol.segments import dtype_name
from .groups import GROUPS, check_packages

DECODED_WITH = ("decoder.", "post_quant_conv.")

NAMES = weakref.WeakKeyDictionary()        # first-stage model -> the name the workers know it by


def decode(vae, latent, config):
    """Decode a LATENT's samples (B, C, H, W) with a VAE object; returns (B, H * scale, W * scale, 3) in [0, 1].

    Raises UnsupportedError for VAEs that are not an image AutoencoderKL, and for latents that do not fit.
    """
    check_packages()
    vae.throw_exception_if_invalid()
    model = vae.first_stage_model
    image_decoder = isinstance(model, autoencoder.AutoencodingEngine) and type(model.decoder) is Decoder
    if not image_decoder or getattr(model, "bn", None) is not None:
        raise UnsupportedError(f"Distributed VAE Decode does not support this VAE ({type(model).__name__}) yet. It decodes with "
                               f"the VAEs of SD, SDXL, SD3 and Flux. Use VAE Decode for this one.")
    if latent.is_nested:
        raise UnsupportedError("Distributed VAE Decode does not support latents of several parts. Use VAE Decode.")
    if latent.ndim == 5:                                       # (B, C, F, H, W): an image VAE decodes the first frame
        latent = latent[:, :, 0]
    if latent.shape[1] != vae.latent_channels:
        raise UnsupportedError(f"The latent has {latent.shape[1]} channels and this VAE decodes {vae.latent_channels}. Connect the "
                               f"VAE that belongs to the model.")
    client = GROUPS.client_for_decode(config)
    if comfy.model_management.get_torch_device().type != "cpu":
        needed = vae.memory_used_decode(latent.shape, vae.vae_dtype)
        comfy.model_management.free_memory(needed, comfy.model_management.get_torch_device())
    name = NAMES.setdefault(model, f"vae-{uuid.uuid4().hex[:8]}")
    picture = client.decode(name, dtype_name(vae.vae_dtype), lambda: _weights(model), latent.to(torch.float32),
                            vae.spacial_compression_decode())
    return picture.to(vae.output_device)


def _weights(model):
    return {key: tensor for key, tensor in model.state_dict().items() if key.startswith(DECODED_WITH)}
