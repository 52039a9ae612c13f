"""Forecasts of every layout of a machine's devices, the best first, and which one to take. Pure arithmetic."""

import functools
import itertools
import math
from dataclasses import dataclass, replace

from ..partition import shard_sizes
from .cost_model import Degrees, Device, Links, Run, Tokens, block_parts
from .memory_model import DEFAULT_SETTINGS, Memory, fits_stages, memory_budget, rank_memory
from .offload_cost import offloaded_memory
from .run_time import run_seconds

WORTH = 1.05                   # times as fast that a layout must be to be preferred to an exact one, or to one device
WORTH_S = 0.3                  # seconds that a layout must save to be called faster than one device
LIMITS = 0.25                  # of the time, from which on something other than computing limits a run
ALIKE = 1.15                   # times as fast as another that a device may be and count as its like
# Devices bring parts of weights to each other where links between them are so many times as fast as the way from host
# memory, which they may be a part of, and a run is so many times as fast
FAST_LINKS, SHARING_WORTH = 3.0, 1.1


@dataclass(frozen=True)
class Machine:
    """The devices of a worker group, in the order of its ranks, and the links between them.

    alone: times as fast as beside the others that the first device is while they rest; CPU workers share what a machine
    has. page_bytes, disk_bytes_s: of a model's file, what host memory has room for, and how many a second come from the
    disk once it has none; 0: not measured.
    """

    devices: tuple[Device, ...]
    links: Links
    alone: float = 1.0
    page_bytes: float = math.inf
    disk_bytes_s: float = 0.0

    def reading(self, pages):
        """This machine, where so much of a model's file is in host memory. pages: system_memory.pages_of."""
        return replace(self, page_bytes=pages[0], disk_bytes_s=pages[1])

    def exchanging(self, exchange):
        """This machine, where attention's tensors travel in this form."""
        return replace(self, links=replace(self.links, exchange=exchange))

    @functools.cached_property
    def is_uniform(self):
        return all(device == self.devices[0] for device in self.devices)


@dataclass(frozen=True)
class Estimate:
    """What a run will take under a layout. causes: {what its seconds are spent on: seconds}, see run_seconds."""

    degrees: Degrees
    causes: dict[str, float]
    memory: Memory                         # of the fullest rank, in bytes
    fits: bool
    working: int                           # devices that have something to do
    # seconds of a step by patches (else of one) in which weights come from host memory, beside computing
    streaming_s: float = 0.0
    # does each device bring a part of those that all hold, and send it to the others?
    shards_weights: bool = False

    @property
    def seconds(self):
        return sum(self.causes.values())

    @property
    def is_exact(self):
        """Is its picture one device's? That of stale keys and values differs a little; one patch has none."""
        return (self.degrees.pipefusion == 1 or self.degrees.num_patches == 1) and self.degrees.displaced == 1

    @property
    def is_independent(self):
        """Does each device work as if it were alone, on branches and images of its own?"""
        return self.degrees.devices == self.degrees.cfg * self.degrees.data

    @property
    def limited_by(self):
        """"compute", "link", "launch", "warm-up" or "weights"."""
        waits = {cause: seconds for cause, seconds in self.causes.items() if cause != "compute"}
        worst = max(waits, key=lambda cause: waits[cause])
        return worst if waits[worst] > LIMITS * self.seconds else "compute"


