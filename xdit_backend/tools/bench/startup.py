"""Time how long workers take to start, and what memory their processes hold together.

Of each number of workers: the first group of a host, which waits for the libraries; the next one; and one whose workers
are programs of their own, as before forking and where it is not safe. All in turns. Memory is the proportional set
size: a page that several processes have is shared out among them.
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
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4], help="how many a group has")
    parser.add_argument("--rounds", type=int, default=3, help="of which least, median and most are printed")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="auto: CUDA where there is a device")


def main(options):
    num_cuda = count_cuda(options.device)
    seconds, held = {}, {}
    for _ in range(options.rounds):
        for size in options.workers:
            devices = devices_of(size, num_cuda)
            with _forking(True), _server() as server:
                for way in WAYS[:2]:
                    _measure(devices, server, seconds.setdefault((size, way), []), held.setdefault((size, way), []))
            with _forking(False), _server() as server:
                _measure(devices, server, seconds.setdefault((size, WAYS[2]), []), held.setdefault((size, WAYS[2]), []))
    print(f"{'workers':>8}  {'way':22}{'seconds until ready':>28}{'processor s':>13}{'memory MB':>11}{'a worker':>10}")
    for (size, way), times in seconds.items():
        walls, processor = zip(*times)
        total, of_worker = (statistics.median(column) for column in zip(*held[size, way]))
        placement = f"{min(walls):.2f} {statistics.median(walls):.2f} {max(walls):.2f}"
        print(f"{size:8}  {way:22}{placement:>28}{statistics.median(processor):13.1f}{total / 1e6:11.0f}"
              f"{of_worker / 1e6:10.0f}")


def _measure(devices, server, seconds, held):
    """Start a group and end it; adds (seconds until it is ready, processor seconds until then) and (bytes of all,
    of a worker)."""
    processor, started_s = ProcessorTime(), time.perf_counter()
    group = WorkerGroup(devices, supervisor=server)
    try:
        seconds.append((time.perf_counter() - started_s, processor.so_far_s()))
        workers = {int(done.numbers["pid"]) for done in group.request(ReportMemory).values()}
        sizes = {}
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                sizes[process.pid] = process.memory_full_info().pss
        held.append((sum(sizes.values()), statistics.median(sizes[pid] for pid in workers)))
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
    """What the environment says of forking, for this while."""
    before = os.environ.pop(FORK, None)
    if not wanted:
        os.environ[FORK] = "0"
    try:
        yield
    finally:
        os.environ.pop(FORK, None)
        if before is not None:
            os.environ[FORK] = before
