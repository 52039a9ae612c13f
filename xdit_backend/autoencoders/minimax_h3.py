"""MiniMax H3's autoencoder of videos, as ComfyUI's own module: an encoder of convolutions and a decoder of attention,
both of which go over tiles of some frames and 256 x 256 pixels, that it blends."""

import functools
import sys

import torch

from .vae_family import VaeFamily, count_layers, replaced, signed_pixels

ARGUMENTS = ("clip_length", "token_drop", "tile_size", "tile_overlap_min", "tiling")
DECODER = ("num_layers", "heads", "dim_head")


def settings_of(model):
    """What ComfyUI's object of the class says of itself, beside its tensors."""
    block = model.decoder.transformer_blocks[0].attn
    decoder = {"num_layers": len(model.decoder.transformer_blocks), "heads": block.heads, "dim_head": block.dim_head}
    return {name: str(int(value)) for name, value in ({name: getattr(model, name) for name in ARGUMENTS}
                                                      | decoder).items()}


def _config(shapes, settings):
    arguments: dict[str, object] = {name: int(settings[name]) for name in ARGUMENTS if name in settings}
    levels = range(count_layers(shapes, "encoder.down.{}.block.0.conv1.weight"))
    if levels:
        widths = [shapes[f"encoder.down.{level}.block.0.conv1.weight"][0] for level in levels]
        arguments |= {"ch": widths[0], "ch_mult": [width // widths[0] for width in widths],
                      "num_res_blocks": count_layers(shapes, "encoder.down.0.block.{}.conv1.weight")}
    return arguments


def _finish(vae, settings):
    """The class makes a decoder of the published size."""
    sizes = {name: int(settings[name]) for name in DECODER if name in settings}
    if sizes:
        made = vae.decoder
        vae.decoder = type(made)(made.patch_size, made.patch_size_t, **sizes)


def _build_small(cls, model):
    theirs = sys.modules[type(model).__module__]
    # the class has no argument for the decoder's size
    with replaced(theirs, ViT3DDecoder=functools.partial(theirs.ViT3DDecoder, num_layers=1, heads=1, dim_head=64)):
        return cls(ch=32, ch_mult=(1,) * len(model.encoder.down), num_res_blocks=1,
                   **{name: getattr(model, name) for name in ARGUMENTS})


def _writes_into_buffer(vae):
    """From ComfyUI 0.32.0 on the class gives pixels in [0, 1], and writes them where ComfyUI keeps images, or into a
    buffer that it is given; before, it gives pixels in [-1, 1]."""
    return hasattr(vae, "decode_output_shape")


def _decode(vae, latent):
    if not _writes_into_buffer(vae):
        return vae.decode(latent)
    device = latent.device if vae.has_every_tile() else "meta"
    return vae.decode(latent, output_buffer=torch.empty(vae.decode_output_shape(latent.shape), device=device))


def _pixels(vae, image):
    return image.float() if _writes_into_buffer(vae) else signed_pixels(vae, image)


def _pixels_of(vae, shape):
    batch, _, frames, rows, columns = shape
    return batch, vae.decoder.out_channels, frames * vae.vae_ratio_t, rows * vae.vae_ratio, columns * vae.vae_ratio


def _moments_of(vae, shape):
    batch, _, frames, rows, columns = shape
    return (batch, vae.quant_conv.out_channels, -(-frames // vae.vae_ratio_t), rows // vae.vae_ratio,
            columns // vae.vae_ratio)


MINIMAX_H3 = VaeFamily(
    models=("MiniMax H3",),
    autoencoder="comfy.ldm.minimax.vae:MiniMaxH3VideoVAE",
    markers=("latents_std",),
    decoder=("decoder.", "post_quant_conv.", "latents_"),
    encoder=("encoder.", "quant_conv.", "latents_"),
    config=_config,
    finish=_finish,
    decode=_decode,
    encode=lambda vae, video: vae.encode(video),
    pixels=_pixels,
    build_small=_build_small,
    check_size=(7, 3, 2),
    check_frames=20,
    tiles={"_decode_pixels": _pixels_of, "_encode_moments": _moments_of},
)
