"""Time of collectives between this machine's devices, by each backend of torch.distributed that they can use.

Every backend has a process per device of its own, so that a broken link ends these and not the report.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ... import system
from ...host.supervisor import ROOT
from ...protocol.devices import can_use_nccl
from ...protocol.errors import XDiTError
from .results import LinkTime, statistics_of

SIZES = (2 ** 20, 2 ** 24, 2 ** 26)        # bytes that a rank sends
ROUNDS, TIMEOUT_S = 7, 60
COLLECTIVES = ("hop", "all_to_all")


class LinkError(XDiTError):
    """Processes that time a link failed or did not finish."""


def backends_of(devices):
    """Backends of torch.distributed for these devices."""
    return [*(["nccl"] if can_use_nccl(devices) and dist.is_nccl_available() else []), "gloo"]


def measure_links(devices, backend):
    """[LinkTime] of every collective and size. Raises LinkError."""
    with tempfile.TemporaryDirectory(prefix="xdit-report-") as folder:
        job = {"devices": list(devices), "backend": backend, "store": f"{folder}/store"}
        processes = [_start(job | {"rank": rank}) for rank in range(len(devices))]
        try:
            deadline_s, outputs = time.monotonic() + TIMEOUT_S, []
            for rank, process in enumerate(processes):
                try:
                    outputs.append(process.communicate(timeout=max(0.1, deadline_s - time.monotonic())))
                except subprocess.TimeoutExpired as error:
                    raise LinkError(f"{backend} does not answer: rank {rank} ({devices[rank]}) took longer than "
                                    f"{TIMEOUT_S} s") from error
                if process.returncode:
                    lines = outputs[-1][1].strip().splitlines() or ["no message"]
                    raise LinkError(f"{backend} fails on rank {rank} ({devices[rank]}): {lines[-1]}")
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return [LinkTime(backend, collective, num_bytes, statistics_of(seconds))
            for collective, num_bytes, seconds in json.loads(outputs[0][0])]


def _start(job):
    command, variables = system.python_program(__name__, json.dumps(job))
    environment = {"GLOO_SOCKET_IFNAME": system.loopback()} | os.environ | variables | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def main(job):
    """Time the collectives as one rank; rank 0 prints [[collective, bytes, [seconds of each round]]]."""
    rank, size = job["rank"], len(job["devices"])
    device = torch.device(job["devices"][rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(job["backend"], store=dist.FileStore(job["store"], size), rank=rank, world_size=size,
                            timeout=timedelta(seconds=TIMEOUT_S))
    found = []
    for num_bytes in SIZES:
        for collective in COLLECTIVES:
            run = (_hop if collective == "hop" else _all_to_all)(rank, size, num_bytes, device)
            seconds = []
            for _ in range(ROUNDS + 1):                        # the first one warms up
                dist.barrier()
                _synchronize(device)
                started_s = time.perf_counter()
                run()
                _synchronize(device)
                seconds.append(time.perf_counter() - started_s)
            found.append([collective, num_bytes, seconds[1:]])
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def _synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _hop(rank, size, num_bytes, device):
    """A step of a ring: send to the next rank, receive from the one before."""
    sent, received = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))

    def run():
        operations = [dist.P2POp(dist.isend, sent, (rank + 1) % size), dist.P2POp(dist.irecv, received,
                                                                              (rank - 1) % size)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return run


def _all_to_all(rank, size, num_bytes, device):
    """An exchange in which each rank sends num_bytes in all, in equal parts to the others."""
    part = num_bytes // max(1, size - 1)
    sent, received = (torch.zeros(size, part, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: dist.all_to_all_single(received, sent)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
