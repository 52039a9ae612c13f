"""In the place of SeedVR2's VAE, which halves sides three times and frames twice, after the first one. Used by
tests/support/doubles.py."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

CHANNELS = 16


def vae():
    """As the VAE loader gives it."""
    return SimpleNamespace(
        encode=_encode, encode_tiled=lambda pixels, **_: _encode(pixels), decode=_decode,
        decode_tiled=lambda latent, **_: _decode(latent), temporal_compression_decode=lambda: 4,
        spacial_compression_decode=lambda: 8)


def _encode(pixels):
    """(B, F, H, W, 3) -> (B, 16, (F + 3) / 4, H / 8, W / 8)"""
    smaller = F.avg_pool3d(pixels.movedim(-1, 1)[:, :, ::4].float(), (1, 8, 8)) * 2 - 1
    return torch.cat([smaller * (1 + channel) for channel in range(CHANNELS)], 1)[:, :CHANNELS]


def _decode(latent):
    """(B, 16, F, H, W) -> (B, 4 F - 3, 8 H, 8 W, 3)"""
    pixels = latent[:, :3].float().repeat_interleave(8, -1).repeat_interleave(8, -2).repeat_interleave(4, 2)[:, :, 3:]
    return (pixels.movedim(1, -1) + 1) / 2
