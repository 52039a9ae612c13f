"""HunyuanImage 2.1's image VAE: LDM's blocks, with pixel shuffle and unshuffle for resizing."""

import re

from ..protocol.errors import CheckpointError
from .vae_family import VaeFamily, count_layers, need_diffusers, size_of

NAMES = (
    (".mid.block_1.", ".mid_block.resnets.0."), (".mid.block_2.", ".mid_block.resnets.1."),
    (".mid.attn_1.", ".mid_block.attentions.0."),
    (".attentions.0.q.", ".attentions.0.to_q."), (".attentions.0.k.", ".attentions.0.to_k."),
    (".attentions.0.v.", ".attentions.0.to_v."),
    (".attentions.0.proj_out.", ".attentions.0.proj."))


def _config(shapes, settings):
    """Configuration, with levels in the encoder's order, from the image's size down."""
    need_diffusers("HunyuanImage", "0.36")
    if any(len(shapes.get(f"{half}.conv_in.weight", ())) == 5 for half in ("encoder", "decoder")):
        raise CheckpointError("It is that of HunyuanImage's refiner, which works on several frames.")
    decodes, size = any(name.startswith("decoder.") for name in shapes), size_of(shapes)
    level, resize = ("decoder.up", "upsample") if decodes else ("encoder.down", "downsample")
    widths = [size(f"{level}.{index}.block.0.conv2.weight", 0)
              for index in range(count_layers(shapes, level + ".{}.block.0.conv2.weight"))]
    latent = size("decoder.conv_in.weight", 1) or (size("encoder.conv_out.weight", 0) or 0) // 2
    if not widths or not latent:
        raise CheckpointError(f"It lacks tensors that a HunyuanImage VAE has; its {len(shapes)} tensors begin with "
                              f"{', '.join(list(shapes)[:3])}.")
    ratio = 2 ** count_layers(shapes, f"{level}.{{}}.{resize}.conv.weight")
    return {"in_channels": size("encoder.conv_in.weight", 1) or 3,
            "out_channels": size("decoder.conv_out.weight", 0) or 3, "latent_channels": latent,
            "block_out_channels": tuple(widths[::-1] if decodes else widths),
            # a decoder has one more
            "layers_per_block": count_layers(shapes, level + ".0.block.{}.conv1.weight") - decodes,
            "spatial_compression_ratio": ratio, "sample_size": 32 * ratio, "scaling_factor": 1.0}


def _convert(tensors, config):
    """Rename tensors: diffusers numbers the blocks and the resizing layers of a half consecutively."""
    def renamed(name):
        for old, new in NAMES:
            name = name.replace(old, new)
        return re.sub(r"^(de|en)coder\.(up|down)\.(\d+)\.(?:block\.(\d+)|\2sample)\.", numbered, name)

    def numbered(match):
        half, way, level, block = match.groups()
        count = config["layers_per_block"] + (half == "de")
        return f"{half}coder.{way}_blocks.{int(level) * (count + 1) + (count if block is None else int(block))}."
    return {renamed(name): tensor for name, tensor in tensors.items()}


HUNYUAN_IMAGE = VaeFamily(
    models=("HunyuanImage 2.1",),
    autoencoder="AutoencoderKLHunyuanImage",
    markers=("decoder.up.0.upsample.conv.weight", "encoder.down.4.downsample.conv.weight"),
    config=_config,
    convert=_convert,
)
