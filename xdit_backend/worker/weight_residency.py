"""Residency of one model's weights on this rank: on the device, or parked in system RAM.

Each weight has a host copy. If the file stores the weight as the device has it, that is the mapping of the checkpoint
file, whose pages all processes share; another copy would only take memory. A weight that was cast or computed while
loading gets its host copy in a segment, shared by all ranks with the same weights. A host copy is valid until weights
change and a new Residency is created. Parking a weight therefore means releasing the device's copy.

Offloaded weights stay in system RAM; only their device buffers are parked, before other weights.
"""

import bisect
import itertools

from ..checkpoints.offload.block_offload import aligned, view_of
from ..protocol.shared_memory import map_segment

ALIGNMENT = 64                             # bytes, of a weight in a segment, as in torch's allocators


class Residency:
    """The weights of a model on this rank. The parked ones are always a prefix, in the order of the model's modules.

    files: {id of a weight: its mapping of the checkpoint file}, for those that have one. to_device(tensor) copies from
    system RAM to the device, to_host(tensor, target) back. offloaded: an OffloadedBlocks
    or None.
    """

    def __init__(self, model, files, to_device, to_host, offloaded=None):
        self._to_device, self._to_host, self._offloaded = to_device, to_host, offloaded
        apart = {} if offloaded is None else offloaded.weights
        self._weights = [weight for weight in (*model.parameters(), *model.buffers())
                         if not weight.is_meta and id(weight) not in apart]
        self._host_copies = [files.get(id(weight)) for weight in self._weights]
        sizes = [aligned(weight.nbytes, ALIGNMENT) for weight in self._weights]
        self._sums = list(itertools.accumulate(sizes, initial=0))               # bytes of each prefix
        self._num_parked, self._buffer_bytes = 0, 0 if offloaded is None else aligned(offloaded.buffer_bytes, ALIGNMENT)
        self._are_buffers_parked = False
        self._largest_bytes = max(sizes, default=0)
        self._unmapped_bytes = sum(size for size, host_copy in zip(sizes, self._host_copies) if host_copy is None)

    @property
    def numbers(self):
        """Numbers for the host, see host/weight_residency.py."""
        return {"weight_bytes": self._sums[-1] + self._buffer_bytes, "unmapped_bytes": self._unmapped_bytes,
                "largest_bytes": self._largest_bytes, "parked_bytes": self.parked_bytes,
                "offloaded_bytes": 0 if self._offloaded is None else self._offloaded.host_bytes}

    @property
    def parked_bytes(self):
        buffers = self._buffer_bytes if self._are_buffers_parked else 0
        return buffers + self._sums[self._num_parked]

    @property
    def device_bytes(self):
        """Bytes of resident weights, without alignment, and of the streaming buffers."""
        return (sum(weight.nbytes for weight in self._weights[self._num_parked:])
                + (0 if self._offloaded is None else self._offloaded.device_bytes))

    def num_weights(self, num_bytes):
        """Length of the shortest prefix of weights that has at least num_bytes together with the buffers."""
        num_bytes -= self._buffer_bytes
        return bisect.bisect_left(self._sums, num_bytes)

    def park(self, targets, own, segment):
        """Release the device's copies of the first weights, until targets[own] bytes are in system RAM only.

        targets: of all ranks with the same weights, which split the work of writing missing host copies to the same
        offsets of `segment`. No host copy may be read before all of these ranks are done.
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
        """Load all parked weights back to the device."""
        total, self._are_buffers_parked = self._num_parked, False
        while self._num_parked:
            weight = self._weights[self._num_parked - 1]
            weight.data = self._to_device(weight.data)
            self._num_parked -= 1
            if self._num_parked % 32 == 0:
                on_progress(total - self._num_parked, total)
        if self._offloaded is not None:
            self._offloaded.restore()
