"""The families of VAEs: how to tell one from its tensors' names and shapes, its diffusers class and config, its key names.

Read by vae.py. Names are those of ComfyUI's first_stage_model.state_dict(). Either half, encoder or decoder, may be missing:
the config then describes one like the other.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from diffusers import AutoencoderKL, AutoencoderKLWan, AutoencoderTiny
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint, convert_wan_vae_to_diffusers

from ..protocol.errors import CheckpointError


@dataclass(frozen=True)
class VaeFamily:
    """config(shapes) -> (diffusers class, its arguments). convert(tensors, arguments) -> tensors under diffusers' names."""

    name: str                              # in a person's words
    marks: tuple[str, ...]                 # a tensor's name with one of these is found in no other family
    config: Callable
    convert: Callable


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
              lambda shapes: (AutoencoderKLWan, wan22_config(shapes)), convert_wan22),
    VaeFamily("Wan 2.1 and Qwen-Image", ("coder.middle.0.residual.",),
              lambda shapes: (AutoencoderKLWan, wan_config(shapes)), lambda tensors, config: convert_wan_vae_to_diffusers(tensors)),
    VaeFamily("tiny autoencoders (TAESD)", ("taesd_decoder.", "taesd_encoder."),
              lambda shapes: (AutoencoderTiny, tiny_config(shapes)), convert_tiny),
    VaeFamily("SD, SDXL, SD3, Flux and Flux.2", (),
              lambda shapes: (AutoencoderKL, autoencoder_kl_config(shapes)), convert_ldm_vae_checkpoint),
)
