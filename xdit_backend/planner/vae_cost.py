"""Seconds of a decode or encode by rows, from what one device would compute, and how many devices should share it.
Pure arithmetic."""

from dataclasses import dataclass

from .layout_search import WORTH, speeds_of


@dataclass(frozen=True)
class Work:
    """A decode or encode of one picture: operations, bytes that its smaller steps move, layers that ask other ranks for
    something, and the bytes of the rows that they borrow, from one neighbour."""

    flops: float
    moved_bytes: float
    exchanges: float
    halo_bytes: float


def work_seconds(work, machine, ranks, first=0):
    """Of so many of the machine's ranks from `first` on, which have rows by their speed; all wait for the last. Rows at
    the edges are waited for."""
    devices, links = machine.devices[first:first + ranks], machine.links
    if ranks == 1:
        return _compute_s(work, devices[0]) / machine.alone
    speeds = speeds_of(devices) or (1,) * ranks
    last = max(_compute_s(work, device) * speed / sum(speeds) for device, speed in zip(devices, speeds))
    launches = work.exchanges * max(device.collective_launch_s for device in devices)
    return last + launches + work.exchanges * links.latency("hop", ranks) + min(
        2, ranks - 1) * work.halo_bytes / links.rate("hop", ranks)


def choose_ranks(work, machine, most):
    """Which of the machine's devices should share it, the fastest alone or the first so many, `most` at the most: {(how
    many, the first of them): seconds}, the best choice first.

    Those that are nearly as fast as the fastest choice are there, the fewest first: more would not be worth it.
    """
    fastest = min(range(most), key=lambda rank: _compute_s(work, machine.devices[rank]))
    seconds = {choice: work_seconds(work, machine, *choice)
               for choice in ((1, fastest), *((ranks, 0) for ranks in range(1, most + 1)))}
    return {choice: each for choice, each in seconds.items() if each <= WORTH * min(seconds.values())}


def _compute_s(work, device):
    return work.flops / (device.convolution_flops_s or device.matrix_flops_s) + work.moved_bytes / device.memory_bytes_s
