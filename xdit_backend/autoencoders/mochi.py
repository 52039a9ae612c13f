"""Mochi's video VAE: norms of single frames, and in the encoder temporal attention at each spatial position."""

# Tensors are (B, C, F, H, W): F frames

import re

from torch.nn import Conv3d

from ..protocol.errors import CheckpointError
from .vae_family import VaeFamily

NAMES = (
    (r"\.resnets\.(\d+)\.0\.", r".resnets.\1.norm1.norm_layer."),
    (r"\.resnets\.(\d+)\.2\.", r".resnets.\1.conv1.conv."),
    (r"\.resnets\.(\d+)\.3\.", r".resnets.\1.norm2.norm_layer."),
    (r"\.resnets\.(\d+)\.5\.", r".resnets.\1.conv2.conv."),
    (r"\.out\.", ".to_out.0."),
    (r"^encoder\.layers\.0\.", "encoder.proj_in."), (r"^decoder\.blocks\.0\.0\.", "decoder.conv_in."),
    (r"\.output_norm\.", ".norm_out.norm_layer."), (r"\.output_proj\.", ".proj_out."))


def _numbers(shapes, pattern):
    """The numbers in the names that match a pattern, in order."""
    return sorted({int(match[1]) for match in (re.fullmatch(pattern, name) for name in shapes) if match})


def _resized(shapes):
    """Numbers of the encoder's downsampling and of the decoder's upsampling layers."""
    return _numbers(shapes, r"encoder\.layers\.(\d+)\.layers\.0\.weight"), _numbers(
        shapes, r"decoder\.blocks\.(\d+)\.proj\.weight")


def _resnets(shapes):
    """{name prefix of a resnet and its attention: the prefix in diffusers, with {} for the list's name}"""
    (down, up), prefixes = _resized(shapes), {}
    for number in _numbers(shapes, r"encoder\.layers\.(\d+)\.stack\.2\.weight"):
        block = ("block_in", number - 1) if number < down[0] else ("block_out", number - down[-1] - 1)
        prefixes[f"encoder.layers.{number}."] = "encoder.{}.{{}}.{}.".format(*block)
    for level, number in enumerate(down):
        for inner in _numbers(shapes, rf"encoder\.layers\.{number}\.layers\.(\d+)\.stack\.2\.weight"):
            prefixes[f"encoder.layers.{number}.layers.{inner}."] = f"encoder.down_blocks.{level}.{{}}.{inner - 1}."
    for inner in _numbers(shapes, r"decoder\.blocks\.0\.(\d+)\.stack\.2\.weight"):
        prefixes[f"decoder.blocks.0.{inner}."] = f"decoder.block_in.{{}}.{inner - 1}."
    for level, number in enumerate(up):
        for inner in _numbers(shapes, rf"decoder\.blocks\.{number}\.blocks\.(\d+)\.stack\.2\.weight"):
            prefixes[f"decoder.blocks.{number}.blocks.{inner}."] = f"decoder.up_blocks.{level}.{{}}.{inner}."
    for inner in _numbers(shapes, rf"decoder\.blocks\.{len(up) + 1}\.(\d+)\.stack\.2\.weight"):
        prefixes[f"decoder.blocks.{len(up) + 1}.{inner}."] = f"decoder.block_out.{{}}.{inner}."
    return prefixes
