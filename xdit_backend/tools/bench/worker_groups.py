"""Worker groups that benchmarks time."""

from contextlib import suppress

import psutil

from ...host.client import Client
from ...host.forkserver import Forkserver
from ...host.preflight import num_cuda_devices


def count_cuda(device):
    """Number of CUDA devices to use; 0 with --device cpu or if there are none."""
    return num_cuda_devices() if device != "cpu" else 0


def start_clients(sizes, num_cuda):
    """{number of devices: Client}. Ranks share a CUDA device, over gloo, if there are too few. Libraries are imported
    once; the forkserver ends with this process."""
    supervisor = Forkserver()
    return {size: Client(devices_of(size, num_cuda), supervisor=supervisor) for size in sizes}


def devices_of(size, num_cuda):
    return tuple(f"cuda:{index % num_cuda}" if num_cuda else "cpu" for index in range(size))


def second_client(first, num_cuda):
    """A client of one device that is independent of the first one."""
    return Client(("cuda:1" if num_cuda > 1 else first.devices[0],))


class ProcessorTime:
    """CPU seconds since construction of this process's children that still run when it is read."""

    def __init__(self):
        self._before = _processor_s()

    def so_far_s(self):
        return sum(taken_s - self._before.get(process, 0) for process, taken_s in _processor_s().items())


def _processor_s():
    seconds = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):                   # it exits at this moment
            seconds[process] = sum(process.cpu_times()[:2])
    return seconds
