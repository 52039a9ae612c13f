"""Forecasts of every layout that so many devices allow, the best first. Pure arithmetic."""

from dataclasses import dataclass

from .cost import Degrees, run_seconds
from .memory import Memory, rank_memory

WORTH = 1.05                   # times as fast that an approximate layout must be to be preferred to an exact one
LIMITS = 0.25                  # of the time, from which on something other than computing limits a run


@dataclass(frozen=True)
class Forecast:
    """What a run will take under a layout. causes: {what its seconds are spent on: seconds}, see run_seconds."""

    degrees: Degrees
    causes: dict[str, float]
    memory: Memory                         # of a rank, in bytes
    fits: bool

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


def forecast(net, job, degrees, device, links, free_bytes=float("inf"), beside_bytes=0.0):
    """The Forecast of one layout. free_bytes: that a rank may use; beside_bytes: of what it holds beside the transformer."""
    memory = rank_memory(net, job, degrees, beside_bytes)
    return Forecast(degrees, run_seconds(net, job, degrees, device, links), memory, memory.total <= free_bytes)


def forecasts(net, job, devices, device, links, free_bytes=float("inf"), beside_bytes=0.0):
    """A Forecast of each layout of so many devices: those that fit first, the fastest of them foremost."""
    every = [forecast(net, job, degrees, device, links, free_bytes, beside_bytes) for degrees in candidates(net, job, devices)]
    return sorted(every, key=lambda one: (not one.fits, one.seconds))


def choose(ordered):
    """Of forecasts(...), which layout to take: the fastest that fits; of those nearly as fast an exact one, then that with least memory."""
    fitting = [one for one in ordered if one.fits] or ordered
    near = [one for one in fitting if one.seconds <= WORTH * fitting[0].seconds]
    return min(near, key=lambda one: (not one.is_exact, one.memory.total if one.is_exact else one.seconds))


def candidates(net, job, devices):
    """The layouts of so many devices by CFG, Ulysses, Ring and PipeFusion."""
    divisors = [count for count in range(1, devices + 1) if devices % count == 0]
    for cfg in divisors:
        for ulysses in divisors:
            for ring in divisors:
                stages, rest = divmod(devices, cfg * ulysses * ring)
                works = not rest and stages and cfg <= job.branches and net.heads % ulysses == 0 and stages <= net.blocks
                if works and (stages == 1 or job.steps > 2):
                    for num_patches in (stages, 2 * stages) if stages > 1 else (0,):
                        yield Degrees(cfg, ulysses, ring, stages, num_patches=num_patches)
