"""ComfyUI's Scale ROPE: scaled and shifted positions of frames, rows and columns. The conditioning `rope_scales` has
scale and shift of frames, rows and columns, (B, 6), as the bits of float64."""

import torch

from .forward_state import ForwardValue

AXES = "tyx"                               # frames, rows and columns in the names of ComfyUI's options


def scales_and_shifts(rope_scales):
    """(3, 2) in float64. All images of a batch have the same."""
    return rope_scales[0].view(torch.float64).view(3, 2)


def moves(call):
    """The argument transformer_options of a ComfyUI class that reads the RoPE options."""
    if "rope_scales" not in call.conditioning:
        return {}
    pairs = scales_and_shifts(call.conditioning["rope_scales"]).tolist()
    return {"rope_options": {f"{name}_{axis}": value for axis, pair in zip(AXES, pairs)
                             for name, value in zip(("scale", "shift"), pair)}}


def with_first_row(options, row):
    """ComfyUI's transformer_options for the rows of a latent from `row` on."""
    rope = options.get("rope_options", {})
    first = row * rope.get("scale_y", 1.0) + rope.get("shift_y", 0.0)
    return options | {"rope_options": rope | {"shift_y": first}}


def scaled_positions(positions, call):
    """Scale and shift the positions of the latent's own tokens along frames, rows and columns, [(n,), ...]."""
    if "rope_scales" not in call.conditioning:
        return positions
    return [position * scale + shift for position, (scale, shift) in zip(
        positions, scales_and_shifts(call.conditioning["rope_scales"]).to(positions[0].device))]


def with_scales(model, forward):
    """Return the forward of diffusers' Wan with an additional argument `rope_scales`."""
    scales, rope = ForwardValue(model), model.rope
    make = rope.forward

    def scaled(hidden_states):
        if scales.get() is None:
            return make(hidden_states)
        plain = rope.freqs_cos, rope.freqs_sin
        rope.freqs_cos, rope.freqs_sin = _scaled_tables(rope, scales.get())
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
    """Return the forward with an additional argument `rope_scales`.

    owner.name: the function from position ids to rotations. at(ids, scales and shifts) replaces it when positions are
    scaled.
    """
    scales, make = ForwardValue(model), getattr(owner, name)

    def rotations(ids):
        return make(ids) if scales.get() is None else at(ids, scales_and_shifts(scales.get()).to(ids.device))

    def forward_with(rope_scales=None, **arguments):
        with scales.holding(rope_scales):
            return forward(**arguments)
    setattr(owner, name, rotations)
    return forward_with


def complex_rotations(positions, sizes, theta):
    """Rotations (..., sum of sizes / 2), complex128, of positions (..., axes) in float64."""
    return torch.cat([torch.polar(torch.ones_like(angles), angles) for angles in (
        positions[..., axis, None] / theta ** (
            torch.arange(0, size, 2, dtype=torch.float64, device=positions.device) / size)
        for axis, size in enumerate(sizes))], -1)


def _scaled_tables(rope, scales):
    """A rotary embedding's tables at the scaled positions of frames, rows and columns."""
    from diffusers.models.embeddings import get_1d_rotary_pos_embed
    pairs = scales_and_shifts(scales)[..., None]
    positions = torch.arange(rope.max_seq_len, dtype=torch.float64, device=scales.device) * pairs[:, 0] + pairs[:, 1]
    tables = [get_1d_rotary_pos_embed(dim, each, use_real=True, repeat_interleave_real=True, freqs_dtype=torch.float64)
              for dim, each in zip((rope.t_dim, rope.h_dim, rope.w_dim), positions)]
    return [torch.cat(table, 1) for table in zip(*tables)]
