"""The families of VAEs: how to tell one from its tensors' names and shapes, its diffusers class and config, its key names.

Read by vae.py. Names are those of ComfyUI's first_stage_model.state_dict(). Either half, encoder or decoder, may be missing:
the config then describes one like the other.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from diffusers import (
    AutoencoderKL,
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLLTXVideo,
    AutoencoderKLWan,
    AutoencoderTiny,
)
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint, convert_wan_vae_to_diffusers
from torch.nn import Conv3d

from ..protocol.errors import CheckpointError


@dataclass(frozen=True)
class VaeFamily:
    """config(shapes, settings) -> (diffusers class, its arguments). convert(tensors, arguments) -> tensors under diffusers' names.

    finish(vae, settings) gives the model without weights what its class has no argument for.
    """

    name: str                              # in a person's words
    marks: tuple[str, ...]                 # a tensor's name with one of these is found in no other family
    config: Callable
    convert: Callable
    finish: Callable = lambda vae, settings: None


def refusal(reason):
    return CheckpointError(f"This VAE cannot be run by xDiT. {reason} Distributed VAE Decode and Encode work with the VAEs of "
                           f"{supported()}. Use VAE Decode or VAE Encode for this one.")


def supported():
    """The families that can be loaded, for a message."""
    names = [family.name for family in FAMILIES]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def autoencoder_kl_config(shapes):
    """AutoencoderKL's config, from the shapes of its tensors under LDM's names (decoder.up.0.block...)."""
    half = "decoder" if any(name.startswith("decoder.") for name in shapes) else "encoder"
    level = "decoder.up" if half == "decoder" else "encoder.down"
    for name in (f"{half}.conv_in.weight", f"{half}.conv_out.weight", f"{level}.0.block.0.conv1.weight"):
        if name not in shapes:
            raise refusal(f"It has no tensor {name}; its {len(shapes)} tensors begin with {', '.join(list(shapes)[:3])}.")
        if len(shapes[name]) != 4:
            raise refusal(f"{name} has shape {list(shapes[name])}, an image VAE's has 4 dims.")
    num_levels = _count(shapes, level + ".{}.block.0.conv1.weight")
    decodes = half == "decoder"
    out_channels = shapes["decoder.conv_out.weight"][0] if decodes else 3
    return {
        "in_channels": shapes.get("encoder.conv_in.weight", (0, out_channels))[1],
        "out_channels": out_channels,
        "latent_channels": shapes["decoder.conv_in.weight"][1] if decodes else shapes["encoder.conv_out.weight"][0] // 2,
        # Level 0 is the picture's size in both; LDM's decoder runs the levels from the last to the first.
        "block_out_channels": tuple(shapes[f"{level}.{index}.block.0.conv1.weight"][0] for index in range(num_levels)),
        "layers_per_block": _count(shapes, level + ".0.block.{}.conv1.weight") - decodes,  # a decoder has one more
        "down_block_types": ("DownEncoderBlock2D",) * num_levels,
        "up_block_types": ("UpDecoderBlock2D",) * num_levels,
        "norm_num_groups": 32,  # LDM's, for every width
        "mid_block_add_attention": f"{half}.mid.attn_1.q.weight" in shapes,
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
        # A VAE has ComfyUI's latents as they are: the latent format has taken the model's scale and shift off.
        "scaling_factor": 1.0,
    }


# --- Wan ---

RESIDUAL = {".residual.0.": ".norm1.", ".residual.2.": ".conv1.", ".residual.3.": ".norm2.", ".residual.6.": ".conv2.",
            ".shortcut.": ".conv_shortcut."}


def wan_config(shapes):
    """Wan 2.1's and Qwen-Image's, of any width. Depths are those of diffusers' converter."""
    given = _given(shapes)
    latent_channels = given("decoder.conv1.weight", 1) or given("encoder.head.2.weight", 0) // 2
    return {"base_dim": given("encoder.conv1.weight", 0) or given("decoder.head.0.gamma", 0),
            "decoder_base_dim": given("decoder.head.0.gamma", 0), "z_dim": latent_channels,
            "in_channels": given("encoder.conv1.weight", 1) or 3, "out_channels": given("decoder.head.2.weight", 0) or 3}


def wan22_config(shapes):
    """Wan 2.2's, of any width: blocks with shortcuts, on patches of 2 x 2 pixels."""
    return {**wan_config(shapes), "is_residual": True, "patch_size": 2, "scale_factor_spatial": 16,
            "in_channels": 12, "out_channels": 12}


