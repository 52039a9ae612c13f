"""Stable Video Diffusion's VAE: LDM's image encoder, and a decoder that also mixes the frames after every block.

All frames are decoded at once, as in ComfyUI when its memory allows.
"""

import re

from torch import nn

from .kl import kl_config
from .vae_family import VaeFamily

ARGUMENTS = ("in_channels", "out_channels", "latent_channels", "block_out_channels", "layers_per_block",
             "down_block_types", "scaling_factor")
OVER_TIME = {"in_layers.0": "norm1", "in_layers.2": "conv1", "out_layers.0": "norm2", "out_layers.3": "conv2"}


def _config(shapes, settings):
    config = kl_config(shapes)
    return {name: config[name] for name in ARGUMENTS}


def _convert(tensors, config):
    """Rename tensors with diffusers' converter for LDM, which leaves the names of temporal layers unchanged."""
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
    weights = convert_ldm_vae_checkpoint(tensors, {**config, "up_block_types": config["down_block_types"]})
    after_all = {name.replace("conv_out.time_mix_conv", "time_conv_out"): tensor for name, tensor in tensors.items()
                 if ".time_mix_conv." in name}
    return {re.sub(r"^(decoder\..*\.resnets\.\d+\.)(.*)$", _in_block, name): tensor
            for name, tensor in weights.items()} | after_all


def _in_block(match):
    block, name = match.groups()
    if name == "mix_factor":
        return f"{block}time_mixer.mix_factor"
    if not name.startswith("time_stack."):
        return f"{block}spatial_res_block.{name}"
    layer, _, leaf = name.removeprefix("time_stack.").rpartition(".")
    return f"{block}temporal_res_block.{OVER_TIME.get(layer, layer)}.{leaf}"


def _finish(vae, settings):
    """Remove the convolution after the encoder, which ComfyUI's does not have."""
    vae.quant_conv = nn.Identity()


def _decode(vae, latent):
    """latent: (B, C, F, H, W)."""
    batch, _, num_frames = latent.shape[:3]
    frames = vae.decode(latent.movedim(2, 1).flatten(0, 1), num_frames=num_frames, return_dict=False)[0]
    return frames.unflatten(0, (batch, num_frames)).movedim(1, 2)


SVD = VaeFamily(
    models=("Stable Video Diffusion",),
    autoencoder="AutoencoderKLTemporalDecoder",
    markers=("time_stack.", "time_mix_conv."),
    config=_config,
    convert=_convert,
    finish=_finish,
    decode=_decode,
)
