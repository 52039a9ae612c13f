"""Time runs of few steps, each begun and ended as a prompt of a queue is, beside diffusers' own context parallelism.

What a run gives back when it ends, the next one has to take again: its first step tells. The model and the peers are
those of methods.
"""

import itertools
import math
import os
import statistics
import sys
import tempfile
import time

import torch

from ...checkpoints.checkpoint import open_checkpoint
from ...config import ParallelConfig, validate, validate_layout
from .methods import add_model_arguments, describe, parse_layout, setting_of, start_peers
from .synthetic_model import HEAD_SIZE, calls, write_model
from .worker_groups import ProcessorTime, count_cuda, start_clients

LAYOUTS = "one", "ulysses2", "ring2"


def add_arguments(parser):
    parser.add_argument("layouts", nargs="*", default=list(LAYOUTS),
                        help="one, or axis and degree, as ulysses2 and ring2")
    add_model_arguments(parser)
    parser.add_argument("--steps", type=int, nargs="+", default=(1, 2, 8), help="of a run, one row each")


def main(options):
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(1)
    setting, num_cuda = setting_of(options), count_cuda(options.device)
    layouts = {name: parse_layout(name) for name in options.layouts}
    configs = {name: ParallelConfig(mode="manual", **{f"{axis}_degree": degree for axis, degree in degrees.items()})
               for name, degrees in layouts.items()}
    sizes = {name: math.prod(degrees.values()) for name, degrees in layouts.items()}
    for name, config in configs.items():
        validate(config, sizes[name])
        validate_layout(config.layout, setting.width // HEAD_SIZE, "this model")
    with tempfile.TemporaryDirectory(prefix="xdit-bench-") as folder:
        write_model(setting, folder)
        header = open_checkpoint(folder)
        spec = header.spec(setting.dtype, setting.dtype)
        print(describe(setting, options, num_cuda), flush=True)
        clients = start_clients(set(sizes.values()), num_cuda)
        names = [] if options.no_diffusers or num_cuda else [name for name in layouts if name in ("ulysses2", "ring2")]
        ways, peers = {}, {}
        try:
            peers = start_peers(folder, setting, names, options)
            for name, config in configs.items():
                ways[name] = _runs(clients[sizes[name]], spec, config.layout, calls(setting, config.cfg_degree))
                if name in peers:
                    ways[f"diffusers {name}"] = _steps_of(peers[name])
            _print(_measure(ways, options))
        finally:
            for one in (*clients.values(), *peers.values()):
                one.close()
    print("first: the first step of a run over the median of the others, of runs of 3 steps and more. processor: "
          "seconds a step of\nall processes together.")


def _runs(client, spec, layout, requested):
    """(number of steps) -> the seconds of each step of a run, whose last ones include that it ends."""
    numbers = itertools.count()

    def run(num_steps):
        name, seconds = f"bench {next(numbers)}", []
        for step in range(num_steps):
            started_s = time.perf_counter()
            client.predict(spec, layout, 16, requested, run=name)
            if step == num_steps - 1:
                client.end_run(name)
            seconds.append(time.perf_counter() - started_s)
        return seconds
    return run


def _steps_of(peer):
    return lambda num_steps: [peer.step() for _ in range(num_steps)]


def _measure(ways, options):
    """{(way, number of steps): [(seconds of each step, processor seconds of the run)]}, a round's runs in turns."""
    found = {}
    for round_ in range(options.rounds + 1):                   # the first one warms up
        for num_steps in options.steps:
            for way, run in ways.items():
                processor = ProcessorTime()
                seconds = run(num_steps)
                if round_:
                    found.setdefault((way, num_steps), []).append((seconds, processor.so_far_s()))
        print(f"round {round_} of {options.rounds}", end="\r", file=sys.stderr, flush=True)
    return found


def _print(found):
    print(f"{'way':<20} {'steps':>5} {'s/step: min':>12} {'median':>7} {'max':>7} {'first':>6} "
          f"{'processor s/step':>17}")
    for (way, num_steps), runs in found.items():
        walls = [sum(seconds) / num_steps for seconds, _ in runs]
        first = (statistics.median(seconds[0] / statistics.median(seconds[1:]) for seconds, _ in runs) if num_steps > 2
                 else None)
        processor = statistics.median(taken / num_steps for _, taken in runs)
        print(f"{way:<20} {num_steps:>5} {min(walls):>12.3f} {statistics.median(walls):>7.3f} {max(walls):>7.3f} "
              f"{'' if first is None else f'{first:.2f}':>6} {processor:>17.3f}")