def convert_wan22(tensors, config):
    """diffusers' converter knows the ends and the middle; its blocks have one level less than Wan 2.2's."""
    blocks = {name: tensor for name, tensor in tensors.items() if re.match(r"\w+\.(up|down)samples\.", name)}
    weights = convert_wan_vae_to_diffusers({name: tensor for name, tensor in tensors.items() if name not in blocks})
    for name, tensor in blocks.items():
        for old, new in RESIDUAL.items():
            name = name.replace(old, new)
        way = "up" if ".upsamples." in name else "down"
        layer = "upsampler" if way == "up" else "downsampler"
        name = re.sub(r"\.(up|down)samples\.(\d+)\.(up|down)samples\.(\d+)\.(resample|time_conv)\.",
                      rf".{way}_blocks.\2.{layer}.\5.", name)
        weights[re.sub(r"\.(up|down)samples\.(\d+)\.(up|down)samples\.(\d+)\.", rf".{way}_blocks.\2.resnets.\4.", name)] = tensor
    return weights


# --- LTX-Video ---

# pixels that one position of a downsampler's result is made of -> diffusers' name
LTX_SAMPLERS = {1: "conv", 2: "temporal", 4: "spatial", 8: "spatiotemporal"}


@dataclass(frozen=True)
class LtxLevel:
    """Where one level's layers are among the numbered ones of a half: its resnets, what changes its size, its width."""

    resnets: int
    sampler: int | None = None
    widening: int | None = None


def ltx_levels(shapes, half):
    """The resnets in the middle, and the levels, of LTX's encoder or decoder, in the order they run."""
    layers = f"{half}.{'down' if half == 'encoder' else 'up'}_blocks"
    middle, levels, found = None, [], {}
    order = range(next(number for number in count() if not any(name.startswith(f"{layers}.{number}.") for name in shapes)))
    for number in order if half == "decoder" else reversed(order):
        if f"{layers}.{number}.res_blocks.0.conv1.conv.weight" not in shapes:
            found["widening" if f"{layers}.{number}.conv1.conv.weight" in shapes else "sampler"] = number
        elif middle is None:
            middle = number
        elif half == "decoder":                                # the resnets end a level of the decoder
            levels.append(LtxLevel(number, **found))
            found = {}
        else:                                                  # and begin one of the encoder
            levels.insert(0, LtxLevel(number, **found))
            found = {}
    return middle, levels


def ltx_config(shapes, settings):
    """LTX-Video's, from 0.9 on, of any width and depth. settings: see AutoencoderSpec.

    Raises CheckpointError for the decoder of 0.9.1, which adds noise to the picture.
    """
    if any("per_channel_scale" in name for name in shapes):
        raise refusal("It is LTX-Video 0.9.1's, whose decoder adds random noise to the picture between its layers.")
    given = _given(shapes)
    config = {"timestep_conditioning": any("last_time_embedder." in name for name in shapes),
              "decoder_causal": settings.get("causal_decoder") == "True", "spatial_compression_ratio": 32}   # for tiles only
    for half in ("encoder", "decoder"):
        if f"{half}.conv_in.conv.weight" in shapes:
            config |= (_ltx_encoder if half == "encoder" else _ltx_decoder)(shapes, given)
    return config


