"""ComfyUI's Scale ROPE: places of frames, rows and columns that are stretched and moved. The conditioning
`rope_scales` says how: scale and shift of frames, rows and columns, (B, 6), the bits of float64."""

import torch

from .forward_state import ForwardValue

AXES = "tyx"                               # frames, rows and columns, as ComfyUI's options have them


def scales_and_shifts(rope_scales):
    """(3, 2) in float64. All images of a batch have the same."""
    return rope_scales[0].view(torch.float64).view(3, 2)


def moves(call):
    """The argument transformer_options of a class of ComfyUI's that reads them."""
    if "rope_scales" not in call.conditioning:
        return {}
    given = scales_and_shifts(call.conditioning["rope_scales"]).tolist()
    return {"rope_options": {f"{name}_{axis}": value for axis, pair in zip(AXES, given)
                             for name, value in zip(("scale", "shift"), pair)}}


def with_first_row(options, row):
    """ComfyUI's transformer_options, for rows of a latent from this one on."""
    given = options.get("rope_options", {})
    first = row * given.get("scale_y", 1.0) + given.get("shift_y", 0.0)
    return options | {"rope_options": given | {"shift_y": first}}


def moved(places, call):
    """Places along frames, rows and columns, [(n,), ...] of the latent's own tokens, stretched and moved."""
    if "rope_scales" not in call.conditioning:
        return places
    return [place * scale + shift for place, (scale, shift) in zip(
        places, scales_and_shifts(call.conditioning["rope_scales"]).to(places[0].device))]


def with_scales(model, forward):
    """The forward of diffusers' Wan, that also takes `rope_scales`."""
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
        with scales.holding(rope_scales):
            return forward(**arguments)
    rope.forward = scaled
    return forward_with


def with_rotations(model, forward, owner, name, at):
    """The forward, that also takes `rope_scales`. owner.name: the function that makes rotations of ids; where places
    are moved, at(ids, scales and shifts) does."""
    scales, make = ForwardValue(model), getattr(owner, name)

    def rotations(ids):
        return make(ids) if scales.get() is None else at(ids, scales_and_shifts(scales.get()).to(ids.device))

    def forward_with(rope_scales=None, **arguments):
        with scales.holding(rope_scales):
            return forward(**arguments)
    setattr(owner, name, rotations)
    return forward_with


def complex_rotations(places, sizes, theta):
    """(..., sum of sizes / 2), complex128, of places (..., axes) in float64."""
    return torch.cat([torch.polar(torch.ones_like(angles), angles) for angles in (
        places[..., axis, None] / theta ** (torch.arange(0, size, 2, dtype=torch.float64, device=places.device) / size)
        for axis, size in enumerate(sizes))], -1)


def _at_places(rope, scales):
    """A rotary embedding's tables, with what belongs to the places that frames, rows and columns have."""
    from diffusers.models.embeddings import get_1d_rotary_pos_embed
    given = scales_and_shifts(scales)[..., None]
    places = torch.arange(rope.max_seq_len, dtype=torch.float64, device=scales.device) * given[:, 0] + given[:, 1]
    tables = [get_1d_rotary_pos_embed(dim, each, use_real=True, repeat_interleave_real=True, freqs_dtype=torch.float64)
              for dim, each in zip((rope.t_dim, rope.h_dim, rope.w_dim), places)]
    return [torch.cat(table, 1) for table in zip(*tables)]
