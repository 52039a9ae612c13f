"""Rotary embeddings with complex numbers, computed with real ones in compiled blocks: inductor generates no code for
complex numbers and would launch a kernel for each operation.

# B batch, T tokens, N heads, H head size
"""

import functools
from dataclasses import dataclass

import torch

from .function_overrides import in_file, torch_with


def in_real_numbers(rotate):
    """Wrap diffusers' function that applies rotary embeddings: in a graph its complex products are real ones, with the
    same rounding in the same order."""
    @functools.wraps(rotate)
    def rotated(tensor_BTNH, frequencies, *args, **options):
        if not torch.compiler.is_compiling() or isinstance(frequencies, (tuple, list)) or not frequencies.is_complex():
            return rotate(tensor_BTNH, frequencies, *args, **options)
        cos, sin = torch.view_as_real(frequencies).unsqueeze(-3).unbind(-1)    # ((B,) T, 1, H / 2)
        even, odd = tensor_BTNH.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(tensor_BTNH)
    return rotated


@dataclass
class Pairs:
    """Complex numbers in a graph, as real and imaginary parts; products have the same rounding."""

    real: torch.Tensor
    imaginary: torch.Tensor

    def unsqueeze(self, dim):
        return Pairs(self.real.unsqueeze(dim), self.imaginary.unsqueeze(dim))

    def __mul__(self, other):
        return Pairs(self.real * other.real - self.imaginary * other.imaginary,
                     self.real * other.imaginary + self.imaginary * other.real)


def in_pairs(function):
    """Wrap a processor's function whose own code applies rotary embeddings with complex numbers: in a graph these, and
    complex arguments, are Pairs."""
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
