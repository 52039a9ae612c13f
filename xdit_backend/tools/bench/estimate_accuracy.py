"""Time layouts on this machine's devices and compare with their estimates: the errors, and whether the fastest was
estimated as the fastest.

A random Flux-shaped transformer of several sizes runs full runs under each layout, and a random autoencoder decodes.
Each round probes the devices with their workers, as before a first long run, and then runs every layout once, so that
other load for minutes affects both; times and estimates are medians over rounds.
"""

import dataclasses
import os
import statistics
import sys
import tempfile
import time

import torch

from ...checkpoints.checkpoint import open_checkpoint
from ...checkpoints.model_dims import dims_of
from ...host import machine_profiles
from ...host.autoencoders import Autoencoder
from ...parallel.vae_memory import work_of
from ...partition import cut_patches
from ...planner.cost_model import Degrees, Job
from ...planner.descriptions import layout_description
from ...planner.layout_search import choose, estimate
from ...planner.vae_cost import Work, choose_ranks, work_seconds
from ...protocol.errors import ConfigError
from ...protocol.specs import Layout, Stages
from .cost_model_accuracy import percentile
from .pipefusion import run
from .published_runs import NEAR
from .sampler import Method
from .synthetic_model import Setting, calls, write_model
from .vae import meta_vae, random_decoder
from .worker_groups import count_cuda, start_clients

LAYOUTS = [Degrees(data=2), Degrees(cfg=2), Degrees(ulysses=2), Degrees(ring=2),
           *(Degrees(pipefusion=2, num_patches=patches) for patches in (2, 4, 8))]


def add_arguments(parser):
    parser.add_argument("--tokens", type=int, nargs="+", default=(576, 1024, 2304),
                        help="image tokens of each size, square numbers")
    parser.add_argument("--pixels", type=int, nargs="+", default=(128, 192, 256),
                        help="sizes of decoded images in pixels, multiples of 16")
    parser.add_argument("--width", type=int, default=768, help="hidden width, a multiple of 64")
    parser.add_argument("--blocks", type=int, nargs=2, default=(2, 4), metavar=("DOUBLE", "SINGLE"),
                        help="numbers of double-stream and single-stream blocks")
    parser.add_argument("--text-tokens", type=int, default=64, help="text tokens of the model")
    parser.add_argument("--steps", type=int, default=10, help="steps of a run; PipeFusion has one warm-up step")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each of which runs everything once")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="auto: CUDA if available")


def main(options):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if any(size % 16 for size in options.pixels):
        raise ConfigError(f"Use multiples of 16 for --pixels: they are {' '.join(map(str, options.pixels))}.")
    settings = [Setting(options.width, *options.blocks, tokens, options.text_tokens, "float32")
                for tokens in options.tokens]
    for setting in settings:
        assert setting.rows
    clients = start_clients([1, 2], count_cuda(options.device))
    with tempfile.TemporaryDirectory(prefix="xdit-bench-") as folder:
        try:
            write_model(settings[0], folder)
            print(f"{clients[2].devices[0]} x 2, {os.cpu_count()} cores; width {options.width}, {sum(options.blocks)} "
                  f"blocks, float32; runs of {options.steps} steps; medians of {options.rounds} rounds", flush=True)
            errors = [error for setting in settings for error in print_size(setting, folder, clients, options)]
            errors += print_decodes(clients, options)
        finally:
            for client in clients.values():
                client.close()
    print(f"all: median error {percentile(errors, 0.5)}, 90th percentile {percentile(errors, 0.9)}")


