"""Cosmos-Predict1's video VAE: wavelets of pixels, and factorised convolutions and attention, first within a frame and
then causally over frames."""

import re

import torch

from ..protocol.errors import CheckpointError
from .vae_family import VaeFamily, count_layers, encode_full, replaced, size_of, torchs_own

# pixels and frames per side of a wavelet patch
PATCH = 4
OVER_FRAMES = "CosmosTemporalAttentionProcessor2_0"
NAMES = (
    (r"\.conv3d\.", "."), (r"\.(conv_in|conv_out|conv1|conv2)\.0\.", r".\1.conv_s."),
    (r"\.(conv_in|conv_out|conv1|conv2)\.1\.", r".\1.conv_t."),
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."), (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attn_1\.0\.", ".mid_block.attentions.0."), (r"\.mid\.attn_1\.1\.", ".mid_block.temp_attentions.0."),
    (r"attentions\.0\.([qkv])\.", r"attentions.0.to_\1."), (r"attentions\.0\.proj_out\.", "attentions.0.to_out.0."),
    (r"\.nin_shortcut\.", ".conv_shortcut."), (r"\.block\.", ".resnets."), (r"\.(up|down)sample\.", r".\1samplers.0."))


def _config(shapes, settings):
    """Configuration of any width and depth, with attention in the middle block only. Level 0 has the image's size."""
    size, config = size_of(shapes), {"patch_size": PATCH, "attention_resolutions": ()}
    for half, way in (("encoder", "down"), ("decoder", "up")):
        level = f"{half}.{way}" + ".{}.block.0.conv1.0.conv3d.weight"
        widths = tuple(shapes[level.format(number)][0] for number in range(count_layers(shapes, level)))
        if not widths:
            continue
        blocks = count_layers(shapes, f"{half}.{way}.0.block.{{}}.conv1.0.conv3d.weight")
        if half == "encoder":
            config |= {"in_channels": size("encoder.conv_in.0.conv3d.weight", 1) // PATCH ** 3, "num_layers": blocks,
                       "latent_channels": size("encoder.conv_out.1.conv3d.weight", 0),
                       "encoder_block_out_channels": (size("encoder.conv_in.0.conv3d.weight", 0), *widths)}
        else:
            config |= {"out_channels": size("decoder.conv_out.1.conv3d.weight", 0) // PATCH ** 3,
                       "num_layers": blocks - 1, "latent_channels": size("decoder.conv_in.0.conv3d.weight", 1),
                       "decode_block_out_channels": (*widths, size("decoder.conv_in.0.conv3d.weight", 0))}
    if "num_layers" not in config:
        raise CheckpointError(f"It lacks tensors that Cosmos-Predict1's VAE has; its {len(shapes)} tensors begin with "
                              f"{', '.join(list(shapes)[:3])}.")
    return config


def _convert(tensors, config):
    last = len(config.get("decode_block_out_channels", ())) - 2

    def renamed(name):
        for pattern, new in NAMES:
            name = re.sub(pattern, new, name)
        # diffusers numbers them in the order of execution
        name = re.sub(r"\.up\.(\d+)\.", lambda match: f".up_blocks.{last - int(match[1])}.", name)
        return re.sub(r"\.down\.(\d+)\.", r".down_blocks.\1.", name)
    return {renamed(name): tensor for name, tensor in tensors.items()}


def _finish(vae, settings):
    """Set the wavelets, which are not weights: diffusers computes them on the default device of its import, which may
    be meta."""
    for wavelets in (vae.encoder.patch_embed, vae.decoder.unpatch_embed):
        wavelets.wavelets, wavelets._arange = torch.tensor([0.5 ** 0.5] * 2), torch.arange(2)


def _encode(vae, image):
    """Encode without the wavelets' padding: sides are multiples of the patch size, so that wavelets read neither
    padding nor other ranks' rows."""
    embed = vae.encoder.patch_embed.to(image.device)

    def of_own_rows(video):
        with torchs_own("conv3d", "pad"):
            return type(embed).forward(embed, video)
    with replaced(embed, forward=of_own_rows):
        return encode_full(vae, image)


COSMOS = VaeFamily(
    models=("Cosmos-Predict1",),
    autoencoder="AutoencoderKLCosmos",
    markers=("coder.mid.block_1.conv1.0.conv3d.",),
    decoder=("decoder.", "post_quant_conv."),
    encoder=("encoder.", "quant_conv."),
    config=_config,
    convert=_convert,
    finish=_finish,
    encode=_encode,
    over_frames=lambda module: type(getattr(module, "processor", None)).__name__ == OVER_FRAMES,
)
