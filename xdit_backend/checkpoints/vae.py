"""Build diffusers' AutoencoderKL from the tensors of a VAE that ComfyUI has loaded. Called by the worker, offline."""

from collections.abc import Mapping
from itertools import count

import torch
from diffusers import AutoencoderKL
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

from ..protocol.errors import CheckpointError

# Part of a tensor's name -> whose VAE it is. Looked for first: some of these have AutoencoderKL's names too.
OTHER_VAES = {
    "bn.running_mean": "Flux.2's",
    "time_stack": "Stable Video Diffusion's",
    "time_mix_conv": "Stable Video Diffusion's",
    "taesd_decoder.": "a tiny autoencoder (TAESD)",
    "decoder.middle.": "the video VAE of Wan or Qwen-Image",
    "decoder.conv_in.conv.": "a video VAE",
    "decoder.stages.": "Sana's deep compression autoencoder",
}


def autoencoder_kl_config(shapes: Mapping[str, tuple[int, ...]]) -> dict:
    """The diffusers config of an image VAE, from the shapes of its tensors under LDM's names (decoder.up.0.block...).

    The encoder may be missing; the config then describes one like the decoder. Raises CheckpointError for other VAEs.
    """
    for part, owner in OTHER_VAES.items():
        if any(part in name for name in shapes):
            raise _refusal(f"It is {owner}.")
    needed = ("decoder.conv_in.weight", "decoder.conv_out.weight", "decoder.up.0.block.0.conv1.weight")
    for name in needed:
        if name not in shapes:
            raise _refusal(f"It has no tensor {name}; its {len(shapes)} tensors begin with "
                           f"{', '.join(list(shapes)[:3])}.")
        if len(shapes[name]) != 4:
            raise _refusal(f"{name} has shape {list(shapes[name])}, an image VAE's has 4 dims.")
    num_levels = _count(shapes, "decoder.up.{}.block.0.conv1.weight")
    out_channels = shapes["decoder.conv_out.weight"][0]
    return {
        "in_channels": shapes.get("encoder.conv_in.weight", (0, out_channels))[1],
        "out_channels": out_channels,
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        # Level 0 is the picture's size in both; LDM's decoder runs the levels from the last to the first.
        "block_out_channels": tuple(
            shapes[f"decoder.up.{level}.block.0.conv1.weight"][0] for level in range(num_levels)),
        "layers_per_block": _count(shapes, "decoder.up.0.block.{}.conv1.weight") - 1,  # a decoder has one more
        "down_block_types": ("DownEncoderBlock2D",) * num_levels,
        "up_block_types": ("UpDecoderBlock2D",) * num_levels,
        "norm_num_groups": 32,  # LDM's, for every width
        "mid_block_add_attention": "decoder.mid.attn_1.q.weight" in shapes,
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
        # A VAE has ComfyUI's latents as they are: the latent format has taken the model's scale and shift off.
        "scaling_factor": 1.0,
    }


def load_autoencoder_kl(tensors: Mapping[str, torch.Tensor], dtype, device) -> AutoencoderKL:
    """The VAE with these weights, copied, in `dtype` on `device`. Without encoder tensors it has no encoder.

    Names are LDM's, as in ComfyUI's first_stage_model.state_dict(). Raises CheckpointError where they do not fit.
    """
    config = autoencoder_kl_config({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    with torch.device("meta"):
        vae = AutoencoderKL(**config)
    if not any(name.startswith("encoder.") for name in tensors):
        del vae.encoder
    weights = convert_ldm_vae_checkpoint(dict(tensors), config)
    _check_fit(tensors, weights, vae)
    copies = {name: weight.new_empty(weight.shape, dtype=dtype, device=device).copy_(weight)
              for name, weight in weights.items()}
    vae.load_state_dict(copies, assign=True)
    return vae.eval().requires_grad_(False)


def _check_fit(tensors, weights, vae):
    needed = {name: tuple(parameter.shape) for name, parameter in vae.state_dict().items()}
    given = {name: tuple(weight.shape) for name, weight in weights.items()}
    wrong = [name for name in sorted({*needed, *given}) if needed.get(name) != given.get(name)]
    if wrong:
        name = wrong[0]
        raise _refusal(f"{len(wrong)} tensors do not fit, the first is {name}: shape {given.get(name, 'none')} is "
                       f"given, {needed.get(name, 'none')} is needed.")
    # The converter passes over what it does not know.
    num_known = sum(name.startswith(("decoder.", "post_quant_conv.")) for name in weights)
    num_given = sum(name.startswith(("decoder.", "post_quant_conv.")) for name in tensors)
    if num_known != num_given:
        raise _refusal(f"Of its decoder's {num_given} tensors, {num_given - num_known} are unknown.")


def _count(shapes, pattern):
    return next(number for number in count() if pattern.format(number) not in shapes)


def _refusal(reason):
    return CheckpointError(f"This VAE is not an AutoencoderKL for images. {reason} Distributed VAE Decode works with the "
                           f"VAEs of Stable Diffusion 1 and 2, SDXL, SD3 and Flux.1. Use VAE Decode for this one.")
