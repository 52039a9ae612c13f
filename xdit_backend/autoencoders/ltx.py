"""VAE of LTX-Video, from version 0.9 on, and of LTX-2. Its norms are of single pixels, so frames can be split."""

import itertools
import re
from dataclasses import dataclass

from torch.nn import Conv3d

from ..protocol.errors import CheckpointError
from .vae_family import VaeFamily, count_layers, size_of

# number of positions that a downsampler packs into one -> diffusers' name
SAMPLERS = {1: "conv", 2: "temporal", 4: "spatial", 8: "spatiotemporal"}


@dataclass(frozen=True)
class Level:
    """Numbers of a level's layers in the encoder or decoder: its resnets, its resizing layer, its widening layer."""

    resnets: int
    sampler: int | None = None
    widening: int | None = None


def _levels(shapes, half):
    """(number of the middle block, Levels) of LTX's encoder or decoder, in the order of execution."""
    layers = f"{half}.{'down' if half == 'encoder' else 'up'}_blocks"
    middle, levels, found = None, [], {}
    order = range(next(number for number in itertools.count()
                       if not any(name.startswith(f"{layers}.{number}.") for name in shapes)))
    for number in order if half == "decoder" else reversed(order):
        if f"{layers}.{number}.res_blocks.0.conv1.conv.weight" not in shapes:
            found["widening" if f"{layers}.{number}.conv1.conv.weight" in shapes else "sampler"] = number
        elif middle is None:
            middle = number
        elif half == "decoder":                                # resnets end a level of the decoder
            levels.append(Level(number, **found))
            found = {}
        else:                                                  # and begin a level of the encoder
            levels.insert(0, Level(number, **found))
            found = {}
    return middle, levels


def _config(shapes, settings):
    """Configuration of any width and depth. settings: see AutoencoderSpec.

    Raises CheckpointError for the decoder of 0.9.1, which adds noise to the image.
    """
    if any("per_channel_scale" in name for name in shapes):
        raise CheckpointError("It is LTX-Video 0.9.1's, whose decoder adds random noise to the image between its "
                              "layers.")
    size = size_of(shapes)
    config = {"timestep_conditioning": any("last_time_embedder." in name for name in shapes),
              # for tiles only
              "decoder_causal": settings.get("causal_decoder") == "True", "spatial_compression_ratio": 32}
    for half in ("encoder", "decoder"):
        if f"{half}.conv_in.conv.weight" in shapes:
            config |= (_encoder if half == "encoder" else _decoder)(shapes, size)
    return config


