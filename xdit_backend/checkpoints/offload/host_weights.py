"""Host copies of offloaded weights that differ from the file: in a shared memory segment made by the host, once for all
ranks with the same weights, or in this process."""

import torch

from .block_offload import aligned, view_of


class HostCopies:
    """Allocates weights in shared memory. Ranks with the same weights allocate the same ones in the same order, and
    split the work of writing; none may read before all of them have loaded the model.

    memory: uint8; None, or if it is full: memory of this process. own: rank among num_ranks.
    """

    def __init__(self, memory=None, own=0, num_ranks=1):
        self._memory, self._own, self._num_ranks = memory, own, num_ranks
        self._start = self._count = 0

    def keep(self, tensor, dtype):
        """The host copy of a weight in this dtype. tensor: its values, on any device."""
        num_bytes = tensor.numel() * dtype.itemsize
        if self._memory is None or self._start + num_bytes > self._memory.numel():
            return tensor.to("cpu", dtype)
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
        copy = view_of(self._memory[self._start:self._start + num_bytes], like)
        if self._count % self._num_ranks == self._own:
            copy.copy_(tensor)
        self._start, self._count = self._start + aligned(num_bytes), self._count + 1
        return copy
