"""Process groups of a layout: which ranks work together along each axis. Used by the engine on every rank.

Axis order, slowest first: data, cfg, pipefusion, displaced, ring, ulysses, tensor; so that who talks most has
neighbours. A rank is tensor + tensor_degree * (ulysses + ulysses_degree * (ring + ring_degree * (displaced + ... ))),
and so on.
"""

import dataclasses
import datetime
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..protocol import timeouts
from ..protocol.devices import own_name
from ..protocol.errors import ConfigError

AXES = ("data", "cfg", "pipefusion", "displaced", "ring", "ulysses", "tensor")
MIN_GROUP_TIMEOUT_S = 60       # making a group takes seconds, and is under its time-out too
PAIR_MAX_CTAS = 2              # a receive that is posted ahead is a kernel that waits: so many thread blocks at most
# Earlier releases name the groups of a split by a count of each process: disjoint groups then share the part of the
# store in which the ranks of a pair find each other.
SPLIT_GROUP_SINCE = 2, 11


@dataclass(frozen=True)
class Mesh:
    """The groups this rank belongs to, and its place in each.

    A group is None where its degree is 1.
    """

    degrees: dict[str, int]
    ranks: dict[str, int]
    ring_group: object = None
    ulysses_group: object = None
    displaced_group: object = None
    sequence_group: object = None          # displaced x ring x ulysses, ulysses fastest
    tensor_group: object = None
    before_group: object = None            # this rank and the one in the stage before
    after_group: object = None             # this rank and the one in the stage after
    data_speeds: tuple[int, ...] = ()      # of the ranks of these axes, relative, see `with_speeds`; (): alike
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
    """The mesh with the speeds of its ranks. speeds: of each rank of the world, relative whole numbers; (): all alike.

    Images are divided by the speed of the ranks that share one, tokens by that of each sequence rank, heads by that of
    each Ulysses rank. Ranks that hold the same tokens or keys in other stages, or in whole steps, must have equally
    many. So a sequence rank counts as fast as the slowest at its place in a stage, and a Ulysses rank as all at its
    place together. All ranks find the same.
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


def backend_for(devices, has_nccl):
    """Which of torch's backends joins workers on these devices: NCCL where each has a CUDA device of its own, else
    gloo.

    NCCL refuses two ranks on a device. One rank alone has nobody to talk to. gloo takes CUDA tensors through host
    memory.
    """
    apart = len(set(devices)) == len(devices) > 1 and all(own_name(device).startswith("cuda") for device in devices)
    return "nccl" if apart and has_nccl else "gloo"


def wait_timeout_s():
    """Seconds after which a rank that waits for another gives up."""
    return timeouts.seconds("XDIT_STAGE_TIMEOUT_S")


def group_timeout():
    """The time-out that every group is made with, since torch's own for NCCL is ten minutes,
    for each group that is not given one."""
    return datetime.timedelta(seconds=max(MIN_GROUP_TIMEOUT_S, wait_timeout_s()))


def group_options(backend, max_ctas=None):
    """NCCL's options of a group; None for other backends. max_ctas: where torch has the setting.

    Streams of high priority: kernels of the model fill the device, and an exchange that is to be hidden behind them
    waits for a place. A group of all ranks serves whatever axis has them all, so every group has such a stream; what is
    waited for at once loses nothing.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = group_timeout()                         # else torch warns that it takes the one it is given
    if max_ctas is not None and hasattr(getattr(options, "config", None), "max_ctas"):
        options.config.max_ctas = max_ctas
    return options


def can_split():
    """Does torch make several disjoint groups in one split of the world's communicator?"""
    return dist.get_backend() == "nccl" and torch.torch_version.TorchVersion(torch.__version__) >= SPLIT_GROUP_SINCE


