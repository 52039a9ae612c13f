"""Forecasts of every layout of a machine's devices, the best first, and which one to take. Pure arithmetic."""

import itertools
from dataclasses import dataclass

from .cost import Degrees, Device, Links, block_parts, run_seconds
from .memory import Memory, rank_memory

WORTH = 1.05                   # times as fast that a layout must be to be preferred to an exact one, or to one device
WORTH_S = 0.3                  # seconds that a layout must save to be called faster than one device
LIMITS = 0.25                  # of the time, from which on something other than computing limits a run
ALIKE = 1.15                   # times as fast as another that a device may be and count as its like
ROOM = 0.95                    # of a device's memory that a run may take


@dataclass(frozen=True)
class Machine:
    """The devices of a worker group, in the order of its ranks, and the links between them.

    alone: times as fast as beside the others that the first device is while they rest; CPU workers share what a machine has.
    """

    devices: tuple[Device, ...]
    links: Links
    alone: float = 1.0


@dataclass(frozen=True)
class Forecast:
    """What a run will take under a layout. causes: {what its seconds are spent on: seconds}, see run_seconds."""

    degrees: Degrees
    causes: dict[str, float]
    memory: Memory                         # of the fullest rank, in bytes
    fits: bool
    working: int                           # devices that have something to do

    @property
    def seconds(self):
        return sum(self.causes.values())

    @property
    def is_exact(self):
        """Is its picture one device's? That of stale keys and values differs a little."""
        return self.degrees.pipefusion == 1 and self.degrees.displaced == 1

    @property
    def limited_by(self):
        """"compute", "link", "launch" or "warm-up"."""
        waits = {cause: seconds for cause, seconds in self.causes.items() if cause != "compute"}
        worst = max(waits, key=lambda cause: waits[cause])
        return worst if waits[worst] > LIMITS * self.seconds else "compute"


def forecast(net, job, degrees, machine, **memory):
    """The Forecast of one layout of the machine's first devices, as many as it needs. memory: rank_memory's further arguments.

    All wait for the slowest device that works, but for stages, whose blocks are shared out by speed. A rank that has no image of the
    batch rests.
    """
    used = machine.devices[:degrees.devices]
    working = degrees.devices // degrees.data * min(degrees.data, job.images)
    if working == 1:
        device, worth = used[0].slower(1 / machine.alone), 0.0
    else:
        speeds = [1 / a_block_s(net, job, device) for device in used]
        device, worth = used[speeds.index(min(speeds[:working]))], 0.0
        if degrees.pipefusion > 1:
            stages = [[speed for rank, speed in enumerate(speeds) if rank // degrees.sequence % degrees.pipefusion == stage]
                      for stage in range(degrees.pipefusion)]
            worth = sum(map(min, stages)) / min(speeds[:working])
    needed = rank_memory(net, job, degrees, **memory)
    fits = needed.total <= ROOM * min(one.memory_bytes for one in used[:working])
    return Forecast(degrees, run_seconds(net, job, degrees, device, machine.links, worth), needed, fits, working)


def a_block_s(net, job, device):
    """Seconds that a device takes for a block of one image, alone."""
    text = job.text if net.joint else 0
    return block_parts(net, job, Degrees(), device, Links(), 1, job.tokens, job.tokens + text, text).seconds


def are_alike(net, job, devices):
    """Are these devices about as fast as each other?"""
    speeds = [1 / a_block_s(net, job, device) for device in set(devices)]
    return max(speeds) <= ALIKE * min(speeds)


def forecasts(net, job, machine, some=None, **memory):
    """A Forecast of each layout of all devices (or of `some`): those that fit first, the fastest of them foremost."""
    every = [forecast(net, job, degrees, machine, **memory) for degrees in some or candidates(net, job, len(machine.devices))]
    return sorted(every, key=lambda one: (not one.fits, one.seconds))


def choose(ordered, alike=True):
    """Of forecasts(...), which layout to take: the fastest that fits. Of those nearly as fast, an exact one; of these one device alone,
    where it is among them, else that with least memory. Devices that are alike first share out the branches of guidance: that sends least.
    """
    fitting = [one for one in ordered if one.fits] or ordered
    near = [one for one in fitting if one.seconds <= WORTH * fitting[0].seconds]
    if alike and not any(one.working == 1 for one in near):
        by_branches = [one for one in fitting if one.degrees.cfg > 1 and one.is_exact >= fitting[0].is_exact]
        near = [one for one in by_branches if one.seconds <= WORTH * by_branches[0].seconds] or near
    return min(near, key=lambda one: (not one.is_exact, one.working > 1, one.memory.total if one.is_exact else one.seconds))


def is_worth_it(chosen, one):
    """Is a layout so much faster than one device that it can be promised?"""
    return one.seconds >= WORTH * chosen.seconds and one.seconds - chosen.seconds >= WORTH_S


def candidates(net, job, devices):
    """The layouts of so many devices by CFG, data, Ulysses, Ring and PipeFusion; with one image, data parallelism is one device alone."""
    divisors = [count for count in range(1, devices + 1) if devices % count == 0]
    for cfg, data, ulysses, ring in itertools.product(divisors, repeat=4):
        stages, rest = divmod(devices, cfg * data * ulysses * ring)
        shares = data <= job.images or (data == devices and job.images == 1)
        works = not rest and stages and cfg <= job.branches and shares and net.heads % ulysses == 0 and ulysses * ring <= job.tokens
        if works and stages <= net.blocks and (stages == 1 or job.steps > 2):
            for num_patches in (stages, 2 * stages) if stages > 1 else (0,):
                yield Degrees(cfg, ulysses, ring, stages, data=data, num_patches=num_patches)
