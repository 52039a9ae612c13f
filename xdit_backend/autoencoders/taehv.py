"""Tiny video autoencoders (TAEHV, for latents of HunyuanVideo, Wan and LTX-2), as ComfyUI's own module: frames run one
after the other, each with the previous frame's activations at every block."""

import sys

from .vae_family import VaeFamily, replaced, signed_pixels, size_of

SIGNED = 32    # channels of HunyuanVideo 1.5's latents, which are decoded to [-1, 1]; others to [0, 1]


def _config(shapes, settings):
    size = size_of(shapes)
    return {"latent_channels": size("decoder.1.weight", 1) or size("encoder.17.weight", 0)}


def _decode(vae, latent):
    """Decode on this device: ComfyUI's module would move each frame to ComfyUI's intermediate device."""
    manager = sys.modules[type(vae).decode.__module__].comfy.model_management
    with replaced(manager, intermediate_device=lambda: latent.device):
        return vae.decode(latent)


def _pixels(vae, image):
    return signed_pixels(vae, image) if vae.latent_channels == SIGNED else image.float()


TAEHV = VaeFamily(
    models=("TAEHV",),
    autoencoder="comfy.taesd.taehv:TAEHV",
    markers=("decoder.22.", "encoder.17."),
    config=_config,
    decode=_decode,
    encode=lambda vae, video: vae.encode(video),
    pixels=_pixels,
    check_model=lambda cls, model: cls(latent_channels=model.latent_channels),
    check_size=(7, 1, 2),
    check_frames=5,
)
