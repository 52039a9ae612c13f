"""Shared code of LTX-Video and LTX-2: recognition of files, and positions and timesteps of the video tokens and
guides."""

import torch
import torch.nn.functional as F

from ...memory.staging import on_device
from .inputs import Packed, has, token_range

LATENT = Packed((1, 1, 1))
NEVER = -100.0  # stands for log 0: another token's attention weight is multiplied by e ** -100
PIXELS, FRAME_RATE, NUM_HEADS = (8, 32, 32), 25.0, 32          # per latent pixel; if no node sets one; ComfyUI's

IS_LTX = has("patchify_proj.weight", "adaln_single.emb.timestep_embedder.linear_1.bias",
             "transformer_blocks.0.attn2.to_k.weight")


def bounds(call):
    """Second, row and column at which each token begins and ends, in pixels of the video: (1 or B, 3, T, 2). A
    causal first frame is one pixel frame long."""
    starts = LATENT.positions(call).T[None]
    pixels = on_device(torch.tensor(PIXELS), call.latent.device)
    positions = torch.stack([starts, starts + 1], -1) * pixels[:, None, None]
    if call.config["_causal_temporal_positioning"]:
        positions[:, 0] = (positions[:, 0] + 1 - PIXELS[0]).clamp(min=0)
    guides = call.conditioning.get("keyframe_idxs")
    if guides is not None:                                     # (B, 3, guide tokens, 2): the last tokens
        first, count, num_tokens = token_range(call, LATENT)
        guides, num_video = guides.to(positions.dtype), num_tokens - guides.shape[2]
        positions = torch.cat([positions.expand(len(guides), -1, -1, -1)[:, :, :max(0, num_video - first)],
                               guides[:, :, max(0, first - num_video):]], 2)[:, :, :count]
    rate = call.conditioning.get("frame_rate")
    rate = FRAME_RATE if rate is None else rate.flatten()[0].to(positions)
    return torch.cat([positions[:, :1] * (1.0 / rate), positions[:, 1:]], 1)


def token_times(call):
    """Timesteps (B,), or (B, T) if they differ between tokens; for a patch, those of its own tokens."""
    if call.timestep.ndim == 1:
        return call.timestep * 1000
    first, count, _ = token_range(call, LATENT)
    return call.timestep[:, first:first + count] * 1000


def unfold(conditioning):
    """Add the strength of each guide token, (1, T), if any of them is not 1."""
    entries = conditioning.get("guide_attention_entries") or ()
    strengths = [_strengths(entry.get("pixel_mask"), entry) for entry in entries]
    if all((each == 1).all() for each in strengths):
        return conditioning
    return conditioning | {"guide_strengths": torch.cat(strengths)[None]}


def _strengths(mask_B1FHW, entry):
    """Strength of each token of one guide, (T,), multiplied by the guide's mask at the token. A batch shares one
    mask."""
    if mask_B1FHW is None:
        return torch.full((entry["pre_filter_count"],), float(entry["strength"]))
    frames, *sides = entry["latent_shape"]
    sized = F.interpolate(mask_B1FHW[0, 0, :, None].float(), tuple(sides), mode="area")[:, 0]
    return _in_frames(sized, frames).flatten() * entry["strength"]


def _in_frames(mask_FHW, count):
    """Resample a mask to `count` latent frames: the first keeps its own mask, the others divide the rest evenly."""
    first, rest, others = mask_FHW[:1], mask_FHW[1:], count - 1
    if not others:
        return first
    if not len(rest):
        return first.expand(count, -1, -1)
    if len(rest) < others:
        rest = rest[torch.arange(others) * len(rest) // others]
    size = len(rest) // others
    return torch.cat([first, rest[:size * others].unflatten(0, (others, size)).mean(1)])


def guide_bias(call):
    """Entry of Inputs.biases: the logarithm of the guide's strength between a token of a guide and one of the video."""
    if "guide_strengths" not in call.conditioning:
        return None
    first, count, num_tokens = token_range(call, LATENT)
    strengths = on_device(call.conditioning["guide_strengths"][:1], call.latent.device).float()
    is_video = torch.ones(1, num_tokens, device=call.latent.device)
    is_video[:, num_tokens - strengths.shape[1]:] = 0
    weights = F.pad(strengths.log().clamp(min=NEVER), (num_tokens - strengths.shape[1], 0))
    return torch.stack([is_video, weights], 2)[:, first:first + count]


def more_than_guides(arguments):
    """Uses of guides that ComfyUI's model supports and diffusers' does not."""
    mask = arguments.get("denoise_mask")
    if arguments.get("keyframe_idxs") is not None and mask is None:
        return "guides with a latent that lacks their noise mask"
    if arguments.get("keyframe_idxs") is not None and (mask < 0).any():
        return "guides of a lower resolution than the video"
    return None
