"""ComfyUI's Scale ROPE: places of frames, rows and columns that are stretched and moved, for diffusers' Wan. Used in
`amend`."""

import torch

from .forward_value import ForwardValue


def with_scales(model, forward):
    """The forward, that also takes what ComfyUI's Scale ROPE does to places: `rope_scales`, scale and shift of frames,
    rows and columns, (B, 6), the bits of float64."""
    scales, rope = ForwardValue(model), model.rope
    make = rope.forward

    def scaled(hidden_states):
        if scales.get() is None:
            return make(hidden_states)
        plain = rope.freqs_cos, rope.freqs_sin
        rope.freqs_cos, rope.freqs_sin = _at_places(rope, scales.get())
        try:
            return make(hidden_states)
        finally:
            rope.freqs_cos, rope.freqs_sin = plain

    def forward_with(rope_scales=None, **arguments):
        before = scales.set(rope_scales)
        try:
            return forward(**arguments)
        finally:
            scales.reset(before)
    rope.forward = scaled
    return forward_with


def _at_places(rope, scales):
    """A rotary embedding's tables, with what belongs to the places that frames, rows and columns have."""
    from diffusers.models.embeddings import get_1d_rotary_pos_embed
    given = scales[0].view(torch.float64).view(3, 2, 1)         # all images of a batch have the same
    places = torch.arange(rope.max_seq_len, dtype=torch.float64, device=scales.device) * given[:, 0] + given[:, 1]
    tables = [get_1d_rotary_pos_embed(dim, each, use_real=True, repeat_interleave_real=True, freqs_dtype=torch.float64)
              for dim, each in zip((rope.t_dim, rope.h_dim, rope.w_dim), places)]
    return [torch.cat(table, 1) for table in zip(*tables)]
