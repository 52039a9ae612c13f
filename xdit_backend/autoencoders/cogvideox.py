"""CogVideoX's autoencoder, whose tensors' names are diffusers' in ComfyUI too.

ComfyUI runs it in pieces of frames; norms take their statistics from a piece, so that the pieces are ComfyUI's here.
The modules take and give the frames that the next piece needs themselves.
"""

# Tensors are (B, C, F, H, W): F frames

import math
from contextlib import ExitStack

import torch

from .vae_family import VaeFamily, count_layers, size_of

LATE_FRAMES = 4                # of a piece of the decoder's last levels, which leave the number of frames as it is
FRAMES = 8                     # of a piece of the encoder; the first is what is left over


def _config(shapes, settings):
    """Of any width and depth."""
    given = size_of(shapes)
    half = "decoder" if "decoder.conv_in.conv.weight" in shapes else "encoder"
    blocks = "decoder.up_blocks" if half == "decoder" else "encoder.down_blocks"
    num_levels = count_layers(shapes, blocks + ".{}.resnets.0.conv1.conv.weight")
    widths = tuple(given(f"{blocks}.{index}.resnets.0.conv1.conv.weight", 0) for index in range(num_levels))
    return {
        "block_out_channels": widths if half == "encoder" else widths[::-1],
        "layers_per_block": count_layers(shapes, blocks + ".0.resnets.{}.conv1.conv.weight") - (half == "decoder"),
        "latent_channels": given("decoder.conv_in.conv.weight", 1) or given("encoder.conv_out.conv.weight", 0) // 2,
        "down_block_types": ("CogVideoXDownBlock3D",) * num_levels,
        "up_block_types": ("CogVideoXUpBlock3D",) * num_levels,
    }


def _decode(vae, latent):
    decoder = vae.decoder
    # levels with more frames than the one before
    num_early = round(math.log2(vae.config.temporal_compression_ratio))
    hidden = decoder.conv_in(latent)[0]
    for block in (decoder.mid_block, *decoder.up_blocks[:num_early]):
        hidden = block(hidden, None, latent)[0]
    pieces, kept = [], {}
    latents = _repeated_to(hidden.shape[2], latent).split(LATE_FRAMES, 2)
    for piece, own_latent in zip(hidden.split(LATE_FRAMES, 2), latents):
        for index, block in enumerate(decoder.up_blocks[num_early:]):
            piece, kept[index] = block(piece, None, own_latent, conv_cache=kept.get(index))
        piece, kept["norm"] = decoder.norm_out(piece, own_latent, conv_cache=kept.get("norm"))
        piece, kept["out"] = decoder.conv_out(decoder.conv_act(piece), conv_cache=kept.get("out"))
        pieces.append(piece)
    return torch.cat(pieces, 2)


def _repeated_to(num_frames, latent):
    """The latent's frames, as often as the decoder repeats them: the first of an odd number is not repeated."""
    first = latent.shape[2] % 2
    if latent.shape[2] == first:
        return latent
    times = (num_frames - first) // (latent.shape[2] - first)
    return torch.cat([latent[:, :, :first], latent[:, :, first:].repeat_interleave(times, 2)], 2)


def _encode(vae, image):
    from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXCausalConv3d
    num_left_over = image.shape[2] % FRAMES
    first, further = image[:, :, :num_left_over], image[:, :, num_left_over:]
    pieces, kept = [], None
    with ExitStack() as hooks:
        for module in vae.encoder.modules():
            if isinstance(module, CogVideoXCausalConv3d):
                hooks.callback(module.register_forward_hook(_nothing_kept_of_one_frame, with_kwargs=True).remove)
        for piece in (first, *further.split(FRAMES, 2)):
            if piece.shape[2]:
                piece, kept = vae.encoder(piece, conv_cache=kept)
                pieces.append(piece)
    return torch.cat(pieces, 2).chunk(2, 1)[0]


def _nothing_kept_of_one_frame(module, args, kwargs, output):
    """ComfyUI's convolutions keep nothing of a single first frame, so that the frame after it is a first one again."""
    alone = args[0].shape[2] == 1 and kwargs.get("conv_cache") is None
    return (output[0], None) if alone else output


COGVIDEOX = VaeFamily(
    models=("CogVideoX",),
    autoencoder="AutoencoderKLCogVideoX",
    markers=("coder.mid_block.resnets.0.conv1.conv.",),
    config=_config,
    decode=_decode,
    encode=_encode,
)
