"""Residency of a model's weights on the ranks of a group: on the device, parked in system RAM, or offloaded."""

import math
from dataclasses import dataclass, field

from ..partition import ranks_by_part


@dataclass
class ModelMemory:
    """Bytes of a model's weights on each rank of a group.

    weight_bytes: weights on the device, including the buffers that offloaded ones are streamed through.
    offloaded_bytes: weights that are permanently in system RAM. unmapped_bytes: part of weight_bytes that differs from
    the file, so that parking it needs memory, once for all ranks with the same weights. largest_bytes: the largest
    weight. parked_bytes: part of weight_bytes that is only in system RAM now.
    """

    parts: list[list[int]]                 # groups of ranks with the same weights
    weight_bytes: list[int]
    unmapped_bytes: list[int]
    largest_bytes: list[int]
    parked_bytes: list[int]
    offloaded_bytes: list[int]
    # for each of parts: bytes of leading weights that have been parked before, so that their memory exists
    written_bytes: list[int] = field(default_factory=list)

    @classmethod
    def from_answers(cls, spec, done):
        """From the ranks' answers to LoadModel. done: {rank: Done}."""
        parts = ranks_by_part(len(done), spec)
        numbers = {name: [int(done[rank].numbers[name]) for rank in sorted(done)]
                   for name in ("weight_bytes", "unmapped_bytes", "largest_bytes", "parked_bytes", "offloaded_bytes")}
        return cls(parts, **numbers, written_bytes=[0] * len(parts))

    def targets(self, ranks, num_bytes):
        """Bytes to park on each rank in total, so that these ranks together free num_bytes more."""
        per_rank = num_bytes if math.isinf(num_bytes) else -(-int(num_bytes) // len(ranks))
        return [min(size, parked + per_rank) if rank in ranks else parked
                for rank, (size, parked) in enumerate(zip(self.weight_bytes, self.parked_bytes))]

    def needed_bytes(self, targets):
        """System RAM to allocate for parking `targets`, for each of parts. A weight is never split."""
        needed = []
        for part, written in zip(self.parts, self.written_bytes):
            target = max(targets[rank] for rank in part)
            first = part[0]
            beyond = target - written + self.largest_bytes[first] if target > written else 0
            needed.append(min(beyond, self.unmapped_bytes[first], self.weight_bytes[first] - written))
        return needed

    def update(self, done):
        """Process the ranks' answers to ParkModel or RestoreModel."""
        self.parked_bytes = [int(done[rank].numbers["parked_bytes"]) for rank in sorted(done)]
        self.written_bytes = [max([written, *(self.parked_bytes[rank] for rank in part)])
                              for part, written in zip(self.parts, self.written_bytes)]
