"""In the place of what TripoSplat's nodes load beside the model: a vision model, and a VAE that makes splats of the
latent's tokens. Used by tests/support/doubles.py."""

import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F

WIDTH = 24                                 # of the small model's image features
TOKENS = 1024                              # of a latent, where the published model has 8 times as many
EVERY = 8                                  # each of so many tokens is a splat
BOX = [-0.5, -0.5, -0.5, 1.0, 1.0, 1.0]    # where splats are: a corner, and its sides


def shorten(node):
    """Have ComfyUI's nodes make and preview latents of fewer tokens. node: the class of TripoSplat Conditioning."""
    import comfy.ldm.triposplat.preview as preview
    sys.modules[node.__module__]._Q_TOKEN_LENGTH = preview._LATENT_TOKENS = TOKENS


def vision():
    """As CLIP Vision's loader gives DINOv3, of which each 16 x 16 pixels are a token."""
    return SimpleNamespace(patcher=_patcher(), load_device=torch.device("cpu"), model=lambda pixel_values: (_seen(
        pixel_values),))


def vae():
    """As the VAE loader gives it, whose decode makes splats."""
    decoder = SimpleNamespace(gaussians_per_point=EVERY, gs=SimpleNamespace(model_channels=8), decode=_decode)
    return SimpleNamespace(first_stage_model=decoder, vae_dtype=torch.float32, device=torch.device("cpu"),
                           patcher=_patcher())


def _patcher():
    """Of nothing, for ComfyUI to load."""
    import comfy.model_patcher
    return comfy.model_patcher.ModelPatcher(torch.nn.Linear(1, 1), torch.device("cpu"), torch.device("cpu"))


def _seen(pixels):
    """(B, 3, H, W) -> (B, T, WIDTH)"""
    tokens = F.avg_pool2d(pixels, 16).flatten(2).transpose(1, 2)
    mixed = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5))
    return (tokens @ mixed).sin()


def _decode(latent, num_gaussians, generator=None, level=None):
    """(B, T, 16) -> a container of splats for each: each number of a token is one of its splat's."""
    from comfy.ldm.triposplat.gaussian import GaussianModel
    made = []
    for tokens in latent[:, ::EVERY].float():
        splats = GaussianModel(BOX, scaling_bias=0.05)
        splats._xyz, splats._scaling, splats._rotation = tokens[:, :3].sigmoid(), tokens[:, 3:6].tanh(), tokens[:, 6:10]
        splats._opacity, splats._features_dc = tokens[:, 10:11], tokens[:, None, 11:14]
        made.append(splats)
    return made
