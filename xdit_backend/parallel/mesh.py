"""Process groups of a layout: which ranks work together along each axis. Used by the engine on every rank.

Axis order, slowest first: data, cfg, pipefusion, ring, ulysses; so that Ulysses, which talks most, has neighbours.
rank = ulysses + ulysses_degree * (ring + ring_degree * (pipefusion + pipefusion_degree * (cfg + cfg_degree * data))).
"""

import math
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

AXES = ("data", "cfg", "pipefusion", "ring", "ulysses")


@dataclass(frozen=True)
class Mesh:
    """The groups this rank belongs to, and its place in each.

    A group is None where its degree is 1.
    """

    degrees: dict[str, int]
    ranks: dict[str, int]
    pipefusion_group: object = None
    ring_group: object = None
    ulysses_group: object = None
    sequence_group: object = None          # ring x ulysses, ulysses fastest
    before_group: object = None            # this rank and the one in the stage before
    after_group: object = None             # this rank and the one in the stage after

    @property
    def sequence_degree(self):
        return self.degrees["ring"] * self.degrees["ulysses"]

    @property
    def sequence_rank(self):
        return self.ranks["ring"] * self.degrees["ulysses"] + self.ranks["ulysses"]


SINGLE = Mesh(dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 0))


def build_mesh(layout, world_size):
    """Make the process groups of a layout. A collective: every rank of the world calls it, in the same order."""
    degrees = {axis: getattr(layout, f"{axis}_degree") for axis in AXES}
    assert math.prod(degrees.values()) == world_size, f"{degrees} on {world_size} ranks"
    if world_size == 1:
        return SINGLE
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=AXES)
    ranks = {axis: mesh.get_local_rank(axis) for axis in AXES}
    sequence_degree = degrees["ring"] * degrees["ulysses"]
    pipefusion_group = mesh["pipefusion"].get_group() if degrees["pipefusion"] > 1 else None
    before_group, after_group = _neighbours(mesh, degrees) if degrees["pipefusion"] > 1 else (None, None)
    return Mesh(
        degrees, ranks,
        pipefusion_group=pipefusion_group, before_group=before_group, after_group=after_group,
        ring_group=mesh["ring"].get_group() if degrees["ring"] > 1 else None,
        ulysses_group=mesh["ulysses"].get_group() if degrees["ulysses"] > 1 else None,
        sequence_group=mesh["ring", "ulysses"]._flatten().get_group() if sequence_degree > 1 else None)


def _neighbours(mesh, degrees):
    """A group for each two ranks in consecutive stages: (with the stage before, with the stage after).

    One group for a whole pipeline would put what a stage waits for and what it sends in one queue, with NCCL.
    """
    own, before, after = dist.get_rank(), None, None
    for pipeline in mesh.mesh.movedim(AXES.index("pipefusion"), -1).reshape(-1, degrees["pipefusion"]).tolist():
        for first, second in zip(pipeline, pipeline[1:]):
            group = dist.new_group([first, second])            # every rank of the world makes every group
            before = group if own == second else before
            after = group if own == first else after
    return before, after
