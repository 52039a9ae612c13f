"""Time and memory estimates for every layout of a machine's devices, and the choice among them. Arithmetic only."""

import functools
import itertools
import math
from dataclasses import dataclass, replace

from ..partition import shard_sizes
from .cost_model import Degrees, Device, Links, Run, Tokens, block_time
from .memory_model import DEFAULT_SETTINGS, Memory, fits_stages, memory_budget, rank_memory
from .offload_cost import offloaded_memory
from .run_time import run_seconds

WORTH = 1.05                   # speedup from which a layout is preferred to an exact one, or to one device
WORTH_S = 0.3                  # seconds that a layout must save to be called faster than one device
LIMITS = 0.25                  # fraction of the time from which a cause other than compute is the bottleneck
IDENTICAL = 1.15               # ratio of speeds up to which devices count as identical
# Ranks all-gather streamed weights if links between devices are this many times as fast as copies from system RAM,
# with which they may share a bus, and if the run becomes this many times as fast
FAST_LINKS, SHARING_WORTH = 3.0, 1.1


@dataclass(frozen=True)
class Machine:
    """The devices of a worker group, in rank order, and the links between them.

    alone: speedup of the first device while the others are idle; CPU workers share the machine's cores and memory.
    page_bytes: bytes of a checkpoint that fit in the page cache. disk_bytes_s: read rate from disk beyond that; 0: not
    measured.
    """

    devices: tuple[Device, ...]
    links: Links
    alone: float = 1.0
    page_bytes: float = math.inf
    disk_bytes_s: float = 0.0

    def reading(self, pages):
        """This machine with a checkpoint's page cache size and disk read rate. pages: from system_memory.pages_of."""
        return replace(self, page_bytes=pages[0], disk_bytes_s=pages[1])

    def exchanging(self, exchange):
        """This machine with this communication dtype of attention's tensors."""
        return replace(self, links=replace(self.links, exchange=exchange))

    @functools.cached_property
    def is_uniform(self):
        return all(device == self.devices[0] for device in self.devices)


@dataclass(frozen=True)
class Estimate:
    """Estimated time and memory of a run under a layout. causes: {cause: seconds}, see run_seconds."""

    degrees: Degrees
    causes: dict[str, float]
    memory: Memory                         # of the fullest rank, in bytes
    fits: bool
    working: int                           # devices that are not idle
    # seconds of weight streaming in a step, over all of its patches, whether or not compute hides them
    streaming_s: float = 0.0
    # does each rank copy a shard of the streamed weights, to all-gather them?
    shards_weights: bool = False

    @property
    def seconds(self):
        return sum(self.causes.values())

    @property
    def is_exact(self):
        """Whether the image equals one device's. Stale keys and values change it slightly; one patch has none."""
        return (self.degrees.pipefusion == 1 or self.degrees.num_patches == 1) and self.degrees.displaced == 1

    @property
    def is_independent(self):
        """Whether each device works independently, on its own branches and images."""
        return self.degrees.devices == self.degrees.cfg * self.degrees.data

    @property
    def limited_by(self):
        """The bottleneck: "compute", "link", "launch", "warm-up" or "weights"."""
        waits = {cause: seconds for cause, seconds in self.causes.items() if cause != "compute"}
        worst = max(waits, key=lambda cause: waits[cause])
        return worst if waits[worst] > LIMITS * self.seconds else "compute"


def estimate(dims, job, degrees, machine, settings=DEFAULT_SETTINGS):
    """The Estimate of one layout on the machine's first devices, as many as it needs.

    Tokens, blocks and images are split by device speed; otherwise all ranks wait for the slowest working device. A rank
    without an image of the batch is idle.
    """
    group = busiest(dims, job, degrees, machine)
    device, equivalent_devices = group.device, group.equivalent_devices
    if group.working == 1:
        device, equivalent_devices = device.slower(1 / machine.alone), 0.0
    needed = rank_memory(dims, job, degrees, settings)
    seconds = run_seconds(dims, replace(job, images=group.images * degrees.data), degrees, device, machine.links,
                          equivalent_devices)
    fits = fits_stages(dims, degrees, needed, group.memory_bytes)
    if (settings.weights_memory and device.host_bytes_s and not degrees.warmup_by_sequence
            and (degrees.pipefusion == 1 or not fits)):
        offloaded = offloaded_memory(dims, needed, memory_budget(min(group.memory_bytes)), settings.weights_memory,
                                     degrees.pipefusion)
        needed, fits = (needed, fits) if offloaded is None else (offloaded, True)
    if not needed.streamed:
        return Estimate(degrees, seconds, needed, fits, group.working)
    num_patches = 1 if degrees.pipefusion == 1 else degrees.num_patches or degrees.pipefusion
    warmup_steps = min(job.steps, degrees.warmup_steps)
    times = warmup_steps + (job.steps - warmup_steps) * num_patches

    def made(num_sharing):
        once_s, waits = _streaming_seconds(needed.streamed, num_sharing, degrees, machine, group), seconds
        if num_sharing > 1:                                    # compute and copies may not overlap the all-gather
            exchange_s = needed.streamed * (num_sharing - 1) / num_sharing / machine.links.rate("gather", num_sharing)
            once_s, waits = once_s + exchange_s, seconds | {"link": seconds["link"] + times * exchange_s}
        # copy time that nothing hides
        waits = waits | {"weights": max(0.0, times * once_s - sum(waits.values()))}
        return Estimate(degrees, waits, needed, fits, group.working, num_patches * once_s, num_sharing > 1)
    alone, shared = made(1), made(_num_sharing(job, degrees, machine, group))
    return shared if SHARING_WORTH * shared.seconds < alone.seconds else alone


