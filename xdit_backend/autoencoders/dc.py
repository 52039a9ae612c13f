"""Sana's deep compression autoencoder (DC-AE), for callers of this package: ComfyUI has no VAE object for it."""

from .vae_family import VaeFamily

DC = VaeFamily(models=(), autoencoder="AutoencoderDC")
