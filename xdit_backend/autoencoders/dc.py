"""Sana's deep compression autoencoder, for those who call this package: ComfyUI has no VAE object of it."""

from .family import VaeFamily

DC = VaeFamily(models=(), autoencoder="AutoencoderDC")
