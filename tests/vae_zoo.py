"""Tiny random autoencoders of diffusers, for the tests of the code that splits them."""

from dataclasses import dataclass, field

import torch
from diffusers import AutoencoderKL, AutoencoderKLWan


@dataclass(frozen=True)
class Kind:
    """What a test needs to know of an autoencoder. `scale`: pixels along one side of a latent row."""

    make: object
    channels: int
    scale: int = 8
    frames: int = 0                                            # of a latent; 0 for pictures
    pixel_frames: int = 0
    tolerance: float = 1e-10
    mutants: tuple[str, ...] = field(default=("zeros for borrowed rows",))


def kl(**options):
    return AutoencoderKL(
        block_out_channels=(16, 32, 32), layers_per_block=1, norm_num_groups=8, down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3, **options)


def wan():
    return AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 2, 4, 4], num_res_blocks=1)


KL_MUTANTS = ("zeros for borrowed rows", "own moments", "mean of variances", "own tokens")
KINDS = {
    "sd": Kind(lambda: kl(latent_channels=4), 4, scale=4, mutants=KL_MUTANTS),
    "flux": Kind(lambda: kl(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False), 16, scale=4, mutants=KL_MUTANTS),
    # It upsamples in float32.
    "wan": Kind(wan, 4, frames=3, pixel_frames=9, tolerance=1e-6, mutants=("zeros for borrowed rows", "own tokens")),
}


def tiny_vae(kind, dtype=torch.float64):
    """A random autoencoder. Attention and biases are not too faint to be missed."""
    torch.manual_seed(0)
    vae = KINDS[kind].make()
    for name, parameter in vae.named_parameters():
        if name.endswith(("bias", "to_out.0.weight", "proj.weight")):
            torch.nn.init.normal_(parameter, std=0.5)
        parameter.data = parameter.data.to(dtype)
    return vae.eval()


def latent(kind, batch, height, width, dtype=torch.float64):
    frames = (KINDS[kind].frames,) if KINDS[kind].frames else ()
    return _random((batch, KINDS[kind].channels, *frames, height, width), dtype)


def picture(kind, batch, height, width, dtype=torch.float64):
    """The picture or video of a latent of this size."""
    frames = (KINDS[kind].pixel_frames,) if KINDS[kind].pixel_frames else ()
    return _random((batch, 3, *frames, height * KINDS[kind].scale, width * KINDS[kind].scale), dtype)


def _random(shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-2]), dtype=torch.float64).to(dtype)
