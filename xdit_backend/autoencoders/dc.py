"""Sana's deep compression autoencoder, for those who call this package: ComfyUI has no VAE object of it."""

from .vae_family import VaeFamily

DC = VaeFamily(models=(), autoencoder="AutoencoderDC")
