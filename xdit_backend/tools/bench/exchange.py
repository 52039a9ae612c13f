"""Time exchanges between ranks of this machine over shared memory, gloo and NCCL.

Each rank sends so many bytes to each other rank and receives as many (all-to-all, as Ulysses), or sends them to the
next one (hop, as Ring). The transports alternate in rounds of ten exchanges. Times are those of rank 0. On GPUs, NCCL
is timed if each rank has its own, and copies between a GPU and page-locked memory are shown for comparison.
"""

import datetime
import functools
import multiprocessing
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist

from ... import system
from ...distributed.collectives import RingExchange, Traffic, on_wire
from ...distributed.mesh import make_group
from ...distributed.shared_memory.process_group import BACKEND, register
from ...host.torchrun import CPU_ALLOCATOR
from ...protocol.devices import can_use_nccl
from ...protocol.errors import ConfigError
from .worker_groups import count_cuda, devices_of

REPEATS = 10                               # exchanges of a round
TIMEOUT = datetime.timedelta(seconds=600)


def add_arguments(parser):
    parser.add_argument("--megabytes", type=float, nargs="+", default=(1.0, 16.0, 64.0), help="sizes of a message")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of ten exchanges, of each size and transport")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="auto: CUDA if available; ranks share a GPU if there are too few")


def main(options):
    if not system.has_exchange_segments():
        raise ConfigError("Use Linux: the exchange through shared memory is not implemented on this system.")
    devices = devices_of(options.ranks, count_cuda(options.device))
    context = multiprocessing.get_context("spawn")
    if "cpu" in devices:
        os.environ |= CPU_ALLOCATOR                            # as workers: else a new tensor's pages are touched first
    with tempfile.TemporaryDirectory(prefix="xdit-exchange-") as folder:
        ranks = [context.Process(target=run, args=(rank, devices, folder, options)) for rank in range(options.ranks)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    if any(rank.exitcode for rank in ranks):
        raise ConfigError(f"See the output above: ranks ended with exit codes {[rank.exitcode for rank in ranks]}.")


def run(rank, devices, folder, options):
    """One rank's process."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device, every = torch.device(devices[rank]), range(len(devices))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    register(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(devices),
                            timeout=TIMEOUT)
    transports = {"gloo": dist.group.WORLD, BACKEND: make_group([every], backend=BACKEND)}
    if can_use_nccl(devices) and dist.is_nccl_available():
        transports["nccl"] = make_group([every], backend="nccl")
    if rank == 0:
        print(f"{len(devices)} ranks on {', '.join(dict.fromkeys(devices))}; ms of an exchange, minimum and median of "
              f"{REPEATS * options.rounds}, CPU ms (median); GB/s of the minimum; rate against gloo, of both")
    for megabytes in options.megabytes:
        num_bytes = int(megabytes * 2 ** 20)
        if device.type == "cuda":
            print_copies(rank, device, num_bytes)
        for kind, exchange in (("all-to-all", to_all), ("hop", hop)):
            measured = measure(rank, device, num_bytes, exchange, transports, options.rounds)
            if rank == 0:
                print_rows(f"{megabytes:g} MB {kind}", num_bytes, measured)
    dist.barrier()
    dist.destroy_process_group()


def to_all(sent, received, group):
    """all-to-all of rows by rank, without this rank's own; returns {rank: row received}."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [0 if other == rank else len(row) for other, row in enumerate(sent)]
    send = on_wire(sent[:size - 1].view(-1), group)
    arriving = received[:size - 1].view(-1) if send.device == received.device else torch.empty_like(send)
    dist.all_to_all_single(arriving, send, sizes, sizes, group=group)
    if arriving.device != received.device:
        received[:size - 1].view(-1).copy_(arriving)
    return dict(zip((other for other in range(size) if other != rank), received))


def hop(sent, received, group):
    """Send a row to the next rank. Receives into new memory, as in a model."""
    return {(dist.get_rank() - 1) % dist.get_world_size():
            RingExchange(sent[0], sent[0].shape, group, Traffic()).wait()}


def measure(rank, device, num_bytes, exchange, transports, rounds):
    """{transport: ([seconds], [CPU seconds])} of this rank's exchanges.

    Exchanges of a round follow one another, so that each begins when the one before is done on all ranks.
    """
    sent = torch.full((dist.get_world_size(), num_bytes), rank, dtype=torch.uint8, device=device)
    received, times = torch.empty_like(sent), {name: ([], []) for name in transports}
    for round_ in range(rounds + 1):                           # the first one warms up
        for name, group in transports.items():
            received.fill_(255)
            synchronize(device)
            dist.barrier()
            for _ in range(REPEATS):
                started_s, cpu_s = time.perf_counter(), time.process_time()
                arrived = exchange(sent, received, group)
                synchronize(device)
                if round_:
                    times[name][0].append(time.perf_counter() - started_s)
                    times[name][1].append(time.process_time() - cpu_s)
            assert all(bool((row == sender).all()) for sender, row in arrived.items())
            del arrived
    return times


def print_rows(label, num_bytes, measured):
    gloo_s = measured["gloo"][0]
    for name, (times, cpu) in measured.items():
        print(f"{label:20} {name:14} {min(times) * 1e3:9.2f} {statistics.median(times) * 1e3:9.2f} "
              f"{statistics.median(cpu) * 1e3:9.2f}   {num_bytes / min(times) / 1e9:6.2f} GB/s   "
              f"x {min(gloo_s) / min(times):.2f} {statistics.median(gloo_s) / statistics.median(times):.2f}",
              flush=True)


def print_copies(rank, device, num_bytes):
    """Print the rate of cudaMemcpyAsync to and from page-locked memory at once, on each rank at the same time."""
    there = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    here = [torch.empty(num_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def both():
        for stream, target, source in zip(streams, (here[0], there[1]), (there[0], here[1])):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        synchronize(device)
    best_s = min(map(functools.partial(seconds_of, both), range(10)))
    if rank == 0:
        print(f"{num_bytes / 2 ** 20:g} MB copied to and from page-locked memory at once: {best_s * 1e3:.2f} ms, "
              f"{num_bytes / best_s / 1e9:.2f} GB/s each way", flush=True)


def seconds_of(work, _):
    dist.barrier()
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