def estimate(dims, job, degrees, machine, settings=DEFAULT_SETTINGS):
    """The Forecast of one layout of the machine's first devices, as many as it needs.

    Tokens, blocks and images are shared out by speed; else all wait for the slowest device that works. A rank that has
    no image of the batch rests.
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
        if num_sharing > 1:                                    # nothing runs beside an exchange, perhaps no copy either
            exchange_s = needed.streamed * (num_sharing - 1) / num_sharing / machine.links.rate("gather", num_sharing)
            once_s, waits = once_s + exchange_s, seconds | {"link": seconds["link"] + times * exchange_s}
        # what copying takes longer than all else does
        waits = waits | {"weights": max(0.0, times * once_s - sum(waits.values()))}
        return Estimate(degrees, waits, needed, fits, group.working, num_patches * once_s, num_sharing > 1)
    alone, shared = made(1), made(_num_sharing(job, degrees, machine, group))
    return shared if SHARING_WORTH * shared.seconds < alone.seconds else alone


def _num_sharing(job, degrees, machine, group):
    """How many ranks could each bring a part of the same weights, if all have as much to do. 1: not known to be fast,
    or not possible, as worker/cooperative_loading.py has it."""
    all_work = (degrees.devices == group.working == len(machine.devices) and job.branches % degrees.cfg == 0
                and job.images % degrees.data == 0)
    num_sharing, is_measured = degrees.devices // degrees.pipefusion, any(name == "gather"
                                                                          for name, _ in machine.links.rates)
    if not all_work or not is_measured or num_sharing == 1 or degrees.tensor > 1 or machine.links.per_machine:
        return 1
    is_fast = machine.links.rate("gather", num_sharing) >= FAST_LINKS * group.device.host_bytes_s
    return num_sharing if is_fast else 1


def _streaming_seconds(streamed_bytes, num_sharing, degrees, machine, group):
    """Seconds in which so many bytes of weights come to each rank, of which each of so many ranks copies a part: from
    host memory, or, where that has no room for those of all stages and shards, from the disk. Ranks with the same
    weights read them once."""
    device, of_all = group.device, streamed_bytes * degrees.pipefusion * degrees.tensor
    copies_s = streamed_bytes / num_sharing / (group.working == 1 and device.host_alone_bytes_s or device.host_bytes_s)
    from_disk = of_all > machine.page_bytes and machine.disk_bytes_s
    return max(copies_s, of_all / machine.disk_bytes_s) if from_disk else copies_s


@dataclass(frozen=True)
class Group:
    """Ranks that share images, as the forecast sees them: all wait for the busiest.

    device: as fast as each of its ranks is on average. equivalent_devices: how many such devices its stages are worth;
    0: as many as there are. working: devices that have something to do, in all groups. memory_bytes: of the smallest
    device of each stage.
    """

    device: Device
    equivalent_devices: float
    images: int
    working: int
    memory_bytes: tuple[float, ...]


def busiest(dims, job, degrees, machine):
    """The Group that takes longest, where the ranks' shares are as distributed.mesh.with_speeds has them."""
    of_replica, stages, tensor = degrees.devices // degrees.data, degrees.pipefusion, degrees.tensor
    if machine.is_uniform:
        device, images = machine.devices[0], math.ceil(job.images / degrees.data)
        return Group(device, 0.0, images, of_replica * min(degrees.data, job.images), (device.memory_bytes,) * stages)
    used, shared_speeds = machine.devices[:degrees.devices], speeds_of(machine.devices[:degrees.devices]) or (
        1,) * degrees.devices
    speeds = [1 / seconds_per_block(dims, job, device) for device in used]
    sequence = of_replica // degrees.cfg // stages // tensor

    def of_ranks(values, first):
        """[[of each sequence rank] of each stage] of the branch that begins at rank `first`:
        the least of its tensor ranks'."""
        return [[min(values[start:start + tensor]) for start in range(first + stage * sequence * tensor,
                                                                       first + (stage + 1) * sequence * tensor, tensor)]
                for stage in range(stages)]

    def branch(first):
        """(speed of its slowest stage, of all stages, the shared one) of one branch's ranks."""
        shares = [min(each) for each in zip(*of_ranks(shared_speeds, first))]
        each = [min(speed * sum(shares) / sequence / share for speed, share in zip(stage, shares))
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
    """How fast each device is, as the workers use it: its rate of matrix multiplication, where the fastest has 100. ():
    all alike."""
    rates = [device.matrix_flops_s for device in devices]
    return () if max(rates) <= ALIKE * min(rates) else tuple(max(1, round(100 * rate / max(rates))) for rate in rates)


def seconds_per_block(dims, job, device):
    """Seconds that a device takes for a block of one image, alone."""
    run = Run(dims, job, Degrees(), device, Links())
    return block_parts(run, Tokens(1, job.tokens, run.text)).seconds


def are_identical(dims, job, devices):
    """Are these devices about as fast as each other?"""
    speeds = [1 / seconds_per_block(dims, job, device) for device in set(devices)]
    return max(speeds) <= ALIKE * min(speeds)


def estimates(dims, job, machine, layouts=None, settings=DEFAULT_SETTINGS):
    """A Forecast of each of these layouts (None: all that the devices can have): those that fit first, the fastest of
    them foremost."""
    layouts = layouts or candidates(dims, job, len(machine.devices), machine.links.per_machine)
    every = [estimate(dims, job, degrees, machine, settings) for degrees in layouts]
    return sorted(every, key=lambda one: (not one.fits, one.seconds))


def choose(ordered, identical=True):
    """Of forecasts(...), which layout to take: the fastest that fits. Of those nearly as fast, an exact one; of these
    one device alone, where it is among them, else that with least memory. Devices that are alike first share out the
    branches of guidance: that sends least.
    """
    fitting = [one for one in ordered if one.fits] or ordered
    near = [one for one in fitting if one.seconds <= WORTH * fitting[0].seconds]
    if identical and not any(one.working == 1 for one in near):
        by_branches = [one for one in fitting if one.degrees.cfg > 1 and one.is_exact >= fitting[0].is_exact]
        near = [one for one in by_branches if one.seconds <= WORTH * by_branches[0].seconds] or near
    return min(near, key=lambda one: (not one.is_exact, one.working > 1,
                                      one.memory.total if one.is_exact else one.seconds))


def is_worth_it(chosen, one):
    """Is a layout so much faster than one device that it can be promised?"""
    return one.seconds >= WORTH * chosen.seconds and one.seconds - chosen.seconds >= WORTH_S


def extra_candidates(dims, job, machine):
    """Layouts by tensor parallelism and by DistriFusion, which auto takes none of,
    where their collectives were measured."""
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
    """The layouts of so many devices by CFG, data, Ulysses, Ring and PipeFusion; with one image, data parallelism is
    one device alone.

    per_machine: Links'; with one image, also one machine alone.
    """
    alone = (devices, devices // per_machine) if per_machine else (devices,)
    divisors = [count for count in range(1, devices + 1) if devices % count == 0]
    for cfg, data, ulysses, ring in itertools.product(divisors, repeat=4):
        stages, rest = divmod(devices, cfg * data * ulysses * ring)
        shares = data <= job.images or (data in alone and job.images == 1)
        works = (not rest and stages and cfg <= job.branches and shares and dims.heads % ulysses == 0
                 and ulysses * ring <= (job.rows or job.tokens))
        if works and stages <= dims.blocks and (stages == 1 or job.steps > 2):
            for num_patches in (stages, 2 * stages) if stages > 1 else (0,):
                yield Degrees(cfg, ulysses, ring, stages, data=data, num_patches=num_patches)
