"""Rotary positions by complex numbers, in compiled blocks by real ones: inductor writes no code for complex numbers,
and would call a kernel for each step. Used by attention_dispatch.py.

# B batch, T tokens, N heads, H head size
"""

import functools
from dataclasses import dataclass

import torch

from .function_overrides import in_file, torch_with


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


@dataclass
class Pairs:
    """Complex numbers in a graph: their real and imaginary parts, which are multiplied with the same roundings."""

    real: torch.Tensor
    imaginary: torch.Tensor

    def unsqueeze(self, dim):
        return Pairs(self.real.unsqueeze(dim), self.imaginary.unsqueeze(dim))

    def __mul__(self, other):
        return Pairs(self.real * other.real - self.imaginary * other.imaginary,
                     self.real * other.imaginary + self.imaginary * other.real)


def in_pairs(function):
    """A processor's function that rotates by complex numbers in code of its own: in a graph these are Pairs there, as
    are those that it is given."""
    own = in_file(function, {"torch": torch_with(
        view_as_complex=lambda tensor: Pairs(*tensor.unbind(-1)),
        view_as_real=lambda numbers: torch.stack((numbers.real, numbers.imaginary), -1))})

    @functools.wraps(function)
    def rotated(*args, **kwargs):
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return own(*map(_paired, args), **{name: _paired(value) for name, value in kwargs.items()})
    return rotated


def _paired(value):
    is_complex = isinstance(value, torch.Tensor) and value.is_complex()
    return Pairs(*torch.view_as_real(value).unbind(-1)) if is_complex else value
