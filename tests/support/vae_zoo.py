"""Tiny random autoencoders of diffusers, for the tests of the code that splits them."""

from dataclasses import dataclass

import diffusers
import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLLTXVideo,
    AutoencoderKLWan,
)

from tests.support import tiny_checkpoints
from tests.support.tiny_checkpoints import fill
from xdit_backend.autoencoders import FAMILIES, family_of
from xdit_backend.autoencoders.minimax_h3 import settings_of
from xdit_backend.checkpoints.build_vae import class_of, load_autoencoder
from xdit_backend.comfyui.install_location import find_comfyui


@dataclass(frozen=True)
class Kind:
    """What a test needs to know of an autoencoder. `scale`: pixels along one side of a latent row."""

    make: object
    channels: int
    scale: int = 8
    frames: int = 0                                            # of a latent; 0 for pictures
    pixel_frames: int = 0
    tolerance: float = 1e-10
    mutants: tuple[str, ...] = ("zeros for borrowed rows",)
    encode_mutants: tuple[str, ...] = ("padded alike",)        # more of them, for the encoder
    least_rows: int = 1                                        # that it decodes: reflection needs two


def kl(**options):
    return AutoencoderKL(
        block_out_channels=(16, 32, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3, **options)


def wan():
    return AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 2, 4, 4], num_res_blocks=1)


def wan22():
    return AutoencoderKLWan(base_dim=8, decoder_base_dim=8, z_dim=4, dim_mult=[1, 2, 4, 4], num_res_blocks=1,
                            is_residual=True, patch_size=2, in_channels=12, out_channels=12, scale_factor_spatial=16)


def dc():
    """Sana's, with linear attention at the two lower levels."""
    levels = {"block_types": ("ResBlock", "EfficientViTBlock", "EfficientViTBlock"), "block_out_channels": (8, 16, 32),
              "layers_per_block": (1, 1, 1), "qkv_multiscales": ((), (5,), (5,))}
    return AutoencoderDC(latent_channels=4, attention_head_dim=8, **{
        f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in levels.items()})


def ltx(noised=False):
    """LTX 0.9's structure, or 0.9.5's, whose decoder takes off the last noise (and is causal here);
    padded as ComfyUI pads it."""
    depths = {"layers_per_block": (1, 1, 1), "decoder_layers_per_block": (1, 1, 1),
              "decoder_inject_noise": (False,) * 3}
    if noised:
        options = {
            "block_out_channels": (8, 16, 32), "down_block_types": ("LTXVideo095DownBlock3D",) * 2,
            "downsample_type": ("spatial", "spatiotemporal"), "spatio_temporal_scaling": (True, True),
            "decoder_block_out_channels": (16, 32), "decoder_spatio_temporal_scaling": (True, True),
            "upsample_residual": (True, True), "upsample_factor": (2, 2), "timestep_conditioning": True,
            "spatial_compression_ratio": 8, "decoder_causal": True}
    else:
        options = {
            "block_out_channels": (8, 16), "down_block_types": ("LTXVideoDownBlock3D",) * 2,
            "downsample_type": ("conv",) * 2,
            "spatio_temporal_scaling": (True, False), "decoder_block_out_channels": (8, 16),
            "decoder_spatio_temporal_scaling": (True, False), "upsample_residual": (False, False),
            "upsample_factor": (1, 1)}
    vae = AutoencoderKLLTXVideo(latent_channels=8, patch_size=2, **depths, **options)
    for module in vae.decoder.modules():
        if isinstance(module, torch.nn.Conv3d):
            module.padding_mode = "reflect"
    vae.register_to_config(decode_timestep=0.05)
    return vae


def hunyuan():
    return AutoencoderKLHunyuanVideo(block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4,
                                     latent_channels=4)


def cogvideox():
    return AutoencoderKLCogVideoX(block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4,
                                  latent_channels=4)


def hunyuan_image():
    return diffusers.AutoencoderKLHunyuanImage(in_channels=3, out_channels=3, latent_channels=4,
                                               block_out_channels=(32, 32, 64),
                                               layers_per_block=1, spatial_compression_ratio=4, sample_size=64)


def hunyuan15():
    return diffusers.AutoencoderKLHunyuanVideo15(block_out_channels=(8, 16, 16), layers_per_block=1, latent_channels=4,
                                                 spatial_compression_ratio=4, temporal_compression_ratio=2)


def mochi():
    return diffusers.AutoencoderKLMochi(
        latent_channels=4, encoder_block_out_channels=(32, 64, 32), decoder_block_out_channels=(32, 64, 32),
        layers_per_block=(1,) * 4,
        temporal_expansions=(1, 3), spatial_expansions=(2, 2), add_attention_block=(False, True, True, True))


def svd():
    """Its mixing of frames is by half."""
    return diffusers.AutoencoderKLTemporalDecoder(latent_channels=4, block_out_channels=(32, 64), layers_per_block=2,
                                                  down_block_types=("DownEncoderBlock2D",) * 2)


def cosmos():
    return diffusers.AutoencoderKLCosmos(latent_channels=4, encoder_block_out_channels=(8, 8, 16, 16),
                                         decode_block_out_channels=(8, 16, 16, 16), attention_resolutions=(),
                                         num_layers=1)


