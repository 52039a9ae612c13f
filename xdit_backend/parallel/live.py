"""Counts the bytes of tensors that live while code runs, and their peak, on any device. Used by bench_vae and the estimate."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While active, counts the memory of the tensors that torch's operators give out, until nothing refers to them.

    What existed before is not counted, nor what an operator uses inside. Works on the meta device too, where a whole
    decode costs milliseconds. `peak_bytes` is the most that lived at one time.
    """

    def __init__(self):
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._references = {}              # address of a storage -> number of live tensors that use it

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor, args)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return outputs

    def _count(self, tensor, args):
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._references:
            inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
            if key in inputs:                                  # a view of what existed before
                return
            self._references[key] = 0
            self.live_bytes += num_bytes
        self._references[key] += 1
        weakref.finalize(tensor, self._forget, key, num_bytes).atexit = False

    def _forget(self, key, num_bytes):
        self._references[key] -= 1
        if not self._references[key]:
            del self._references[key]
            self.live_bytes -= num_bytes
