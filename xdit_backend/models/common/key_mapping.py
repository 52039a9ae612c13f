"""Conversion of tensor names: from a file's to diffusers', by a table of rules."""

import re

import torch

SWAPPED = "swapped"


def table(*rules):
    """Build a converter from rules, which are applied to each tensor's name in order, each to the result of those
    before.

    (pattern, replacement): as in re.sub.
    (pattern, None): the tensor is dropped.
    (pattern, replacements, sizes): the tensor is split along dim 0, into one chunk per replacement; a size is a
      relative number, or the name of one in the config.
    (pattern, replacement, SWAPPED): the halves of dim 0 are swapped, where one side has shift, scale and the other
      scale, shift.
    """
    compiled = [(re.compile(pattern), *rest) for pattern, *rest in rules]
    return lambda tensors, config: {new: value for name, tensor in tensors.items()
                                    for new, value in _renamed(name, tensor, compiled, config)}


def _renamed(name, tensor, rules, config):
    renamed = [(name, tensor)]
    for pattern, replacement, *how in rules:
        if not pattern.search(renamed[0][0]):
            continue
        if replacement is None:
            return []
        if how == [SWAPPED]:
            renamed = [(pattern.sub(replacement, each), torch.cat(value.chunk(2)[::-1])) for each, value in renamed]
        elif how:
            sizes = [config[size] if isinstance(size, str) else size for size in how[0]]
            unit = tensor.shape[0] // sum(sizes)
            renamed = [(pattern.sub(new, name), chunk) for (name, fused) in renamed
                       for new, chunk in zip(replacement, fused.split([size * unit for size in sizes]))]
        else:
            renamed = [(pattern.sub(replacement, each), value) for each, value in renamed]
    return renamed