def _config(shapes, settings):
    """Configuration of any width and depth. Level 0 has the image's size."""
    (down, up), resnets = _resized(shapes), _resnets(shapes)
    if not resnets or not (down or up):
        raise CheckpointError(f"It lacks tensors that Mochi's VAE has; its {len(shapes)} tensors begin with "
                              f"{', '.join(list(shapes)[:3])}.")

    def counted(half, *levels):
        """Number of resnets of each level."""
        return tuple(sum(name.startswith(f"{half}.{level}.") for name in resnets.values()) for level in levels)

    config = {"spatial_expansions": (2,) * len(down or up)}
    if down:
        levels = ("block_in", *(f"down_blocks.{level}" for level in range(len(down))), "block_out")
        convs = [shapes[f"encoder.layers.{number}.layers.0.weight"] for number in down]
        attended = {resnets[name.partition("attn_block.")[0]] for name in shapes if "attn_block." in name}
        config |= {
            "in_channels": shapes["encoder.layers.0.weight"][1],
            "latent_channels": shapes["encoder.output_proj.weight"][0] // 2,
            "encoder_block_out_channels": (shapes["encoder.layers.0.weight"][0], *(conv[0] for conv in convs)),
            "temporal_expansions": tuple(conv[2] for conv in convs), "layers_per_block": counted("encoder", *levels),
            "add_attention_block": tuple(any(name.startswith(f"encoder.{level}.") for name in attended)
                                         for level in levels)}
    if up:
        levels = ("block_out", *(f"up_blocks.{level}" for level in reversed(range(len(up)))), "block_in")
        projections = [shapes[f"decoder.blocks.{number}.proj.weight"] for number in reversed(up)]
        widths = (shapes["decoder.output_proj.weight"][1], *(projection[1] for projection in projections))
        config |= {
            "out_channels": shapes["decoder.output_proj.weight"][0],
            "latent_channels": shapes["decoder.blocks.0.0.weight"][1],
            "decoder_block_out_channels": widths, "layers_per_block": counted("decoder", *levels),
            "temporal_expansions": tuple(projection[0] // (4 * width)
                                         for projection, width in zip(projections, widths))}
    return config


def _convert(tensors, config):
    (down, up), rules = _resized(tensors), []
    for old, new in _resnets(tensors).items():
        old = f"^{re.escape(old)}"
        rules += [(rf"{old}stack\.", new.format("resnets")), (rf"{old}attn_block\.attn\.", new.format("attentions")),
                  (rf"{old}attn_block\.norm\.", new.format("norms") + "norm_layer.")]
    rules += [(rf"^encoder\.layers\.{number}\.layers\.0\.", f"encoder.down_blocks.{level}.conv_in.conv.")
              for level, number in enumerate(down)]
    rules += [(rf"^decoder\.blocks\.{number}\.proj\.", f"decoder.up_blocks.{level}.proj.")
              for level, number in enumerate(up)]
    weights = {}
    for name, tensor in tensors.items():
        for pattern, new in (*rules, *NAMES):
            name = re.sub(pattern, new, name)
        weights |= dict(zip((name.replace(".qkv.", f".to_{each}.") for each in "qkv"),
                            tensor.chunk(3) if ".qkv." in name else [tensor]))
    return weights


def _finish(vae, settings):
    """Use attention between all frames as in ComfyUI, and plain convolutions, since diffusers' chunked ones cannot be
    split by rows."""
    for module in vae.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
        if isinstance(module, Conv3d):
            module.__class__ = Conv3d


def _decode(vae, latent):
    """Drop the frames before the first one after each temporal upsampling as ComfyUI does; diffusers does so at the
    end."""
    decoder = vae.decoder
    hidden = decoder.block_in(decoder.conv_in(latent))[0]
    for block in decoder.up_blocks:
        hidden = block(hidden)[0][:, :, block.temporal_expansion - 1:]
    hidden = decoder.nonlinearity(decoder.block_out(hidden)[0])
    return decoder.proj_out(hidden.movedim(1, -1)).movedim(-1, 1)


def _encode(vae, image):
    return vae.encoder(image)[0].chunk(2, 1)[0]


MOCHI = VaeFamily(
    models=("Mochi",),
    autoencoder="AutoencoderKLMochi",
    markers=("decoder.blocks.0.1.stack.", "encoder.layers.1.stack."),
    config=_config,
    convert=_convert,
    finish=_finish,
    decode=_decode,
    encode=_encode,
    over_frames=lambda module: type(module).__name__ == "Attention",
)