def _encoder(shapes, size):
    middle, levels = _levels(shapes, "encoder")
    numbers = [level.resnets for level in levels] + [middle]
    widths = [size(f"encoder.down_blocks.{number}.res_blocks.0.conv1.conv.weight", 0) for number in numbers]
    samplers = [size(f"encoder.down_blocks.{level.sampler}.conv.conv.weight", 0) for level in levels]
    kinds = [SAMPLERS.get(width // sampled) if sampled else "conv" for sampled, width in zip(samplers, widths[1:])]
    new = any(kind != "conv" for kind in kinds)                # 0.9.5 packs pixels into channels
    return {
        "latent_channels": size("encoder.conv_out.conv.weight", 0) - 1,
        "block_out_channels": tuple(widths if new else widths[:-1]),
        "down_block_types": ("LTXVideo095DownBlock3D" if new else "LTXVideoDownBlock3D",) * len(levels),
        "downsample_type": tuple(kinds),
        "spatio_temporal_scaling": tuple(level.sampler is not None for level in levels),
        "layers_per_block": _depths(shapes, "encoder.down_blocks", numbers),
        "patch_size": round((size("encoder.conv_in.conv.weight", 1) / 3) ** 0.5),
    }


def _decoder(shapes, size):
    middle, levels = _levels(shapes, "decoder")
    numbers = [middle] + [level.resnets for level in levels]
    # an upsampler unpacks one position into 8, with as many channels or fewer
    factors = [8 * size(name, 1) // size(name, 0) if level.sampler is not None else 1 for level in levels
               for name in (f"decoder.up_blocks.{level.sampler}.conv.conv.weight",)]
    widths = [size(f"decoder.up_blocks.{level.resnets}.res_blocks.0.conv1.conv.weight", 0) for level in levels]
    config = {
        "decoder_block_out_channels": [width * factor for width, factor in zip(widths, factors)],
        "decoder_spatio_temporal_scaling": [level.sampler is not None for level in levels],
        "decoder_layers_per_block": _depths(shapes, "decoder.up_blocks", numbers),
        "decoder_inject_noise": [False] * len(numbers),
        "upsample_factor": factors,
        "upsample_residual": [factor > 1 for factor in factors],  # in all of ComfyUI's versions
    }
    return {"latent_channels": size("decoder.conv_in.conv.weight", 1),
            "patch_size": round((size("decoder.conv_out.conv.weight", 0) / 3) ** 0.5),
            **{name: tuple(reversed(values)) for name, values in config.items()}}


def _depths(shapes, layers, numbers):
    return tuple(count_layers(shapes, f"{layers}.{number}.res_blocks.{{}}.conv1.conv.weight") for number in numbers)


NAMES = {"res_blocks": "resnets", "norm3.norm.": "norm3.", "conv_shortcut.": "conv_shortcut.conv.",
         "last_time_embedder.": "time_embedder.", "last_scale_shift_table": "scale_shift_table"}


def _convert(tensors, config):
    """Rename tensors by the order of the layers; diffusers' converter supports only three versions, by their widths."""
    prefixes = {}
    for half, way in (("encoder", "down"), ("decoder", "up")):
        middle, levels = _levels(tensors, half)
        prefixes[f"{half}.{way}_blocks.{middle}."] = f"{half}.mid_block."
        for index, level in enumerate(levels):
            for number, part in ((level.resnets, ""), (level.sampler, f"{way}samplers.0."),
                                 (level.widening, "conv_out." if way == "down" else "conv_in.")):
                prefixes[f"{half}.{way}_blocks.{number}."] = f"{half}.{way}_blocks.{index}.{part}"

    def renamed(name):
        prefix = re.match(r"\w+\.(down|up)_blocks\.\d+\.|", name)[0]
        name = prefixes.get(prefix, prefix) + name[len(prefix):]
        for old, new in NAMES.items():
            name = name.replace(old, new)
        return name
    return {renamed(name): tensor for name, tensor in tensors.items()}


def _finish(vae, settings):
    """Set the padding of convolutions and the decoder's timestep, for which the class has no arguments.

    Latents are (de)normalised on the host.
    """
    for half, usual in (("encoder", "zeros"), ("decoder", "reflect")):
        for module in getattr(vae, half).modules():
            if isinstance(module, Conv3d):
                module.padding_mode = settings.get(f"{half}_padding", usual)
    vae.register_to_config(decode_timestep=float(settings.get("decode_timestep", 0.05)))
    del vae.latents_mean, vae.latents_std


def _decode(vae, latent):
    """Decode all frames at once: with norms of single pixels, chunks make no difference. Some decoders remove a last
    noise level and need a timestep."""
    timestep = ([latent.new_full(latent.shape[:1], vae.config.decode_timestep)] if vae.config.timestep_conditioning
                else [])
    return vae.decode(latent, *timestep, return_dict=False)[0]


LTX = VaeFamily(
    models=("LTX-Video", "LTX-2"),
    autoencoder="AutoencoderKLLTXVideo",
    markers=("coder.up_blocks.0.res_blocks.", "coder.down_blocks.0.res_blocks."),
    config=_config,
    convert=_convert,
    finish=_finish,
    decode=_decode,
    by_frames=True,
)
