"""CogVideoX's VAE, whose tensors have diffusers' names in ComfyUI too.

ComfyUI runs it in chunks of frames. Norms compute their statistics over a chunk, so the chunks must be the same here.
The modules take and return the frames that the next chunk needs.
"""

# Tensors are (B, C, F, H, W): F frames

import math
from contextlib import ExitStack

import torch

from .vae_family import VaeFamily, concatenated, count_layers, size_of

LATE_FRAMES = 4                # per chunk in the decoder's last levels, which do not change the number of frames
FRAMES = 8                     # per chunk in the encoder; the first chunk has the remainder


def _config(shapes, settings):
    """Configuration of any width and depth."""
    size = size_of(shapes)
    half = "decoder" if "decoder.conv_in.conv.weight" in shapes else "encoder"
    blocks = "decoder.up_blocks" if half == "decoder" else "encoder.down_blocks"
    num_levels = count_layers(shapes, blocks + ".{}.resnets.0.conv1.conv.weight")
    widths = tuple(size(f"{blocks}.{index}.resnets.0.conv1.conv.weight", 0) for index in range(num_levels))
    return {
        "block_out_channels": widths if half == "encoder" else widths[::-1],
        "layers_per_block": count_layers(shapes, blocks + ".0.resnets.{}.conv1.conv.weight") - (half == "decoder"),
        "latent_channels": size("decoder.conv_in.conv.weight", 1) or size("encoder.conv_out.conv.weight", 0) // 2,
        "down_block_types": ("CogVideoXDownBlock3D",) * num_levels,
        "up_block_types": ("CogVideoXUpBlock3D",) * num_levels,
    }


def _decode_frames(vae, latent, emit):
    decoder = vae.decoder
    # levels that increase the number of frames
    num_early = round(math.log2(vae.config.temporal_compression_ratio))
    hidden = decoder.conv_in(latent)[0]
    for block in (decoder.mid_block, *decoder.up_blocks[:num_early]):
        hidden = block(hidden, None, latent)[0]
    cache: dict = {}
    latents = _repeated_to(hidden.shape[2], latent).split(LATE_FRAMES, 2)
    for chunk, own_latent in zip(hidden.split(LATE_FRAMES, 2), latents):
        for index, block in enumerate(decoder.up_blocks[num_early:]):
            chunk, cache[index] = block(chunk, None, own_latent, conv_cache=cache.get(index))
        chunk, cache["norm"] = decoder.norm_out(chunk, own_latent, conv_cache=cache.get("norm"))
        chunk, cache["out"] = decoder.conv_out(decoder.conv_act(chunk), conv_cache=cache.get("out"))
        emit(chunk)


def _repeated_to(num_frames, latent):
    """Repeat the latent's frames as the decoder does: of an odd number, the first is not repeated."""
    first = latent.shape[2] % 2
    if latent.shape[2] == first:
        return latent
    times = (num_frames - first) // (latent.shape[2] - first)
    return torch.cat([latent[:, :, :first], latent[:, :, first:].repeat_interleave(times, 2)], 2)


def _encode(vae, image):
    from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXCausalConv3d
    num_left_over = image.shape[2] % FRAMES
    first, further = image[:, :, :num_left_over], image[:, :, num_left_over:]
    chunks, cache = [], None
    with ExitStack() as hooks:
        for module in vae.encoder.modules():
            if isinstance(module, CogVideoXCausalConv3d):
                hooks.callback(module.register_forward_hook(_drop_cache_of_one_frame, with_kwargs=True).remove)
        for chunk in (first, *further.split(FRAMES, 2)):
            if chunk.shape[2]:
                chunk, cache = vae.encoder(chunk, conv_cache=cache)
                chunks.append(chunk)
    return torch.cat(chunks, 2).chunk(2, 1)[0]


def _drop_cache_of_one_frame(module, args, kwargs, output):
    """ComfyUI's convolutions cache nothing of a single first frame, so that the next frame is treated as the first."""
    alone = args[0].shape[2] == 1 and kwargs.get("conv_cache") is None
    return (output[0], None) if alone else output


COGVIDEOX = VaeFamily(
    models=("CogVideoX",),
    autoencoder="AutoencoderKLCogVideoX",
    markers=("coder.mid_block.resnets.0.conv1.conv.",),
    config=_config,
    decode=concatenated(_decode_frames),
    decode_frames=_decode_frames,
    encode=_encode,
)