def print_size(setting, folder, clients, options):
    """Print the table of one size; returns the errors of its estimates."""
    header = open_checkpoint(folder)
    dims = dims_of(header.family, header.meta_model(), header.weight_table(header.spec("float32", "float32")))
    seconds, machines = measure(setting, header, clients, options)
    errors = []
    print(f"\n{setting.num_image_tokens} tokens{'':<18} {'measured':>9} {'estimate':>9} {'error':>7}  limited by")
    for branches in (1, 2):
        job = Job(setting.num_image_tokens, setting.num_text_tokens, options.steps, branches)
        measured = {degrees: statistics.median(times) for (degrees, of), times in seconds.items() if of == branches}
        made = {degrees: sorted((estimate(dims, job, degrees, machine) for machine in machines),
                                key=lambda one: one.seconds)[options.rounds // 2] for degrees in measured}
        errors += print_branches(branches, measured, made)
    return errors


def measure(setting, header, clients, options):
    """({(degrees, branches): seconds of each round}, Machine of each round)."""
    both = calls(setting, 2)
    patches = {degrees.num_patches: cut_patches(both[0].latent.shape, (2, 2), degrees.num_patches)
               for degrees in LAYOUTS if
               degrees.pipefusion > 1}

    def timed(degrees, branches):
        layout = Layout(**{f"{axis}_degree": getattr(degrees, axis)
                           for axis in ("cfg", "ulysses", "ring", "pipefusion")})
        started_s = time.perf_counter()
        if degrees.pipefusion > 1:
            spec = header.spec("float32", "float32", Stages(2))
            run(clients[2], spec, both[0], options.steps, Method(layout, 1, patches[degrees.num_patches]))
            clients[2].end_run()
        else:
            client = clients[1 if degrees.data > 1 else 2]
            spec = header.spec("float32", "float32")
            for step in range(options.steps):
                client.predict(spec, layout, 16,
                               [dataclasses.replace(call, timestep=torch.tensor([1 - step / options.steps]))
                                for call in both[:branches]])
        return time.perf_counter() - started_s

    ways = [(degrees, branches) for degrees in LAYOUTS for branches in ((1, 2) if degrees.data > 1 else (degrees.cfg,))]
    seconds, machines = {way: [] for way in ways}, []
    for round_ in range(options.rounds + 1):                   # the first one loads the model and warms up
        if round_:
            machines.append(machine_profiles.measure(clients[2], "float32"))
        for way in ways:
            elapsed_s = timed(*way)
            if round_:
                seconds[way].append(elapsed_s)
        print(f"{setting.num_image_tokens} tokens: round {round_} of {options.rounds}", end="\r", file=sys.stderr,
              flush=True)
    return seconds, machines


def print_branches(branches, measured, made):
    """Print a line per layout and one for the choice; returns the errors. measured: {degrees: seconds}. made: {degrees:
    Estimate}."""
    errors = []
    for degrees, one in made.items():
        errors.append(abs(one.seconds / measured[degrees] - 1))
        name = layout_description(one) + (", two branches" if branches == 2 and degrees.cfg == 1 else "")
        print(f"  {name:<28} {measured[degrees]:>7.2f} s {one.seconds:>7.2f} s {errors[-1]:>7.1%}  "
              f"{one.limited_by}")
    chosen, best = choose(sorted(made.values(), key=lambda one: one.seconds)), min(
        measured, key=lambda degrees: measured[degrees])
    loss = measured[chosen.degrees] / measured[best]
    print(f"  {branches} branch{'es' if branches > 1 else ''}: it would use {layout_description(chosen)}, "
          + ("the fastest" if loss == 1 else f"{loss - 1:.1%} behind the fastest"
             + ("" if loss <= NEAR else ", more than 5 %")))
    return errors


def print_decodes(clients, options):
    tensors, errors = random_decoder(64), []
    decoder, vae = meta_vae(tensors, "float32"), Autoencoder("bench", "float32", lambda: tensors)
    print(f"\n{'decode':<30} {'measured':>9} {'estimate':>9} {'error':>7}")
    for size in options.pixels:
        latent = torch.randn(1, 4, size // 8, size // 8, generator=torch.Generator().manual_seed(0))
        work, times, machines = Work(**work_of(decoder, latent.shape)), {count: [] for count in (1, 2)}, []
        for round_ in range(options.rounds + 1):
            if round_:
                machines.append(machine_profiles.measure(clients[2], "float32"))
            for count in times:
                started_s = time.perf_counter()
                clients[2].autoencoders.decode(vae, latent, (1, size, size, 3), num_ranks=count)
                times[count].append(time.perf_counter() - started_s)
        for count, measured in times.items():
            estimated_s = statistics.median(work_seconds(work, machine, count) for machine in machines)
            measured_s = statistics.median(measured[1:])
            errors.append(abs(estimated_s / measured_s - 1))
            print(f"  {f'{size} px, ' + ('one device' if count == 1 else f'VAE {count}'):<28} {measured_s:>7.2f} s "
                  f"{estimated_s:>7.2f} s {errors[-1]:>7.1%}")
        medians = {count: statistics.median(measured[1:]) for count, measured in times.items()}
        chosen = next(iter(choose_ranks(work, machines[0], 2)))[0]
        print(f"  {size} px: it would use {'one device' if chosen == 1 else f'VAE {chosen}'}, "
              f"{medians[chosen] / min(medians.values()) - 1:.1%} behind the fastest")
    return errors