def _num_sharing(job, degrees, machine, group):
    """The number of ranks that could each copy a shard of the same weights, if all have equal work. 1: too slow, not
    measured, or not supported by worker/cooperative_loading.py."""
    all_work = (degrees.devices == group.working == len(machine.devices) and job.branches % degrees.cfg == 0
                and job.images % degrees.data == 0)
    num_sharing, is_measured = degrees.devices // degrees.pipefusion, any(name == "gather"
                                                                          for name, _ in machine.links.rates)
    if not all_work or not is_measured or num_sharing == 1 or degrees.tensor > 1 or machine.links.per_machine:
        return 1
    is_fast = machine.links.rate("gather", num_sharing) >= FAST_LINKS * group.device.host_bytes_s
    return num_sharing if is_fast else 1


def _streaming_seconds(streamed_bytes, num_sharing, degrees, machine, group):
    """Seconds to stream these bytes of weights to each rank, with each of num_sharing ranks copying a shard: from
    system RAM, or from disk if the page cache is too small for the weights of all stages and shards. Ranks with the
    same weights read them once."""
    device, of_all = group.device, streamed_bytes * degrees.pipefusion * degrees.tensor
    copies_s = streamed_bytes / num_sharing / (group.working == 1 and device.host_alone_bytes_s or device.host_bytes_s)
    from_disk = of_all > machine.page_bytes and machine.disk_bytes_s
    return max(copies_s, of_all / machine.disk_bytes_s) if from_disk else copies_s


@dataclass(frozen=True)
class Group:
    """Ranks that work on the same images. All wait for the busiest.

    device: with the average speed of the group's ranks. equivalent_devices: total speed of the stages as a number of
    such devices; 0: the number of stages. working: working devices in all groups. memory_bytes: of the smallest device
    of each stage.
    """

    device: Device
    equivalent_devices: float
    images: int
    working: int
    memory_bytes: tuple[float, ...]


