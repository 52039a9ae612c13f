"""Where the weights of one model are on this rank: on its device, or parked in host memory. Used by models.py.

Each weight has a host copy. Where the file has the weight as the device does, that is the map of the checkpoint file:
all processes share its pages, and another copy would only take memory twice. A weight that was cast or computed when it
was loaded gets its host copy in a segment, which all ranks with the same weights share. A host copy stays valid until
weights change and a new Residency is made. So to park a weight is to release the device's copy.

Weights that come from host memory in every step are there for good; of them the buffers are parked, before weights.
"""

import bisect
import itertools

from ..checkpoints.offload.block_offload import aligned, view_of
from ..protocol.shared_memory import map_segment

ALIGNMENT = 64                             # bytes; of a weight's place in a segment, as torch's allocators have it


class Residency:
    """The weights of a model on this rank. Those parked are always the first so many, in the order of the model's
    modules.

    files: {id of a weight: its map of the checkpoint file}, where it has one. to_device(tensor) copies from host
    memory to the device, to_host(tensor, target) back. offloaded: offload.block_offload.OffloadedBlocks, if some are.
    """

    def __init__(self, model, files, to_device, to_host, offloaded=None):
        self._to_device, self._to_host, self._offloaded = to_device, to_host, offloaded
        apart = {} if offloaded is None else offloaded.weights
        self._weights = [weight for weight in (*model.parameters(), *model.buffers())
                         if not weight.is_meta and id(weight) not in apart]
        self._host_copies = [files.get(id(weight)) for weight in self._weights]
        sizes = [aligned(weight.nbytes, ALIGNMENT) for weight in self._weights]
        self._sums = list(itertools.accumulate(sizes, initial=0))               # of the first so many
        self._num_parked, self._buffer_bytes = 0, 0 if offloaded is None else aligned(offloaded.buffer_bytes, ALIGNMENT)
        self._are_buffers_parked = False
        self._largest_bytes = max(sizes, default=0)
        self._unmapped_bytes = sum(size for size, host_copy in zip(sizes, self._host_copies) if host_copy is None)

    @property
    def numbers(self):
        """What the host keeps account of: see host/weight_residency.py."""
        return {"weight_bytes": self._sums[-1] + self._buffer_bytes, "unmapped_bytes": self._unmapped_bytes,
                "largest_bytes": self._largest_bytes, "parked_bytes": self.parked_bytes,
                "offloaded_bytes": 0 if self._offloaded is None else self._offloaded.host_bytes}

    @property
    def parked_bytes(self):
        buffers = self._buffer_bytes if self._are_buffers_parked else 0
        return buffers + self._sums[self._num_parked]

    @property
    def device_bytes(self):
        """Bytes of the weights on the device, without what aligns them, and of the buffers."""
        return (sum(weight.nbytes for weight in self._weights[self._num_parked:])
                + (0 if self._offloaded is None else self._offloaded.device_bytes))

    def num_weights(self, num_bytes):
        """How many of the first weights make up so many bytes with the buffers, or the least that are more."""
        num_bytes -= self._buffer_bytes
        return bisect.bisect_left(self._sums, num_bytes)

    def park(self, targets, own, segment):
        """Release the device's copies of the first weights, until targets[own] bytes are in host memory alone.

        targets: of all ranks that hold the same weights. They share the work of writing those without a host copy,
        which they find at the same places of `segment`. Nobody may read a host copy before all of these ranks are done.
        """
        if self._offloaded is not None and targets[own] > 0:
            self._offloaded.drop()
            self._are_buffers_parked = True
        counts = [min(self.num_weights(target), len(self._weights)) for target in targets]
        memory, start = map_segment(segment), 0
        for index in range(max(counts)):
            if self._host_copies[index] is None:
                weight = self._weights[index].data
                self._host_copies[index] = host_copy = view_of(memory[start:start + weight.nbytes], weight)
                start += aligned(weight.nbytes, ALIGNMENT)
                writers = [rank for rank, count in enumerate(counts) if count > index]
                if writers[index % len(writers)] == own:
                    self._to_host(weight, host_copy)
        for index in range(self._num_parked, counts[own]):
            self._weights[index].data = self._host_copies[index]
            self._num_parked = index + 1

    def restore(self, on_progress=lambda done, total: None):
        """Bring all weights back to the device."""
        total, self._are_buffers_parked = self._num_parked, False
        while self._num_parked:
            weight = self._weights[self._num_parked - 1]
            weight.data = self._to_device(weight.data)
            self._num_parked -= 1
            if self._num_parked % 32 == 0:
                on_progress(total - self._num_parked, total)
        if self._offloaded is not None:
            self._offloaded.restore()
