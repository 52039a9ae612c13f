"""Cosmos-Predict1's autoencoder of videos: wavelets of pixels;
convolutions and attention of single frames, then of frames before."""

import re

import torch

from ..protocol.errors import CheckpointError
from .vae_family import VaeFamily, count_layers, encode_full, replaced, size_of, torchs_own

# pixels and frames along a side of what wavelets make one of
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
    """Of any width and depth, with attention in the middle alone. Levels are counted from the picture's size down."""
    given, config = size_of(shapes), {"patch_size": PATCH, "attention_resolutions": ()}
    for half, way in (("encoder", "down"), ("decoder", "up")):
        level = f"{half}.{way}" + ".{}.block.0.conv1.0.conv3d.weight"
        widths = tuple(shapes[level.format(number)][0] for number in range(count_layers(shapes, level)))
        if not widths:
            continue
        blocks = count_layers(shapes, f"{half}.{way}.0.block.{{}}.conv1.0.conv3d.weight")
        if half == "encoder":
            config |= {"in_channels": given("encoder.conv_in.0.conv3d.weight", 1) // PATCH ** 3, "num_layers": blocks,
                       "latent_channels": given("encoder.conv_out.1.conv3d.weight", 0),
                       "encoder_block_out_channels": (given("encoder.conv_in.0.conv3d.weight", 0), *widths)}
        else:
            config |= {"out_channels": given("decoder.conv_out.1.conv3d.weight", 0) // PATCH ** 3,
                       "num_layers": blocks - 1, "latent_channels": given("decoder.conv_in.0.conv3d.weight", 1),
                       "decode_block_out_channels": (*widths, given("decoder.conv_in.0.conv3d.weight", 0))}
    if "num_layers" not in config:
        raise CheckpointError(f"It lacks tensors that Cosmos-Predict1's VAE has; its {len(shapes)} tensors begin with "
                              f"{', '.join(list(shapes)[:3])}.")
    return config


def _convert(tensors, config):
    last = len(config.get("decode_block_out_channels", ())) - 2

    def renamed(name):
        for pattern, new in NAMES:
            name = re.sub(pattern, new, name)
        # diffusers counts them as they run
        name = re.sub(r"\.up\.(\d+)\.", lambda match: f".up_blocks.{last - int(match[1])}.", name)
        return re.sub(r"\.down\.(\d+)\.", r".down_blocks.\1.", name)
    return {renamed(name): tensor for name, tensor in tensors.items()}


def _finish(vae, settings):
    """Its wavelets are no weights. What diffusers takes them from is on the device on which it was imported:
    perhaps on none."""
    for wavelets in (vae.encoder.patch_embed, vae.decoder.unpatch_embed):
        wavelets.wavelets, wavelets._arange = torch.tensor([0.5 ** 0.5] * 2), torch.arange(2)


def _encode(vae, image):
    """Sides are of whole patches, so that wavelets read neither what diffusers pads them by nor other rows than a
    rank's own."""
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
