"""Estimated time of a VAE decode or encode split by rows, and the number of devices to split it over. Arithmetic
only."""

from dataclasses import dataclass

from .layout_search import WORTH, speeds_of


@dataclass(frozen=True)
class Work:
    """A decode or encode of one image: floating-point operations, bytes moved by elementwise kernels, layers that
    communicate, and bytes of halo rows from one neighbour."""

    flops: float
    moved_bytes: float
    exchanges: float
    halo_bytes: float


def work_seconds(work, machine, ranks, first=0):
    """Estimated seconds on this many of the machine's ranks from `first` on, with rows split by speed; all wait for the
    slowest. Halo exchanges do not overlap compute."""
    devices, links = machine.devices[first:first + ranks], machine.links
    if ranks == 1:
        return _compute_s(work, devices[0]) / machine.alone
    speeds = speeds_of(devices) or (1,) * ranks
    last = max(_compute_s(work, device) * speed / sum(speeds) for device, speed in zip(devices, speeds))
    launches = work.exchanges * max(device.collective_launch_s for device in devices)
    return last + launches + work.exchanges * links.latency("hop", ranks) + min(
        2, ranks - 1) * work.halo_bytes / links.rate("hop", ranks)


def choose_ranks(work, machine, most):
    """Choose devices to split a decode or encode over: the fastest alone, or the first N, up to `most`. Returns
    {(number of devices, first device): seconds}, best choice first.

    Choices nearly as fast as the fastest are included, fewest devices first; more would not be worth it.
    """
    fastest = min(range(most), key=lambda rank: _compute_s(work, machine.devices[rank]))
    seconds = {choice: work_seconds(work, machine, *choice)
               for choice in ((1, fastest), *((ranks, 0) for ranks in range(1, most + 1)))}
    return {choice: each for choice, each in seconds.items() if each <= WORTH * min(seconds.values())}


def _compute_s(work, device):
    return work.flops / (device.convolution_flops_s or device.matrix_flops_s) + work.moved_bytes / device.memory_bytes_s
