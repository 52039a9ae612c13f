"""Tensors under a file's names -> under diffusers' names, by a table of rules. For Family.convert."""

import re

import torch

SWAPPED = "swapped"


def table(*rules):
    """A converter from rules, applied to each tensor's name in order, each to what the ones before have left of it.

    (pattern, replacement): as re.sub. (pattern, None): the tensor is dropped. (pattern, replacements, shares): it is
    cut along dim 0 into one piece for each replacement; a share is a number, or names one in the config. (pattern,
    replacement, SWAPPED): the halves of dim 0 change places, where one side says shift and scale, and the other scale
    and shift.
    """
    compiled = [(re.compile(pattern), *rest) for pattern, *rest in rules]
    return lambda tensors, config: {new: piece for name, tensor in tensors.items()
                                    for new, piece in _renamed(name, tensor, compiled, config)}


def _renamed(name, tensor, rules, config):
    pieces = [(name, tensor)]
    for pattern, replacement, *how in rules:
        if not pattern.search(pieces[0][0]):
            continue
        if replacement is None:
            return []
        if how == [SWAPPED]:
            pieces = [(pattern.sub(replacement, each), torch.cat(piece.chunk(2)[::-1])) for each, piece in pieces]
        elif how:
            shares = [config[share] if isinstance(share, str) else share for share in how[0]]
            a_share = tensor.shape[0] // sum(shares)
            pieces = [(pattern.sub(new, name), piece) for (name, whole) in pieces
                      for new, piece in zip(replacement, whole.split([share * a_share for share in shares]))]
        else:
            pieces = [(pattern.sub(replacement, each), piece) for each, piece in pieces]
    return pieces
