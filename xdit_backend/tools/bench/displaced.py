"""Time displaced patches (DistriFusion) of a U-Net on several workers, and count communication and cached bytes.

A random U-Net of SD 1.5's structure is written to a file and run by real worker groups, in rounds that interleave one
worker, independent workers (an upper bound on this machine), synchronous calls, and stale calls.
"""

import dataclasses
import functools
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from safetensors.torch import save_file

from ...checkpoints.checkpoint import open_checkpoint
from ...checkpoints.model_dims import exchanged_bytes
from ...config import ParallelConfig
from ...demo_model.export import unet_tensors
from ...host.calls import Call, ForwardPass
from ...host.client import Client
from ...protocol.errors import ConfigError
from ...protocol.specs import ForwardOptions, Layout
from .worker_groups import count_cuda, start_clients

TEXT_WIDTH = 768


def add_arguments(parser):
    parser.add_argument("--workers", type=int, default=2, help="workers that split an image")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 96], help="rows and columns of the latent")
    parser.add_argument("--width", type=int, default=64,
                        help="channels at full size, a multiple of 32 (SD 1.5 has 320)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="auto: CUDA if available")
    parser.add_argument("--threads", type=int, default=1, help="threads of a CPU worker")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and results")
    parser.add_argument("--forecast", dest="extrapolation", type=float, nargs="+",
                        default=(ParallelConfig.forecast_keys_values,),
                        help="forecast_keys_values of stale calls to try, interleaved")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each of which runs everything once")
    parser.add_argument("--calls", type=int, default=3, help="consecutive calls in a round, as the steps of a run")


def main(options):
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(1)
    num_cuda = count_cuda(options.device)
    if options.width % 32 or options.workers < 2:
        raise ConfigError(f"Use a multiple of 32 for --width and at least 2 for --workers: they are {options.width} "
                          f"and {options.workers}.")
    config = unet_config(options.width)
    print(f"U-Net of SD 1.5's structure, width {options.width}, {options.dtype}; "
          + (f"{num_cuda} CUDA devices" if num_cuda
             else f"CPU workers of {options.threads} thread(s), {os.cpu_count()} cores")
          + f"; torch {torch.__version__}; {options.rounds} rounds of {options.calls} calls each", flush=True)
    with tempfile.TemporaryDirectory(prefix="xdit-bench-") as folder:
        model = write_model(config, f"{folder}/unet.safetensors", getattr(torch, options.dtype))
        header = open_checkpoint(f"{folder}/unet.safetensors")
        spec = header.spec(options.dtype, options.dtype)
        clients = start_clients({1, options.workers}, num_cuda)
        apart = [clients[1], *(Client(clients[1].devices) for _ in range(options.workers - 1))]
        try:
            print(f"{'latent':>9} {'way':<12} {'s/call: min':>12} {'median':>7} {'max':>7} {'ratio':>6} "
                  f"{'of apart':>8} {'processor s/call':>16} {'sent bytes/rank':>16} {'formula':>12} "
                  f"{'cached bytes/rank':>17} {'formula':>12}")
            for size in options.sizes:
                print_size(model, spec, size, clients[options.workers], apart, options)
        finally:
            for client in {*clients.values(), *apart}:
                client.close()
    print("ratio: speedup over one worker, by medians. apart: the same number of independent workers, each with its "
          "own calls: the upper\nbound on this machine. of apart: fraction of that bound. processor: CPU seconds of "
          "all workers together, median.")


def print_size(model, spec, size, together, apart, options):
    """Time every way of computing with latents of this size. together: the Client of all workers. apart: one Client per
    worker."""
    ways = find_ways(spec, size, together, apart, options)
    measured = measure(ways, options)
    cached = together.report_memory()[0]["exchange_bytes"]
    together.end_run("bench")
    sent = exchanged_bytes(model, (size, size), options.workers, getattr(torch, options.dtype))
    # buckets of all ways
    in_all = sent * options.workers * sum(2 if extrapolation else 1 for extrapolation in options.extrapolation)
    median = {way: statistics.median(each.seconds) for way, each in measured.items()}
    ratio = {way: (options.workers if way == "apart" else 1) * median["one"] / median[way] for way in ways}
    for way, each in measured.items():
        row = (f"{size:>4} x{size:>3} {way:<12} {min(each.seconds):>12.3f} {median[way]:>7.3f} "
               f"{max(each.seconds):>7.3f} {ratio[way]:>5.2f}x {ratio[way] / ratio['apart']:>8.1%} "
               f"{statistics.median(each.processor_s):>16.3f}")
        if way not in ("one", "apart"):
            row += f" {int(each.sent_bytes):>16} {sent * (options.workers - 1):>12} {int(cached):>17} {in_all:>12}"
        print(row, flush=True)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of computing, and the clients whose workers take part."""

    clients: list[Client]
    run: Callable[[], None]


def find_ways(spec, size, together, apart, options):
    """{name: Way}, with the model loaded and the cache for stale calls filled."""
    generator = torch.Generator().manual_seed(0)
    call = Call(torch.randn(1, 4, size, size, generator=generator), torch.tensor([500.0]),
                {"context": torch.randn(1, 77, TEXT_WIDTH, generator=generator)})
    layout = Layout(displaced_degree=options.workers)

    times = itertools.count()                                  # extrapolation needs a noise level that changes
    # each way has its own cache
    own = {extrapolation: {"context": call.conditioning["context"] + extrapolation}
           for extrapolation in options.extrapolation}

    def displaced(stale, extrapolation):
        for _ in range(options.calls):
            requested = dataclasses.replace(call, timestep=call.timestep - next(times) % 100,
                                            conditioning=own[extrapolation],
                                            options=ForwardOptions(extrapolation=extrapolation))
            forward = ForwardPass(keep=True, stale=stale)
            together.wait([together.submit(spec, layout, 4, [requested], forward, run="bench")])

    def alone(client):
        for _ in range(options.calls):
            client.predict(spec, Layout(), 4, [call])

    def all_apart():
        with ThreadPoolExecutor(len(apart)) as pool:
            for future in [pool.submit(alone, client) for client in apart]:
                future.result()

    ways = {"one": Way(apart[:1], lambda: alone(apart[0])), "apart": Way(apart, all_apart),
            "synchronous": Way([together], functools.partial(displaced, False, options.extrapolation[0]))}
    for extrapolation in options.extrapolation:
        displaced(False, extrapolation)
        name = f"stale f={extrapolation:g}" if len(options.extrapolation) > 1 else "stale"
        ways[name] = Way([together], functools.partial(displaced, True, extrapolation))
    return ways


@dataclasses.dataclass
class Measured:
    """Measurements of each round of a way: seconds, CPU seconds of all of its workers, bytes sent by a rank."""

    seconds: list
    processor_s: list
    sent_bytes: float = 0.0


def measure(ways, options):
    """{way: Measured}."""
    measured = {way: Measured([], []) for way in ways}
    for round_ in range(options.rounds + 1):                   # the first one is a warm-up
        for name, way in ways.items():
            cpu_s, sent_bytes = totals(way.clients)
            started_s = time.perf_counter()
            way.run()
            elapsed_s = time.perf_counter() - started_s
            after_cpu_s, after_bytes = totals(way.clients)
            if round_:
                measured[name].seconds.append(elapsed_s / options.calls)
                measured[name].processor_s.append((after_cpu_s - cpu_s) / options.calls)
            measured[name].sent_bytes = (after_bytes - sent_bytes) / options.calls
        print(f"round {round_} of {options.rounds}", end="\r", file=sys.stderr, flush=True)
    return measured


def totals(clients):
    """(CPU seconds of these clients' workers, bytes sent by each rank of the first)."""
    seconds = sum(numbers["cpu_s"] for client in clients for numbers in client.report_memory().values())
    return seconds, clients[0].totals()[0].get("sent_bytes", 0)


def unet_config(width):
    return {"sample_size": 64, "in_channels": 4, "out_channels": 4,
            "block_out_channels": (width, 2 * width, 4 * width, 4 * width),
            "layers_per_block": 2, "cross_attention_dim": TEXT_WIDTH, "attention_head_dim": 8}


def write_model(config, path, dtype):
    """Write a random U-Net in the publisher's format; returns diffusers' model."""
    from diffusers import UNet2DConditionModel
    torch.manual_seed(0)
    model = UNet2DConditionModel(**config).eval().requires_grad_(False)
    save_file(unet_tensors(model.state_dict(), config["layers_per_block"], dtype), path)
    return model
