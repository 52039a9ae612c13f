"""What LTX-Video and LTX-2 have in common: how their files are recognised, and the video's tokens with their places and
times, guides among them."""

import torch
import torch.nn.functional as F

from ...memory.staging import on_device
from .inputs import Packed, has, token_rows

LATENT = Packed((1, 1, 1))
NEVER = -100.0                             # in the place of the logarithm of 0: e ** -100 of what another token weighs
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


def unfold(conditioning):
    """With the strength of each token of the guides, (1, T), where one is not 1."""
    entries = conditioning.get("guide_attention_entries") or ()
    strengths = [_strengths(entry.get("pixel_mask"), entry) for entry in entries]
    if all((each == 1).all() for each in strengths):
        return conditioning
    return conditioning | {"guide_strengths": torch.cat(strengths)[None]}


def _strengths(mask_B1FHW, entry):
    """(T,) of one guide: its strength, times what its mask has where a token is; a batch has one mask."""
    if mask_B1FHW is None:
        return torch.full((entry["pre_filter_count"],), float(entry["strength"]))
    frames, *sides = entry["latent_shape"]
    sized = F.interpolate(mask_B1FHW[0, 0, :, None].float(), tuple(sides), mode="area")[:, 0]
    return _in_frames(sized, frames).flatten() * entry["strength"]


def _in_frames(mask_FHW, count):
    """A mask for so many latent frames: the first frame's is its own, the others share the rest out evenly."""
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
    """Family.biases: between a token of a guide and one of the video, the logarithm of the guide's strength."""
    if "guide_strengths" not in call.conditioning:
        return None
    first, count, whole = token_rows(call, LATENT)
    strengths = on_device(call.conditioning["guide_strengths"][:1], call.latent.device).float()
    is_video = torch.ones(1, whole, device=call.latent.device)
    is_video[:, whole - strengths.shape[1]:] = 0
    weights = F.pad(strengths.log().clamp(min=NEVER), (whole - strengths.shape[1], 0))
    return torch.stack([is_video, weights], 2)[:, first:first + count]


def more_than_guides(arguments):
    """What ComfyUI's model does with guides, and diffusers' does not."""
    mask = arguments.get("denoise_mask")
    if arguments.get("keyframe_idxs") is not None and mask is None:
        return "guides where the latent has lost the noise mask that came with them"
    if arguments.get("keyframe_idxs") is not None and (mask < 0).any():
        return "guides of a lower resolution than the video's"
    return None