def _ltx_encoder(shapes, given):
    middle, levels = ltx_levels(shapes, "encoder")
    numbers = [level.resnets for level in levels] + [middle]
    widths = [given(f"encoder.down_blocks.{number}.res_blocks.0.conv1.conv.weight", 0) for number in numbers]
    samplers = [given(f"encoder.down_blocks.{level.sampler}.conv.conv.weight", 0) for level in levels]
    kinds = [LTX_SAMPLERS.get(width // sampled) if sampled else "conv" for sampled, width in zip(samplers, widths[1:])]
    new = any(kind != "conv" for kind in kinds)                # 0.9.5 packs pixels into channels
    return {
        "latent_channels": given("encoder.conv_out.conv.weight", 0) - 1,
        "block_out_channels": tuple(widths if new else widths[:-1]),
        "down_block_types": ("LTXVideo095DownBlock3D" if new else "LTXVideoDownBlock3D",) * len(levels),
        "downsample_type": tuple(kinds),
        "spatio_temporal_scaling": tuple(level.sampler is not None for level in levels),
        "layers_per_block": _ltx_depths(shapes, "encoder.down_blocks", numbers),
        "patch_size": round((given("encoder.conv_in.conv.weight", 1) / 3) ** 0.5),
    }


def _ltx_decoder(shapes, given):
    middle, levels = ltx_levels(shapes, "decoder")
    numbers = [middle] + [level.resnets for level in levels]
    # The upsampler makes 8 positions of one, with as many channels or with fewer.
    factors = [8 * given(name, 1) // given(name, 0) if level.sampler is not None else 1 for level in levels
               for name in (f"decoder.up_blocks.{level.sampler}.conv.conv.weight",)]
    widths = [given(f"decoder.up_blocks.{level.resnets}.res_blocks.0.conv1.conv.weight", 0) for level in levels]
    config = {
        "decoder_block_out_channels": [width * factor for width, factor in zip(widths, factors)],
        "decoder_spatio_temporal_scaling": [level.sampler is not None for level in levels],
        "decoder_layers_per_block": _ltx_depths(shapes, "decoder.up_blocks", numbers),
        "decoder_inject_noise": [False] * len(numbers),
        "upsample_factor": factors,
        "upsample_residual": [factor > 1 for factor in factors],  # so in each of ComfyUI's
    }
    return {"latent_channels": given("decoder.conv_in.conv.weight", 1),
            "patch_size": round((given("decoder.conv_out.conv.weight", 0) / 3) ** 0.5),
            **{name: tuple(reversed(values)) for name, values in config.items()}}


def _ltx_depths(shapes, layers, numbers):
    return tuple(_count(shapes, f"{layers}.{number}.res_blocks.{{}}.conv1.conv.weight") for number in numbers)


LTX_NAMES = {"res_blocks": "resnets", "norm3.norm.": "norm3.", "conv_shortcut.": "conv_shortcut.conv.",
             "last_time_embedder.": "time_embedder.", "last_scale_shift_table": "scale_shift_table"}


def convert_ltx(tensors, config):
    """diffusers' converter knows three versions by their widths; this one goes by the order of the layers."""
    prefixes = {}
    for half, way in (("encoder", "down"), ("decoder", "up")):
        middle, levels = ltx_levels(tensors, half)
        prefixes[f"{half}.{way}_blocks.{middle}."] = f"{half}.mid_block."
        for index, level in enumerate(levels):
            for number, part in ((level.resnets, ""), (level.sampler, f"{way}samplers.0."),
                                 (level.widening, "conv_out." if way == "down" else "conv_in.")):
                prefixes[f"{half}.{way}_blocks.{number}."] = f"{half}.{way}_blocks.{index}.{part}"

    def renamed(name):
        prefix = re.match(r"\w+\.(down|up)_blocks\.\d+\.|", name)[0]
        name = prefixes.get(prefix, prefix) + name[len(prefix):]
        for old, new in LTX_NAMES.items():
            name = name.replace(old, new)
        return name
    return {renamed(name): tensor for name, tensor in tensors.items()}


def finish_ltx(vae, settings):
    """What the class has no argument for: how convolutions pad, and the timestep of the decoder. The host (un)normalises."""
    for half, usual in (("encoder", "zeros"), ("decoder", "reflect")):
        for module in getattr(vae, half).modules():
            if isinstance(module, Conv3d):
                module.padding_mode = settings.get(f"{half}_padding", usual)
    vae.register_to_config(decode_timestep=float(settings.get("decode_timestep", 0.05)))
    del vae.latents_mean, vae.latents_std


# --- HunyuanVideo ---

def hunyuan_config(shapes):
    """LDM's structure with convolutions over time."""
    config = autoencoder_kl_config({_without_conv(name): shape[:2] + shape[3:] for name, shape in shapes.items()})
    num_levels = len(config["block_out_channels"])
    return {**{name: config[name] for name in ("in_channels", "out_channels", "latent_channels", "block_out_channels",
                                               "layers_per_block", "norm_num_groups", "mid_block_add_attention")},
            "down_block_types": ("HunyuanVideoDownBlock3D",) * num_levels,
            "up_block_types": ("HunyuanVideoUpBlock3D",) * num_levels}


def convert_hunyuan(tensors, config):
    """By LDM's converter, to which a convolution over time is shown as one of pictures."""
    weights = convert_ldm_vae_checkpoint({_without_conv(name): tensor for name, tensor in tensors.items()}, config)

    def renamed(name):
        layer, _, leaf = name.rpartition(".")
        is_conv = layer.rpartition(".")[2] in ("conv", "conv1", "conv2", "conv_in", "conv_out", "conv_shortcut")
        return f"{layer}.conv.{leaf}" if is_conv else name
    return {renamed(name): tensor.flatten(1) if ".attentions." in name and tensor.ndim > 1 else tensor
            for name, tensor in weights.items()}


def _without_conv(name):
    """The name that the layer has in a VAE of pictures."""
    return re.sub(r"\.conv\.(weight|bias)$", r".\1", name)


# --- CogVideoX, whose names are diffusers' in ComfyUI too ---

def cogvideox_config(shapes):
    """Of any width and depth."""
    given = _given(shapes)
    half = "decoder" if "decoder.conv_in.conv.weight" in shapes else "encoder"
    blocks = "decoder.up_blocks" if half == "decoder" else "encoder.down_blocks"
    num_levels = _count(shapes, blocks + ".{}.resnets.0.conv1.conv.weight")
    widths = tuple(given(f"{blocks}.{index}.resnets.0.conv1.conv.weight", 0) for index in range(num_levels))
    return {
        "block_out_channels": widths if half == "encoder" else widths[::-1],
        "layers_per_block": _count(shapes, blocks + ".0.resnets.{}.conv1.conv.weight") - (half == "decoder"),
        "latent_channels": given("decoder.conv_in.conv.weight", 1) or given("encoder.conv_out.conv.weight", 0) // 2,
        "down_block_types": ("CogVideoXDownBlock3D",) * num_levels,
        "up_block_types": ("CogVideoXUpBlock3D",) * num_levels,
    }


# --- tiny autoencoders ---

def tiny_config(shapes):
    given = _given(shapes)
    if any(".pool." in name for name in shapes):
        raise refusal("It is a tiny autoencoder of Flux.2's latents, whose blocks have norms.")
    return {"latent_channels": given("taesd_decoder.1.weight", 1) or given("taesd_encoder.14.weight", 0)}


def convert_tiny(tensors, config):
    """Layers are numbered alike, but that ComfyUI's decoder begins with a clamp. Scale and shift are the host's."""
    def renamed(name):
        name = name.replace("taesd_encoder.", "encoder.layers.")
        return re.sub(r"taesd_decoder\.(\d+)", lambda match: f"decoder.layers.{int(match[1]) - 1}", name)
    return {renamed(name): tensor for name, tensor in tensors.items()}


def _count(shapes, pattern):
    return next(number for number in count() if pattern.format(number) not in shapes)


def _given(shapes):
    """shapes[name][dim], or None where there is no such tensor."""
    return lambda name, dim: shapes[name][dim] if name in shapes else None


# Looked through in this order; the last takes what has no mark of another.
FAMILIES = (
    VaeFamily("Wan 2.2", ("coder.downsamples.0.downsamples.", "coder.upsamples.0.upsamples."),
              lambda shapes, settings: (AutoencoderKLWan, wan22_config(shapes)), convert_wan22),
    VaeFamily("Wan 2.1 and Qwen-Image", ("coder.middle.0.residual.",),
              lambda shapes, settings: (AutoencoderKLWan, wan_config(shapes)), lambda tensors, config: convert_wan_vae_to_diffusers(tensors)),
    VaeFamily("LTX-Video", ("coder.up_blocks.0.res_blocks.", "coder.down_blocks.0.res_blocks."),
              lambda shapes, settings: (AutoencoderKLLTXVideo, ltx_config(shapes, settings)), convert_ltx, finish_ltx),
    VaeFamily("HunyuanVideo", ("coder.mid.block_1.conv1.conv.",),
              lambda shapes, settings: (AutoencoderKLHunyuanVideo, hunyuan_config(shapes)), convert_hunyuan),
    VaeFamily("CogVideoX", ("coder.mid_block.resnets.0.conv1.conv.",),
              lambda shapes, settings: (AutoencoderKLCogVideoX, cogvideox_config(shapes)), lambda tensors, config: tensors),
    VaeFamily("tiny autoencoders (TAESD)", ("taesd_decoder.", "taesd_encoder."),
              lambda shapes, settings: (AutoencoderTiny, tiny_config(shapes)), convert_tiny),
    VaeFamily("SD, SDXL, SD3, Flux and Flux.2", (),
              lambda shapes, settings: (AutoencoderKL, autoencoder_kl_config(shapes)), convert_ldm_vae_checkpoint),
)
