"""The device mesh: process groups of a layout, by axis.

Axes, slowest first: data, cfg, pipefusion, displaced, ring, ulysses, tensor; those that communicate most are innermost,
on neighbouring devices. A rank is tensor + tensor_degree * (ulysses + ulysses_degree * (ring + ring_degree * (displaced
+ ... ))).
"""

import dataclasses
import datetime
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import system
from ..protocol import timeouts
from ..protocol.devices import can_use_nccl, machine_of
from ..protocol.errors import ConfigError, WorkerStartError
from ..system import accelerator
from .shared_memory.process_group import BACKEND

AXES = ("data", "cfg", "pipefusion", "displaced", "ring", "ulysses", "tensor")
MIN_GROUP_TIMEOUT_S = 60       # creating a group takes seconds, and is subject to its timeout too
PAIR_MAX_CTAS = 2              # thread blocks that a posted receive may occupy while it waits
# Earlier releases name split groups by a counter of each process, so that disjoint groups share the store's keys by
# which the ranks of a pair find each other.
SPLIT_GROUP_SINCE = 2, 11


@dataclass(frozen=True)
class Mesh:
    """The process groups of this rank and its rank in each. A group is None if its degree is 1."""

    degrees: dict[str, int]
    ranks: dict[str, int]
    ring_group: object = None
    ulysses_group: object = None
    displaced_group: object = None
    sequence_group: object = None          # displaced x ring x ulysses, ulysses fastest
    tensor_group: object = None
    before_group: object = None            # this rank and the previous stage's
    after_group: object = None             # this rank and the next stage's
    data_speeds: tuple[int, ...] = ()      # relative speeds along these axes, see `with_speeds`; (): identical
    sequence_speeds: tuple[int, ...] = ()
    ulysses_speeds: tuple[int, ...] = ()

    @property
    def sequence_degree(self):
        return self.degrees["displaced"] * self.degrees["ring"] * self.degrees["ulysses"]

    @property
    def sequence_rank(self):
        ring = self.ranks["displaced"] * self.degrees["ring"] + self.ranks["ring"]
        return ring * self.degrees["ulysses"] + self.ranks["ulysses"]


def with_speeds(mesh, speeds):
    """Return the mesh with the speeds of its ranks.

    speeds: of each rank of the world, relative integers; (): identical.
    A batch is divided by the speeds of the data ranks, tokens by those of the sequence ranks, heads by those of the
    Ulysses ranks. Ranks with the same tokens or keys, in other stages or in synchronous steps, must have equally many:
    a sequence rank counts as fast as the slowest with its index in any stage, and a Ulysses rank as fast as all with
    its index together. All ranks compute the same result.
    """
    if not speeds or len(set(speeds)) == 1:
        return mesh
    data, cfg, pipefusion, displaced, ring, ulysses, tensor = (mesh.degrees[axis] for axis in AXES)
    every = torch.tensor(speeds, dtype=torch.int64).view(data, cfg, pipefusion, displaced * ring, ulysses,
                                                         tensor).amin(-1)
    of_images = every.sum((2, 3, 4)).amin(1)
    own = every[mesh.ranks["data"], mesh.ranks["cfg"]]
    return dataclasses.replace(mesh, data_speeds=tuple(of_images.tolist()),
                               sequence_speeds=tuple(own.amin(0).flatten().tolist()),
                               ulysses_speeds=tuple(own.sum((0, 1)).tolist()))


SINGLE = Mesh(dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 0))


def backend_for(devices, has_nccl, requested=""):
    """Backend of torch.distributed for workers on these devices: NCCL (or RCCL) if it can connect them, else gloo.

    Tensors of GPUs pass gloo through system RAM. requested: value of XDIT_TRANSPORT, the only way to shared memory
    (docs/benchmarks.md#exchange); "": none. Raises WorkerStartError if that cannot be used.
    """
    can_share = len(devices) > 1 and system.has_exchange_segments() and not any(map(machine_of, devices))
    usable = {"gloo": True, BACKEND: can_share, "nccl": has_nccl and can_use_nccl(devices)}
    if requested:
        if not usable.get(requested):
            names = ", ".join(name for name in usable if usable[name])
            raise WorkerStartError("Remove the environment variable XDIT_TRANSPORT, or set it to one of "
                                   f"{names}: it is \"{requested}\", which workers on {', '.join(devices)} cannot use.")
        return requested
    return "nccl" if usable["nccl"] else "gloo"


def wait_timeout_s():
    """Seconds after which a rank stops waiting for another."""
    return timeouts.seconds("XDIT_STAGE_TIMEOUT_S")


def group_timeout():
    """Timeout to pass for every group, since each group without one gets torch's default, ten minutes for NCCL."""
    return datetime.timedelta(seconds=max(MIN_GROUP_TIMEOUT_S, wait_timeout_s()))


