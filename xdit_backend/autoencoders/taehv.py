"""Tiny autoencoders of videos (TAEHV, of HunyuanVideo's, Wan's and LTX-2's latents), as ComfyUI's own module: frames
one after the other, each with what the one before was at every block."""

import sys

from .vae_family import VaeFamily, replaced, signed_pixels, size_of

SIGNED = 32    # channels of HunyuanVideo 1.5's latents, of which pixels are from -1 to 1; of others they are as shown


def _config(shapes, settings):
    given = size_of(shapes)
    return {"latent_channels": given("decoder.1.weight", 1) or given("encoder.17.weight", 0)}


def _decode(vae, latent):
    """Frames stay where they are made: ComfyUI's module sends each to where ComfyUI keeps pictures."""
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
    build_small=lambda cls, model: cls(latent_channels=model.latent_channels),
    check_size=(7, 1, 2),
    check_frames=5,
)