KL_MUTANTS = ("zeros for borrowed rows", "own moments", "mean of variances", "own tokens")
KINDS = {
    "sd": Kind(lambda: kl(latent_channels=4), 4, scale=4, mutants=KL_MUTANTS),
    "flux": Kind(lambda: kl(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False), 16, scale=4,
                 mutants=KL_MUTANTS),
    # It upsamples in float32.
    "wan": Kind(wan, 4, frames=3, pixel_frames=9, tolerance=1e-6, mutants=("zeros for borrowed rows", "own tokens")),
    "wan22": Kind(wan22, 4, scale=16, frames=2, pixel_frames=5, tolerance=1e-6,
                  mutants=("zeros for borrowed rows", "own tokens")),
    # Its attention and norms are float32.
    "dc": Kind(dc, 4, scale=4, tolerance=1e-5, mutants=("zeros for borrowed rows", "own sums"), encode_mutants=()),
    # In pieces: of two frames and one, and of one and four.
    "hunyuan": Kind(hunyuan, 4, frames=3, pixel_frames=5,
                    mutants=("zeros for borrowed rows", "own moments", "own tokens"),
                    encode_mutants=()),
    "cogvideox": Kind(cogvideox, 4, frames=2, pixel_frames=9, mutants=KL_MUTANTS[:-1]),
    # Its encoder's first features are float32.
    "mochi": Kind(mochi, 4, scale=4, frames=2, pixel_frames=5, mutants=KL_MUTANTS[:-1], encode_mutants=(),
                  tolerance=1e-9),
    "svd": Kind(svd, 4, scale=2, frames=3, mutants=KL_MUTANTS),
    "cosmos": Kind(cosmos, 4, frames=2, pixel_frames=9,
                   mutants=("zeros for borrowed rows", "own moments", "own tokens"),
                   encode_mutants=()),
    "ltx": Kind(ltx, 8, scale=4, frames=3, pixel_frames=5, tolerance=1e-5, encode_mutants=(), least_rows=2),
    "ltx095": Kind(lambda: ltx(True), 8, scale=8, frames=2, pixel_frames=5, tolerance=1e-5, encode_mutants=(),
                   least_rows=2),
}


if hasattr(diffusers, "AutoencoderKLHunyuanImage"):
    KINDS["hunyuan image"] = Kind(hunyuan_image, 4, scale=4, mutants=KL_MUTANTS, encode_mutants=())
if hasattr(diffusers, "AutoencoderKLHunyuanVideo15"):          # in pieces of two frames and one, and of one and four
    KINDS["hunyuan 1.5"] = Kind(hunyuan15, 4, scale=4, frames=3, pixel_frames=5,
                                mutants=("zeros for borrowed rows", "own tokens"), encode_mutants=())


def of_comfyui(key, channels):
    """One of ComfyUI's class, which is small as it is, and whose layers are as memory was."""
    vae = class_of(FAMILIES[key])(latent_channels=channels)
    with torch.no_grad():
        fill(vae, torch.Generator().manual_seed(0))
    return vae


if find_comfyui() is not None:
    KINDS["taehv"] = Kind(lambda: of_comfyui("taehv", 16), 16, frames=2, pixel_frames=5, encode_mutants=())
    KINDS["taef2"] = Kind(lambda: of_comfyui("tiny_flux2", 128), 128, scale=16, mutants=KL_MUTANTS[:2],
                          encode_mutants=())


def tiny_vae(kind, dtype=torch.float64):
    """A random autoencoder. Attention and biases are not too faint to be missed."""
    torch.manual_seed(0)
    vae = KINDS[kind].make()
    for name, parameter in vae.named_parameters():
        if name.endswith(("bias", "to_out.0.weight", "proj.weight")):
            torch.nn.init.normal_(parameter, std=0.5)
        parameter.data = parameter.data.to(dtype)
    return vae.eval()


@torch.no_grad()
def decoded(kind, latent):
    """The whole picture."""
    vae = tiny_vae(kind, latent.dtype)
    return family_of(vae).decode(vae, latent)


@torch.no_grad()
def encoded(kind, image):
    vae = tiny_vae(kind, image.dtype)
    return family_of(vae).encode(vae, image)


def latent(kind, batch, height, width, dtype=torch.float64):
    frames = (KINDS[kind].frames,) if KINDS[kind].frames else ()
    return _random((batch, KINDS[kind].channels, *frames, height, width), dtype)


def image(kind, batch, height, width, dtype=torch.float64):
    """The picture or video of a latent of this size."""
    frames = (KINDS[kind].pixel_frames,) if KINDS[kind].pixel_frames else ()
    return _random((batch, 3, *frames, height * KINDS[kind].scale, width * KINDS[kind].scale), dtype)


def _random(shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-2]), dtype=torch.float64).to(dtype)


def minimax(dtype=torch.float32):
    """MiniMax H3's with a small decoder, whose tiles are of 64 x 64 pixels: it is split by them, and not by rows."""
    class_of(FAMILIES["minimax_h3"])                           # makes ComfyUI's modules importable
    return load_autoencoder(tiny_checkpoints.state_dict("vae-minimax"), dtype, "cpu",
                            settings_of(tiny_checkpoints.autoencoder("vae-minimax")))
