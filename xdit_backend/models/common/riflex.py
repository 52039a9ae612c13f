"""RIFLEx (Zhao et al. 2025, arXiv 2502.15894): one frequency of the rotary positions along frames is lowered, so that
it does not repeat within a long video.

The conditioning `riflex` has the number of the frequency, from 1, and the number of frames, (B, 2) int64.
"""

import math

import torch

from .forward_state import ForwardValue

PART = 0.9                                 # of a period that all frames take


def with_riflex(model, forward, frames_of):
    """Return the forward of diffusers' Wan or HunyuanVideo with an additional argument `riflex`. frames_of(hidden
    states) -> number of token frames."""
    setting, rope = ForwardValue(model), model.rope
    make = rope.forward

    def slowed(hidden_states):
        tables = make(hidden_states)
        if setting.get() is None:
            return tables
        return _slowed(tables, frames_of(hidden_states), *setting.get()[0])

    def forward_with(riflex=None, **arguments):
        with setting.holding(riflex):
            return forward(**arguments)
    rope.forward = slowed
    return forward_with


def _slowed(tables, num_frames, number, num_all_frames):
    """tables: cosines and sines, (T, D) or (1, T, 1, D), of tokens in the order of their frames, with each frequency
    twice."""
    dim = tables[0].dim() // 3                                 # of the tokens
    size = tables[0].shape[dim]
    frames = torch.arange(num_frames, dtype=torch.float64, device=tables[0].device).repeat_interleave(
        size // num_frames)
    angles = (frames * PART * 2 * math.pi / num_all_frames).view([-1, 1] if dim == 0 else [1, -1, 1, 1])
    is_this = torch.arange(tables[0].shape[-1], device=angles.device) // 2 == number - 1
    return tuple(torch.where(is_this, new.to(table.dtype), table)
                 for table, new in zip(tables, (angles.cos(), angles.sin())))
