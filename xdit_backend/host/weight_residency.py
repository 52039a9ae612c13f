"""Where the ranks of a group hold a model's weights, as they have reported: on their devices, or parked in host memory.

The client keeps a ModelMemory for each model that its workers hold.
"""

import math
from dataclasses import dataclass, field

from ..partition import ranks_by_part


@dataclass
class ModelMemory:
    """Bytes of a model's weights on each rank of a group.

    weight_bytes: all that a rank holds on its device, with the buffers that others come through; offloaded_bytes: of
    those others, which are in host memory for good. unmapped_bytes: of the first, those that are not in the file as the
    rank has them, and need memory to be parked; ranks that hold the same weights share it. largest_bytes: the largest
    weight. parked_bytes: of the first, what is in host memory alone.
    """

    parts: list[list[int]]                 # ranks that hold the same weights
    weight_bytes: list[int]
    unmapped_bytes: list[int]
    largest_bytes: list[int]
    parked_bytes: list[int]
    offloaded_bytes: list[int]
    # of each part: weights from the first on that have been parked before
    written_bytes: list[int] = field(default_factory=list)

    @classmethod
    def from_answers(cls, spec, done):
        """What the ranks' answers to LoadModel say. done: {rank: Done}."""
        parts = ranks_by_part(len(done), spec)
        numbers = {name: [int(done[rank].numbers[name]) for rank in sorted(done)]
                   for name in ("weight_bytes", "unmapped_bytes", "largest_bytes", "parked_bytes", "offloaded_bytes")}
        return cls(parts, **numbers, written_bytes=[0] * len(parts))

    def targets(self, ranks, num_bytes):
        """What each rank is to have parked in all, so that these ranks free num_bytes more between them."""
        share = num_bytes if math.isinf(num_bytes) else -(-int(num_bytes) // len(ranks))
        return [min(held, parked + share) if rank in ranks else parked
                for rank, (held, parked) in enumerate(zip(self.weight_bytes, self.parked_bytes))]

    def needed_bytes(self, targets):
        """Host memory that parking so much takes, for each part of the model. A weight is parked whole."""
        needed = []
        for part, written in zip(self.parts, self.written_bytes):
            target = max(targets[rank] for rank in part)
            first = part[0]
            beyond = target - written + self.largest_bytes[first] if target > written else 0
            needed.append(min(beyond, self.unmapped_bytes[first], self.weight_bytes[first] - written))
        return needed

    def update(self, done):
        """Take in the ranks' answers to ParkModel or RestoreModel."""
        self.parked_bytes = [int(done[rank].numbers["parked_bytes"]) for rank in sorted(done)]
        self.written_bytes = [max([written, *(self.parked_bytes[rank] for rank in part)])
                              for part, written in zip(self.parts, self.written_bytes)]
