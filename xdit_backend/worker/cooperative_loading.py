"""Cooperative loading of streamed weights: ranks with the same weights copy one shard each and all-gather them."""

import torch.distributed as dist

from ..checkpoints.offload.block_offload import CooperativeLoad
from ..distributed.collectives import start_all_gather
from ..distributed.mesh import make_group
from ..partition import ranks_by_part, shard_sizes


class WeightGroups:
    """Process groups of ranks with the same weights, created when they are first used.

    The all-gather is started by the thread that runs the blocks, at the beginning of each streamed block. Its order is
    therefore program order, and the same on all ranks of the group: each starts the same number of forwards for a
    command, and each forward enters all blocks of the rank in order, however branches are interleaved (the first branch
    to enter a block gathers it). Weights cached from earlier commands do not matter, since each forward gathers each
    block again. If ranks would run a command differently, `is_identical` is False and each rank copies all its weights.
    Every rank completes a command, cancelled or not; one that fails on a rank ends like one of Ulysses.
    """

    def __init__(self, world_size):
        self._world_size, self._groups = world_size, {}

    def has(self, spec):
        """Whether no group has to be created for this ModelSpec."""
        return not can_cooperate(spec, self._world_size) or self._key(spec) in self._groups

    def sharing(self, command, mesh, spec, traffic):
        """CooperativeLoad of this rank for a command; None: it copies all its weights. A collective of all ranks."""
        if not command.options.copies.is_shared or not can_cooperate(spec, self._world_size):
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
        """Create the groups; returns (this rank's group, its ranks). A collective of all ranks."""
        parts = ranks_by_part(self._world_size, spec)
        own, = (ranks for ranks in parts if dist.get_rank() in ranks)
        return make_group(parts), own


def can_cooperate(spec, world_size):
    """Whether several ranks have and run the same blocks. With every_block, stages run different ones."""
    has_all = spec.stages is not None and spec.stages.every_block
    return spec.tensor_degree == 1 and not has_all and len(ranks_by_part(world_size, spec)) < world_size


def is_identical(command, mesh):
    """Whether all ranks run all their blocks equally often in a Predict.

    They do not if one has no branch or no images, if images or branches of one conditioning run one after the other, or
    if branches skip blocks.
    """
    branches, cfg_degree = command.branches, mesh.degrees["cfg"]
    images = [min(shard_sizes(branch.latent.shape[0], mesh.degrees["data"], mesh.data_speeds)) for branch in branches]
    return (not command.by_image and len(branches) >= cfg_degree and min(images) > 0
            and not any(branch.operations for branch in branches)
            and len({branch.conditioning for branch in branches}) == len(branches))
