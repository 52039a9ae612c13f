"""Rotary positions by complex numbers, in compiled blocks by real ones: inductor writes no code for complex numbers,
and would call a kernel for each step. Used by attention.py.

# B batch, T tokens, N heads, H head size
"""

import functools

import torch


def in_real_numbers(rotate):
    """diffusers' function that rotates queries and keys, whose complex products are real ones in a graph: the same
    roundings, one after the other."""
    @functools.wraps(rotate)
    def rotated(tensor_BTNH, places, *args, **options):
        if not torch.compiler.is_compiling() or isinstance(places, (tuple, list)) or not places.is_complex():
            return rotate(tensor_BTNH, places, *args, **options)
        cos, sin = torch.view_as_real(places).unsqueeze(-3).unbind(-1)         # (T, 1, H / 2), of a batch or of all
        even, odd = tensor_BTNH.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(tensor_BTNH)
    return rotated
