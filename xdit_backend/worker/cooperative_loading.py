"""Which ranks bring weights of blocks from host memory together: each a part, which they exchange. Used by Predictions.
"""

import torch.distributed as dist

from ..checkpoints.offload.block_offload import CooperativeLoad
from ..distributed.collectives import start_all_gather
from ..distributed.mesh import make_group
from ..partition import ranks_by_part, shard_sizes


class WeightGroups:
    """Process groups of ranks that hold the same weights, made when they are first used.

    An exchange is a collective, begun by the thread that runs the blocks, where a block that comes begins. So its order
    is that of the program, and the same on all ranks of the group: each begins as many forwards for a command, and each
    of these enters all blocks of the rank in their order, whatever turns its branches take (the first of them to enter
    a block exchanges it). What a rank has kept of commands before does not matter: each forward exchanges each block
    anew. Where a command would have ranks run unlike each other, `is_identical` says so, and each brings all. A command
    is carried out in whole by each rank, cancelled or not; one that fails on a rank ends as one of Ulysses does.
    """

    def __init__(self, world_size):
        self._world_size, self._groups = world_size, {}

    def has(self, spec):
        """Is nothing to be made for this ModelSpec?"""
        return not can_cooperate(spec, self._world_size) or self._key(spec) in self._groups

    def sharing(self, command, mesh, spec, traffic):
        """The Sharing of this rank in a command; None: it brings all. Every rank of the world calls it."""
        if not command.copies.is_shared or not can_cooperate(spec, self._world_size):
            return None
        if not self.has(spec):
            with traffic.entering(dist.group.WORLD):
                self._groups[self._key(spec)] = self._made(spec)
        if not is_identical(command, mesh):
            return None
        group, ranks = self._groups[self._key(spec)]
        own = ranks.index(dist.get_rank())
        return CooperativeLoad(own, len(ranks), lambda rows: start_all_gather(rows, own, group, traffic)())

    def _key(self, spec):
        return str(ranks_by_part(self._world_size, spec))

    def _made(self, spec):
        """(this rank's group, its ranks). Every rank of the world calls it."""
        parts = ranks_by_part(self._world_size, spec)
        own, = (ranks for ranks in parts if dist.get_rank() in ranks)
        return make_group(parts), own


def can_cooperate(spec, world_size):
    """Do several ranks hold the same blocks, and run them? With all blocks on every stage they run others."""
    has_all = spec.stages is not None and spec.stages.every_block
    return spec.tensor_degree == 1 and not has_all and len(ranks_by_part(world_size, spec)) < world_size


def is_identical(command, mesh):
    """Does each rank run all its blocks as often as the others in a Predict? Not where one has no branch or no images,
    where images or branches of one conditioning go one after the other, or where branches skip blocks."""
    branches, cfg_degree = command.branches, mesh.degrees["cfg"]
    images = [min(shard_sizes(branch.latent.shape[0], mesh.degrees["data"], mesh.data_speeds)) for branch in branches]
    return (not command.by_image and len(branches) >= cfg_degree and min(images) > 0
            and not any(branch.operations for branch in branches)
            and len({branch.conditioning for branch in branches}) == len(branches))
