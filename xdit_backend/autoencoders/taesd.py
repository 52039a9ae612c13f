"""Tiny image autoencoders (TAESD); Flux.2's, whose blocks have norms, runs as ComfyUI's own module."""

import re

from .vae_family import VaeFamily, size_of


def _config(shapes, settings):
    size = size_of(shapes)
    return {"latent_channels": size("taesd_decoder.1.weight", 1) or size("taesd_encoder.14.weight", 0)}


def _convert(tensors, config):
    """Renumber the decoder's layers, since ComfyUI's begins with a clamp. Scale and shift are applied on the host."""
    def renamed(name):
        name = name.replace("taesd_encoder.", "encoder.layers.")
        return re.sub(r"taesd_decoder\.(\d+)", lambda match: f"decoder.layers.{int(match[1]) - 1}", name)
    return {renamed(name): tensor for name, tensor in tensors.items()}


TAESD = VaeFamily(
    models=("TAESD",),
    autoencoder="AutoencoderTiny",
    markers=("taesd_decoder.", "taesd_encoder."),
    decoder=("taesd_decoder.",),
    encoder=("taesd_encoder.",),
    config=_config,
    convert=_convert,
)


def _without_scale(vae, settings):
    """Remove scale and shift, which are applied on the host."""
    del vae.vae_scale, vae.vae_shift


FLUX2_TAESD = VaeFamily(
    models=("TAEF2",),
    autoencoder="comfy.taesd.taesd:TAESD",
    markers=(".pool.0.",),
    decoder=("taesd_decoder.",),
    encoder=("taesd_encoder.",),
    config=lambda shapes, settings: {"latent_channels": 128},
    finish=_without_scale,
    decode=lambda vae, latent: vae.taesd_decoder(latent).sub(0.5).mul(2),
    encode=lambda vae, image: vae.taesd_encoder(image * 0.5 + 0.5),
)
