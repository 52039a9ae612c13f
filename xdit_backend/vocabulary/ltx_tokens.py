"""What LTX-Video and LTX-2 have in common: how their files are recognised, and the video's tokens with their places and
times, guides among them."""

import torch

from ..protocol.transfers import on_device
from .describe import Packed, has, token_rows

LATENT = Packed((1, 1, 1))
PIXELS, FRAME_RATE, NUM_HEADS = (8, 32, 32), 25.0, 32          # of a latent pixel; where no node says one; ComfyUI's

IS_LTX = has("patchify_proj.weight", "adaln_single.emb.timestep_embedder.linear_1.bias",
             "transformer_blocks.0.attn2.to_k.weight")


def bounds(call):
    """(1 or B, 3, T, 2): second, row and column at which each token begins and ends, in pixels of the video. A causal
    first frame is one pixel frame long.
    """
    starts = LATENT.positions(call).T[None]
    places = torch.stack([starts, starts + 1], -1) * on_device(torch.tensor(PIXELS), call.latent.device)[:, None, None]
    if call.config["_causal_temporal_positioning"]:
        places[:, 0] = (places[:, 0] + 1 - PIXELS[0]).clamp(min=0)
    guides = call.conditioning.get("keyframe_idxs")
    if guides is not None:                                     # (B, 3, tokens of guides, 2), which are the last ones
        first, count, whole = token_rows(call, LATENT)
        guides = guides.to(places.dtype)
        places = torch.cat([places.expand(len(guides), -1, -1, -1)[:, :, :max(0, whole - guides.shape[2] - first)],
                            guides[:, :, max(0, first - (whole - guides.shape[2])):]], 2)[:, :, :count]
    rate = call.conditioning.get("frame_rate")
    rate = FRAME_RATE if rate is None else rate.flatten()[0].to(places)
    return torch.cat([places[:, :1] * (1.0 / rate), places[:, 1:]], 1)


def token_times(call):
    """(B,), or (B, T) where tokens differ; a patch has its own tokens."""
    if call.timestep.ndim == 1:
        return call.timestep * 1000
    first, count, _ = token_rows(call, LATENT)
    return call.timestep[:, first:first + count] * 1000


def more_than_guides(arguments):
    """What ComfyUI's model does with guides, and diffusers' does not."""
    entries, mask = arguments.get("guide_attention_entries") or (), arguments.get("denoise_mask")
    if any(entry["strength"] != 1.0 or entry.get("pixel_mask") is not None for entry in entries):
        return "guides of a strength other than 1, or with a mask"
    if arguments.get("keyframe_idxs") is not None and mask is None:
        return "guides where the latent has lost the noise mask that came with them"
    if arguments.get("keyframe_idxs") is not None and (mask < 0).any():
        return "guides of a lower resolution than the video's"
    return None
