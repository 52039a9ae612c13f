"""Whole numbers on a pretended device that follow from the host's, such as the sizes that a model's forward puts there
and reads back. Used by op_counter.py."""

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

NO_NUMBERS = {"empty", "empty_like", "new_empty", "empty_strided"}


class KnownNumbers:
    """What is known of tensors that were made of known ones alone. What is written into a tensor is not followed: its
    numbers, and those of its views, are unknown from then on."""

    def __init__(self):
        self._values = WeakTensorKeyDictionary()               # pretended tensor -> its numbers, on the host

    def number(self, given, other):
        """What the host reads of a tensor; other, where that is not known."""
        if len(given) > 1 or given[0] not in self._values:
            return other
        with unset_fake_temporarily():
            return self._values[given[0]].item()

    def follow(self, func, args, kwargs, run):
        """What run() makes of an operator. Where it cannot say the shape, which depends on numbers: by what is known.

        Raises DynamicOutputShapeException where they are not."""
        values = self._computed(func, args, kwargs)
        try:
            made = run()
        except DynamicOutputShapeException:
            if values is None:
                raise
            device = next(tensor.device for tensor in _tensors((args, kwargs)) if tensor.is_cuda)
            made = tree_map(lambda value: torch.empty_like(value, device=device), values)
        if func._schema.is_mutable:
            self._forget(made)
        for tensor, value in zip(_tensors(made), _tensors(values)):
            if tensor.is_cuda:
                self._values[tensor] = value
        return made

    def _computed(self, func, args, kwargs):
        """What an operator makes, on the host; None where it is not known, or is not of whole numbers."""
        given = _tensors((args, kwargs))
        if (func._schema.is_mutable or func.overloadpacket.__name__ in NO_NUMBERS
                or torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten"
                or any(tensor.dtype != torch.int64 or (tensor.is_cuda and tensor not in self._values)
                       for tensor in given)):
            return None
        there = tree_map(self._on_host, (args, kwargs))
        with unset_fake_temporarily():
            values = func(*there[0], **there[1])
        return values if all(value.dtype == torch.int64 for value in _tensors(values)) else None

    def _on_host(self, leaf):
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return self._values.get(leaf, leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _forget(self, written):
        storages = {tensor.untyped_storage()._cdata for tensor in _tensors(written) if tensor.dtype == torch.int64}
        for tensor in [each for each in self._values if each.untyped_storage()._cdata in storages]:
            del self._values[tensor]


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
