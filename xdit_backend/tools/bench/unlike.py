"""Time two CPU workers of which one is slower: shared out equally, by measured speed, and the fast one alone.

The slower one is pinned to a core that it shares with busy processes, and the probe finds how fast each is. A random
Flux-shaped transformer runs whole steps by Ulysses and Ring, images of a batch by data parallelism and a PipeFusion
run; a random autoencoder of Stable Diffusion's structure decodes. Each round runs every way once; figures are medians
over rounds.
"""

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from ...checkpoints.checkpoint import open_checkpoint
from ...host import machine_profiles
from ...host.autoencoders import Autoencoder
from ...host.client import Client
from ...partition import cut_patches
from ...planner.layout_search import speeds_of
from ...protocol.errors import ConfigError
from ...protocol.specs import Layout, Stages
from .pipefusion import run
from .sampler import Method
from .synthetic_model import Setting, calls, write_model
from .vae import random_decoder

IMAGES, PATCHES = 4, 4


def add_arguments(parser):
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1), metavar=("FAST", "SLOW"),
                        help="that the two workers are pinned to")
    parser.add_argument("--busy", type=int, default=1, help="processes that the slower one shares its core with")
    parser.add_argument("--tokens", type=int, default=1024, help="image tokens, a square number")
    parser.add_argument("--width", type=int, default=512, help="hidden width, a multiple of 64")
    parser.add_argument("--blocks", type=int, nargs=2, default=(4, 8), metavar=("DOUBLE", "SINGLE"),
                        help="blocks of two streams and of one")
    parser.add_argument("--steps", type=int, default=8, help="of the PipeFusion run, one of them warm-up")
    parser.add_argument("--pixels", type=int, default=256, help="a side of the decoded picture, a multiple of 8")
    parser.add_argument("--rounds", type=int, default=5, help="in each of which everything runs once")


def main(options):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    there = os.sched_getaffinity(0)
    if not set(options.cores) <= there or len(set(options.cores)) < 2:
        raise ConfigError(f"--cores {' '.join(map(str, options.cores))}: two different cores are needed, and this "
                          f"process may use {', '.join(map(str, sorted(there)))}.")
    setting = Setting(options.width, *options.blocks, options.tokens, 64, "float32")
    one, two, busy = Client(("cpu",)), Client(("cpu", "cpu")), []
    with tempfile.TemporaryDirectory(prefix="xdit-bench-") as folder:
        write_model(setting, folder)
        try:
            pin(one, options.cores[:1])
            pin(two, options.cores)
            for _ in range(options.busy):
                busy.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
                os.sched_setaffinity(busy[-1].pid, {options.cores[1]})
            speeds = speeds_of(machine_profiles.measure(two, "float32").devices)
            print(f"two CPU workers, the second beside {options.busy} busy process(es) on its core: measured speeds "
                  f"{' : '.join(map(str, speeds)) or 'identical'}; {options.tokens} tokens, width {options.width}, "
                  f"{sum(options.blocks)} blocks; medians of {options.rounds} rounds", flush=True)
            print_table(measure(one, two, speeds, setting, folder, options), speeds)
        finally:
            for process in busy:
                process.kill()
                process.wait()
            one.close()
            two.close()


def pin(client, cores):
    """Every thread of each worker to its core."""
    for rank, numbers in client.report_memory().items():
        for thread in os.listdir(f"/proc/{int(numbers['pid'])}/task"):
            os.sched_setaffinity(int(thread), {cores[rank]})


def measure(one, two, speeds, setting, folder, options):
    """{what: {"alone", "equal" or "by speed": seconds}}"""
    header = open_checkpoint(folder)
    call, = calls(setting, 1)
    batch = dataclasses.replace(call, latent=call.latent.repeat(IMAGES, 1, 1, 1), timestep=call.timestep.repeat(IMAGES))
    spec = header.spec("float32", "float32")
    patches = cut_patches(call.latent.shape, (2, 2), PATCHES)
    tensors = random_decoder(64)
    latent = torch.randn(1, 4, options.pixels // 8, options.pixels // 8, generator=torch.Generator().manual_seed(0))

    def predict(client, layout, call):
        client.predict(spec, layout, 16, [call])

    def in_stages(client, given):
        run(client, header.spec("float32", "float32", Stages(2, speeds=given)), call, options.steps,
            Method(Layout(pipefusion_degree=2), 1, patches))
        client.end_run()

    def decode(client):
        vae = Autoencoder("bench", "float32", lambda: tensors)
        client.autoencoders.decode(vae, latent, (1, options.pixels, options.pixels, 3))

    jobs = {
        "Ulysses 2": (lambda: predict(one, Layout(), call), lambda _: predict(two, Layout(ulysses_degree=2), call)),
        "Ring 2": (lambda: predict(one, Layout(), call), lambda _: predict(two, Layout(ring_degree=2), call)),
        f"data 2, {IMAGES} images": (lambda: predict(one, Layout(), batch),
                                     lambda _: predict(two, Layout(data_degree=2), batch)),
        f"PipeFusion 2, {PATCHES} patches": (lambda: run(one, spec, call, options.steps, Method(Layout())),
                                             lambda given: in_stages(two, given)),
        f"decode {options.pixels} px": (lambda: decode(one), lambda _: decode(two))}
    seconds: dict[str, dict[str, list]] = {name: {"alone": [], "equal": [], "by speed": []} for name in jobs}
    for round_ in range(options.rounds + 1):                   # the first one loads and warms up
        for name, (alone, together) in jobs.items():
            for way, given in (("alone", ()), ("equal", ()), ("by speed", speeds)):
                two.workers.divide_by(given)
                started_s = time.perf_counter()
                alone() if way == "alone" else together(given)
                seconds[name][way].append(time.perf_counter() - started_s)
        print(f"round {round_} of {options.rounds}", end="\r", file=sys.stderr, flush=True)
    return {name: {way: statistics.median(times[1:]) for way, times in ways.items()} for name, ways in seconds.items()}


def print_table(seconds, speeds):
    print(f"{'':<26} {'fast one alone':>15} {'equal':>8} {'by speed':>9} {'to equal':>9} {'to the fast one':>16}")
    for name, ways in seconds.items():
        print(f"{name:<26} {ways['alone']:>13.3f} s {ways['equal']:>6.3f} s {ways['by speed']:>7.3f} s "
              f"{ways['equal'] / ways['by speed']:>8.2f}x {ways['alone'] / ways['by speed']:>15.2f}x")
    if speeds:
        print(f"Two that add up without loss would be {sum(speeds) / max(speeds):.2f} times as fast as the fast one; "
              f"by equal halves {2 * min(speeds) / max(speeds):.2f} times.")