def group_options(backend, max_ctas=None):
    """NCCL's options of a group; None for other backends. max_ctas: ignored if torch does not have the setting.

    Streams have high priority: otherwise a collective that should overlap with computation waits until the model's
    kernels free the device. This applies to every group, since the group of all ranks may serve any axis; collectives
    that are awaited at once are not slowed down.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = group_timeout()                         # otherwise torch warns that timeout overrides it
    if max_ctas is not None and hasattr(getattr(options, "config", None), "max_ctas"):
        options.config.max_ctas = max_ctas
    return options


def can_split():
    """True if torch can create several disjoint groups in one split of the world's communicator."""
    return dist.get_backend() == "nccl" and torch.torch_version.TorchVersion(torch.__version__) >= SPLIT_GROUP_SINCE


def make_group(groups, max_ctas=None, backend=None):
    """Create process groups of disjoint lists of ranks; returns this rank's group, or None if it is in none.

    All groups are created here. A collective: every rank of the world calls it with the same groups, in the same order
    of calls. NCCL splits the world's communicator, which must have no operation in flight (ncclCommSplit). Therefore
    each rank first synchronises with its device; no receive may be posted whose sender sends after this call.
    max_ctas: see group_options. backend: of the groups; None: the world's.
    """
    world_backend, rank = dist.get_backend(), dist.get_rank()
    is_other, backend = backend not in (None, world_backend), backend or world_backend
    is_member, groups_made = any(rank in ranks for ranks in groups), {}
    if world_backend == "nccl":
        accelerator.module().synchronize()
    if can_split() and not is_other:
        # torch names a group by its rank's number of groups: a group of all other ranks keeps the names equal
        others = [other for other in range(dist.get_world_size()) if not any(other in ranks for ranks in groups)]
        own = dist.split_group(split_ranks=[list(ranks) for ranks in (*groups, others) if ranks],
                               timeout=group_timeout(), pg_options=group_options(backend, max_ctas))
        return own if is_member else None
    more = {"backend": backend} if is_other else {}
    for ranks in groups:
        groups_made[rank in ranks] = dist.new_group(list(ranks), timeout=group_timeout(), **more,
                                             pg_options=group_options(backend, max_ctas))
    return groups_made.get(True)


def build_mesh(layout, world_size):
    """Create the process groups of a layout. A collective: every rank of the world calls it, in the same order.

    The groups of an axis are created together. No groups are created for one rank, nor a second one of the same ranks;
    pairs of neighbouring stages have their own. Raises ConfigError if the degrees do not multiply to world_size.
    """
    degrees = {axis: getattr(layout, f"{axis}_degree") for axis in AXES}
    if math.prod(degrees.values()) != world_size:
        text = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "all degrees 1"
        raise ConfigError(f"Use degrees whose product is {world_size}, or a group on as many devices as the layout "
                          f"needs: the layout ({text}) is for {math.prod(degrees.values())} workers, and this group "
                          f"has {world_size}.")
    if world_size == 1:
        return SINGLE
    grid = torch.arange(world_size).view(*degrees.values())
    rank = dist.get_rank()
    ranks = dict(zip(AXES, (int(index) for index in (grid == rank).nonzero()[0])))
    known = {(tuple(range(world_size)),): dist.group.WORLD}    # ranks of disjoint groups -> this rank's group

    def group_along(*axes):
        """This rank's group along these axes, the last one innermost."""
        size = math.prod(degrees[axis] for axis in axes)
        if size == 1:
            return None
        lines = tuple(_lines(grid, axes, size))
        if lines not in known:
            known[lines] = make_group(lines)
        return known[lines]

    before_group, after_group = _neighbours(grid, degrees["pipefusion"], rank)
    return Mesh(degrees, ranks, ring_group=group_along("ring"), ulysses_group=group_along("ulysses"),
                displaced_group=group_along("displaced"), sequence_group=group_along("displaced", "ring", "ulysses"),
                tensor_group=group_along("tensor"), before_group=before_group, after_group=after_group)


def _lines(grid, axes, size):
    """The ranks of each group along these axes, as tuples."""
    dims = [AXES.index(axis) for axis in axes]
    others = [dim for dim in range(grid.dim()) if dim not in dims]
    return [tuple(members) for members in grid.permute(*others, *dims).reshape(-1, size).tolist()]


def _neighbours(grid, num_stages, rank):
    """Create a group for each pair of ranks in consecutive stages; returns (with the previous stage, with the next).

    With NCCL one group per pipeline would queue a stage's receives and sends in one stream. A middle rank is in two
    pairs, which cannot be created together: first the pairs that begin at even stages, then the others.
    """
    before = after = None
    pipelines = _lines(grid, ("pipefusion",), num_stages)
    for first_stage in (0, 1):
        pairs = [pair for pipeline in pipelines for pair in list(zip(pipeline, pipeline[1:]))[first_stage::2]]
        group = make_group(pairs, PAIR_MAX_CTAS) if pairs else None
        if any(rank == first for first, _ in pairs):
            after = group
        elif any(rank == second for _, second in pairs):
            before = group
    return before, after
