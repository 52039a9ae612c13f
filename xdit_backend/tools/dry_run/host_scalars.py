"""Integers on a fake device whose values follow from the host's, such as sizes that a model's forward puts on the
device and reads back."""

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

NO_NUMBERS = {"empty", "empty_like", "new_empty", "empty_strided"}


class KnownNumbers:
    """Known values of fake integer tensors: those computed from known tensors only. In-place writes are not followed;
    the values of the tensor and its views are unknown afterwards."""

    def __init__(self):
        self._values = WeakTensorKeyDictionary()               # fake tensor -> its values, on the host

    def number(self, inputs, other):
        """The value that the host reads from a tensor; `other` if it is unknown."""
        if len(inputs) > 1 or inputs[0] not in self._values:
            return other
        with unset_fake_temporarily():
            return self._values[inputs[0]].item()

    def follow(self, func, args, kwargs, run):
        """The result of run(), which calls an operator, with known values recorded. If the shape of the result depends
        on values, it is taken from the known ones.

        Raises DynamicOutputShapeException if those are unknown.
        """
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
        """The result of an operator, computed on the host; None if its inputs are unknown or are not integers."""
        inputs = _tensors((args, kwargs))
        if (func._schema.is_mutable or func.overloadpacket.__name__ in NO_NUMBERS
                or torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten"
                or any(tensor.dtype != torch.int64 or (tensor.is_cuda and tensor not in self._values)
                       for tensor in inputs)):
            return None
        on_host = tree_map(self._on_host, (args, kwargs))
        with unset_fake_temporarily():
            values = func(*on_host[0], **on_host[1])
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
