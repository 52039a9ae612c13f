"""Where weights that come from host memory are kept that the file has not as they are held: once for all ranks with the
same weights, in memory that the host has made, else in this process. Used by the loader.
"""

import torch

from .block_offload import aligned, view_of


class HostCopies:
    """Places of weights in shared memory. Ranks with the same weights ask for the same ones in the same order, and
    share the work of writing; nobody may read before all of them have loaded the model.

    memory: uint8; None, and where it has no more room: memory of this process. own: which of num_ranks this one is.
    """

    def __init__(self, memory=None, own=0, num_ranks=1):
        self._memory, self._own, self._num_ranks = memory, own, num_ranks
        self._start = self._count = 0

    def keep(self, tensor, dtype):
        """The host copy of a weight in this type. tensor: its values, on any device."""
        num_bytes = tensor.numel() * dtype.itemsize
        if self._memory is None or self._start + num_bytes > self._memory.numel():
            return tensor.to("cpu", dtype)
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
        place = view_of(self._memory[self._start:self._start + num_bytes], like)
        if self._count % self._num_ranks == self._own:
            place.copy_(tensor)
        self._start, self._count = self._start + aligned(num_bytes), self._count + 1
        return place
