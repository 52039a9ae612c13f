"""The worker groups that commands time."""

from contextlib import suppress

import psutil

from ...host.client import Client
from ...host.forkserver import Forkserver
from ...host.preflight import num_cuda_devices


def count_cuda(device):
    """CUDA devices to run on; 0 where --device says cpu or there are none."""
    return num_cuda_devices() if device != "cpu" else 0


def start_clients(sizes, num_cuda):
    """{number of devices: Client}; ranks share a CUDA device, over gloo, where there are too few. Their libraries are
    imported once; the forkserver ends with this process."""
    supervisor = Forkserver()
    return {size: Client(devices_of(size, num_cuda), supervisor=supervisor) for size in sizes}


def devices_of(size, num_cuda):
    return tuple(f"cuda:{index % num_cuda}" if num_cuda else "cpu" for index in range(size))


def second_client(first, num_cuda):
    """A client of one device beside the first one's."""
    return Client(("cuda:1" if num_cuda > 1 else first.devices[0],))


class ProcessorTime:
    """Processor seconds, from now on, of all that this process has started and that runs when they are asked for."""

    def __init__(self):
        self._before = _processor_s()

    def so_far_s(self):
        return sum(taken_s - self._before.get(process, 0) for process, taken_s in _processor_s().items())


def _processor_s():
    seconds = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):                   # it ends at this moment
            seconds[process] = sum(process.cpu_times()[:2])
    return seconds
