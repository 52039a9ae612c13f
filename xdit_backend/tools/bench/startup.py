"""Time the start of workers, and measure the memory of their processes.

For each number of workers: the first group of a host, which waits for library imports; the next one; and one whose
workers are separate programs, as where forking is not safe. They are interleaved. Memory is the proportional set size:
a page that several processes map is divided among them.
"""

import os
import statistics
import time
from contextlib import contextmanager, suppress

import psutil

from ...host.forkserver import FORK, Forkserver
from ...host.launcher import WorkerGroup
from ...protocol.messages import ReportMemory
from .worker_groups import ProcessorTime, count_cuda, devices_of

WAYS = ("first", "next", "programs of their own")


def add_arguments(parser):
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4], help="workers per group")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which minimum, median and maximum are shown")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="auto: CUDA if available")


def main(options):
    num_cuda = count_cuda(options.device)
    seconds, memory = {}, {}
    for _ in range(options.rounds):
        for size in options.workers:
            devices = devices_of(size, num_cuda)
            with _forking(True), _server() as server:
                for way in WAYS[:2]:
                    _measure(devices, server, seconds.setdefault((size, way), []), memory.setdefault((size, way), []))
            with _forking(False), _server() as server:
                key = size, WAYS[2]
                _measure(devices, server, seconds.setdefault(key, []), memory.setdefault(key, []))
    print(f"{'workers':>8}  {'way':22}{'seconds until ready':>28}{'processor s':>13}{'memory MB':>11}{'a worker':>10}")
    for (size, way), times in seconds.items():
        walls, processor = zip(*times)
        total, of_worker = (statistics.median(column) for column in zip(*memory[size, way]))
        placement = f"{min(walls):.2f} {statistics.median(walls):.2f} {max(walls):.2f}"
        print(f"{size:8}  {way:22}{placement:>28}{statistics.median(processor):13.1f}{total / 1e6:11.0f}"
              f"{of_worker / 1e6:10.0f}")


def _measure(devices, server, seconds, memory):
    """Start a group and stop it; append (seconds until it is ready, CPU seconds until then) and (bytes of all
    processes, bytes per worker)."""
    processor, started_s = ProcessorTime(), time.perf_counter()
    group = WorkerGroup(devices, supervisor=server)
    try:
        seconds.append((time.perf_counter() - started_s, processor.so_far_s()))
        workers = {int(done.numbers["pid"]) for done in group.request(ReportMemory).values()}
        sizes = {}
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                sizes[process.pid] = process.memory_full_info().pss
        memory.append((sum(sizes.values()), statistics.median(sizes[pid] for pid in workers)))
    finally:
        group.close()


@contextmanager
def _server():
    server = Forkserver()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def _forking(wanted):
    """Context with forking enabled or disabled by its environment variable."""
    before = os.environ.pop(FORK, None)
    if not wanted:
        os.environ[FORK] = "0"
    try:
        yield
    finally:
        os.environ.pop(FORK, None)
        if before is not None:
            os.environ[FORK] = before