def busiest(dims, job, degrees, machine):
    """The Group that takes longest, with work split over ranks as in distributed.mesh.with_speeds."""
    of_replica, stages, tensor = degrees.devices // degrees.data, degrees.pipefusion, degrees.tensor
    if machine.is_uniform:
        device, images = machine.devices[0], math.ceil(job.images / degrees.data)
        return Group(device, 0.0, images, of_replica * min(degrees.data, job.images), (device.memory_bytes,) * stages)
    used, shared_speeds = machine.devices[:degrees.devices], speeds_of(machine.devices[:degrees.devices]) or (
        1,) * degrees.devices
    speeds = [1 / seconds_per_block(dims, job, device) for device in used]
    sequence = of_replica // degrees.cfg // stages // tensor

    def of_ranks(values, first):
        """Values by stage and sequence rank for the branch that begins at rank `first`: the minimum over its tensor
        ranks."""
        return [[min(values[start:start + tensor]) for start in range(first + stage * sequence * tensor,
                                                                       first + (stage + 1) * sequence * tensor, tensor)]
                for stage in range(stages)]

    def branch(first):
        """(speed of the slowest stage, of all stages, configured speed) of one branch's ranks."""
        rank_speeds = [min(each) for each in zip(*of_ranks(shared_speeds, first))]
        each = [min(speed * sum(rank_speeds) / sequence / share for speed, share in zip(stage, rank_speeds))
                for stage in of_ranks(speeds, first)]
        return min(each), sum(each), sum(map(sum, of_ranks(shared_speeds, first)))

    replicas = [min(branch(first) for first in range(start, start + of_replica, of_replica // degrees.cfg))
                for start in range(0, degrees.devices, of_replica)]
    images = shard_sizes(job.images, degrees.data,
                         [shared_speeds for _, _, shared_speeds in replicas] if len(set(shared_speeds)) > 1 else ())
    last = max(range(degrees.data), key=lambda replica: images[replica] / replicas[replica][1])
    slowest, together, _ = replicas[last]
    ranks = range(last * of_replica, (last + 1) * of_replica)
    near = min(ranks, key=lambda rank: abs(speeds[rank] - slowest))
    device = used[near] if speeds[near] == slowest else used[near].slower(speeds[near] / slowest)
    working = [rank for rank in range(degrees.devices) if images[rank // of_replica]]
    of_stage = of_replica // degrees.cfg // stages
    smallest = tuple(min(used[rank].memory_bytes for rank in working if rank // of_stage % stages == stage)
                     for stage in range(stages))
    return Group(device, together / slowest if stages > 1 else 0.0, images[last], len(working), smallest)


def speeds_of(devices):
    """Relative speed of each device as workers use it: its matrix multiplication rate, with 100 for the fastest.
    (): all identical."""
    rates = [device.matrix_flops_s for device in devices]
    if max(rates) <= IDENTICAL * min(rates):
        return ()
    return tuple(max(1, round(100 * rate / max(rates))) for rate in rates)


def seconds_per_block(dims, job, device):
    """Seconds of one block for one image on one device."""
    run = Run(dims, job, Degrees(), device, Links())
    return block_time(run, Tokens(1, job.tokens, run.text)).seconds


def are_identical(dims, job, devices):
    """Whether these devices are about equally fast."""
    speeds = [1 / seconds_per_block(dims, job, device) for device in set(devices)]
    return max(speeds) <= IDENTICAL * min(speeds)


def estimates(dims, job, machine, layouts=None, settings=DEFAULT_SETTINGS):
    """Estimates of these layouts (None: all that the devices allow): those that fit first, the fastest first."""
    layouts = layouts or candidates(dims, job, len(machine.devices), machine.links.per_machine)
    every = [estimate(dims, job, degrees, machine, settings) for degrees in layouts]
    return sorted(every, key=lambda one: (not one.fits, one.seconds))


def choose(ordered, identical=True):
    """The layout to use, from sorted estimates: the fastest that fits. Of those nearly as fast, an exact one; of these,
    one device alone if it is among them, else the one with the least memory. Identical devices use CFG parallelism
    first, which sends the least.
    """
    fitting = [one for one in ordered if one.fits] or ordered
    near = [one for one in fitting if one.seconds <= WORTH * fitting[0].seconds]
    if identical and not any(one.working == 1 for one in near):
        by_branches = [one for one in fitting if one.degrees.cfg > 1 and one.is_exact >= fitting[0].is_exact]
        near = [one for one in by_branches if one.seconds <= WORTH * by_branches[0].seconds] or near
    return min(near, key=lambda one: (not one.is_exact, one.working > 1,
                                      one.memory.total if one.is_exact else one.seconds))


def is_worth_it(chosen, one):
    """Whether a layout is enough faster than one device to promise a speedup."""
    return one.seconds >= WORTH * chosen.seconds and one.seconds - chosen.seconds >= WORTH_S


def extra_candidates(dims, job, machine):
    """Layouts with tensor parallelism and DistriFusion, which auto mode does not use, if their collectives were
    measured."""
    devices = len(machine.devices)
    for cfg in range(1, min(job.branches, devices) + 1):
        each, rest = divmod(devices, cfg)
        if rest or each == 1:
            continue
        known = {name for name, _ in machine.links.rates}
        if "all_reduce" in known and dims.heads % each == (dims.key_heads or dims.heads) % each == 0:
            yield Degrees(cfg=cfg, tensor=each)
        if "gather" in known and each <= job.tokens:
            yield Degrees(cfg=cfg, displaced=each)


def candidates(dims, job, devices, per_machine=0):
    """Layouts of this many devices with CFG, data, Ulysses, Ring and PipeFusion; with one image, data parallelism means
    one device alone.

    per_machine: of Links; with one image, also one machine alone.
    """
    alone = (devices, devices // per_machine) if per_machine else (devices,)
    divisors = [count for count in range(1, devices + 1) if devices % count == 0]
    for cfg, data, ulysses, ring in itertools.product(divisors, repeat=4):
        stages, rest = divmod(devices, cfg * data * ulysses * ring)
        has_images = data <= job.images or (data in alone and job.images == 1)
        works = (not rest and stages and cfg <= job.branches and has_images and dims.heads % ulysses == 0
                 and ulysses * ring <= (job.rows or job.tokens))
        if works and stages <= dims.blocks and (stages == 1 or job.steps > 2):
            for num_patches in (stages, 2 * stages) if stages > 1 else (0,):
                yield Degrees(cfg, ulysses, ring, stages, data=data, num_patches=num_patches)