def make_group(groups, max_ctas=None):
    """Make process groups of disjoint lists of ranks; returns this rank's group, None where it is in none of them.

    The only function that makes groups. A collective: every rank of the world calls it with the same groups, in the
    same order of calls. NCCL splits the world's communicator, which must have no operation under way (ncclCommSplit).
    Therefore each rank first waits until its device has finished everything; no receive may be posted whose sender
    comes after this call. max_ctas: see group_options.
    """
    backend, rank = dist.get_backend(), dist.get_rank()
    is_member, made = any(rank in ranks for ranks in groups), {}
    if backend == "nccl":
        torch.cuda.synchronize()
    if can_split():
        # torch names a group by how many its rank has: one more group of all other ranks keeps names equal on all ranks
        others = [other for other in range(dist.get_world_size()) if not any(other in ranks for ranks in groups)]
        own = dist.split_group(split_ranks=[list(ranks) for ranks in (*groups, others) if ranks],
                               timeout=group_timeout(), pg_options=group_options(backend, max_ctas))
        return own if is_member else None
    for ranks in groups:
        made[rank in ranks] = dist.new_group(list(ranks), timeout=group_timeout(),
                                             pg_options=group_options(backend, max_ctas))
    return made.get(True)


def build_mesh(layout, world_size):
    """Make the process groups of a layout. A collective: every rank of the world calls it, in the same order.

    The groups of an axis are made together. Groups of one rank are not made, nor a second one of the same ranks; the
    pairs of neighbouring stages have their own. Raises ConfigError when the degrees are not those of this world.
    """
    degrees = {axis: getattr(layout, f"{axis}_degree") for axis in AXES}
    if math.prod(degrees.values()) != world_size:
        text = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "all degrees 1"
        raise ConfigError(f"Use degrees whose product is {world_size}, or a group on as many devices as the layout "
                          f"needs: the layout ({text}) is for {math.prod(degrees.values())} workers, and this group "
                          f"has {world_size}.")
    if world_size == 1:
        return SINGLE
    places = torch.arange(world_size).view(*degrees.values())
    rank = dist.get_rank()
    ranks = dict(zip(AXES, (int(place) for place in (places == rank).nonzero()[0])))
    known = {(tuple(range(world_size)),): dist.group.WORLD}    # ranks of disjoint groups -> this rank's group

    def group_along(*axes):
        """This rank's group along these axes, the last one fastest."""
        size = math.prod(degrees[axis] for axis in axes)
        if size == 1:
            return None
        lines = tuple(_lines(places, axes, size))
        if lines not in known:
            known[lines] = make_group(lines)
        return known[lines]

    before_group, after_group = _neighbours(places, degrees["pipefusion"], rank)
    return Mesh(degrees, ranks, ring_group=group_along("ring"), ulysses_group=group_along("ulysses"),
                displaced_group=group_along("displaced"), sequence_group=group_along("displaced", "ring", "ulysses"),
                tensor_group=group_along("tensor"), before_group=before_group, after_group=after_group)


def _lines(places, axes, size):
    """The ranks of each group along some axes, as tuples."""
    dims = [AXES.index(axis) for axis in axes]
    others = [dim for dim in range(places.dim()) if dim not in dims]
    return [tuple(members) for members in places.permute(*others, *dims).reshape(-1, size).tolist()]


def _neighbours(places, num_stages, rank):
    """A group for each two ranks in consecutive stages: (with the stage before, with the stage after).

    One group for a whole pipeline would put what a stage waits for and what it sends in one queue, with NCCL. A rank in
    the middle is in two pairs, which cannot be made together: first those that begin at even stages, then the others.
    """
    before = after = None
    pipelines = _lines(places, ("pipefusion",), num_stages)
    for first_stage in (0, 1):
        pairs = [pair for pipeline in pipelines for pair in list(zip(pipeline, pipeline[1:]))[first_stage::2]]
        group = make_group(pairs, PAIR_MAX_CTAS) if pairs else None
        if any(rank == first for first, _ in pairs):
            after = group
        elif any(rank == second for _, second in pairs):
            before = group
    return before, after
