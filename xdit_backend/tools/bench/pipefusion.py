"""Time PipeFusion over full runs against one worker, and compare with its formulas. bench methods calls it for layouts
with `pipefusion`.

A run works like the patchwise sampler: Euler steps, in which each patch advances as soon as its own prediction arrives.
"""

import dataclasses
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from ...checkpoints.checkpoint import open_checkpoint
from ...checkpoints.weight_table import block_sizes
from ...config import ParallelConfig, validate, validate_layout
from ...host.client import Client
from ...partition import cut_patches, split_stages, stage_blocks, stage_of
from ...planner.planner import choose_num_patches
from ...protocol.errors import ConfigError
from ...protocol.specs import ModelSpec, Stages
from .sampler import Method, Model, Sampling, sample

BASELINE_STEPS = 4             # of one worker, before and after each pipeline run


@dataclasses.dataclass
class Row:
    """One layout with one number of patches: medians over rounds. In each round one worker's steps run before and
    after."""

    name: str
    seconds: float                 # per step, including the warm-up
    ratio: float                   # to one worker
    bubble: float                  # ratio by the formula
    apart: float                   # speedup of two independent workers over one, in the same minutes
    sent_bytes: float              # by the busiest rank, per step after the warm-up
    sent_formula: float
    weight_bytes: list             # of each rank
    weight_formula: list
    key_value_bytes: list
    key_value_formula: list


def bubble_ratio(num_steps, warmup_steps, num_stages, num_patches, warmup_is_parallel=False):
    """Upper bound of the speedup over one worker (docs/design/pipefusion.md), by slots of one patch on one
    stage."""
    stale = num_steps - warmup_steps
    slots = (stale - 1) * max(num_patches, num_stages) + num_patches + num_stages - 1 if stale else 0
    warm = warmup_steps / (num_stages if warmup_is_parallel else 1)
    return num_steps / (warm + slots / (num_stages * num_patches))


def run(client, spec, call, num_steps, method):
    """A benchmark run: `num_steps` Euler steps from sigma 1 to 0."""
    return sample(client, Model(spec, 16), call, Sampling(torch.linspace(1, 0, num_steps + 1).tolist()), method)


@dataclasses.dataclass(frozen=True)
class Job:
    """A layout with a number of patches, on its workers."""

    degrees: dict
    client: Client
    spec: ModelSpec
    method: Method


@dataclasses.dataclass
class Measured:
    """Measurements of a Job. times: of each round, (seconds per step, ratio, apart, seconds of one worker). sent_bytes:
    by the busiest rank, per step after the warm-up. memory: of each rank."""

    times: list = dataclasses.field(default_factory=list)
    sent_bytes: float = 0.0
    memory: list = dataclasses.field(default_factory=list)


def measure(setting, folder, layouts, clients, call, options):
    """{name: Row} for layouts {name: degrees} with stages. clients: {number of devices: Client}, and a second client of
    one device under "second"."""
    header = open_checkpoint(folder)
    one_spec, one_method = header.spec(setting.dtype, setting.dtype), Method(ParallelConfig(mode="manual").layout)
    jobs = find_jobs(setting, header, layouts, clients, call, options)
    found = {key: Measured() for key in jobs}

    def synchronous_steps(client):
        """Seconds per step of one worker, alone or in parallel with the other."""
        started_s = time.perf_counter()
        run(client, one_spec, call, BASELINE_STEPS, one_method)
        return (time.perf_counter() - started_s) / BASELINE_STEPS

    def both_at_once():
        with ThreadPoolExecutor(2) as pool:
            return statistics.mean(pool.map(synchronous_steps, (clients[1], clients["second"])))

    for client in (clients[1], clients["second"]):
        run(client, one_spec, call, 1, one_method)             # loads the model
    for round_ in range(options.rounds + 1):                   # the first one is a warm-up
        steps = options.steps if round_ else options.warmup_steps + 1
        for key, job in jobs.items():
            warmup_sent = warm_up(job, call)
            before = _sent(job.client)
            one_before_s = synchronous_steps(clients[1])
            started_s = time.perf_counter()
            run(job.client, job.spec, call, steps, job.method)
            elapsed_s = time.perf_counter() - started_s
            one_s = (one_before_s + synchronous_steps(clients[1])) / 2
            found[key].times.append((elapsed_s / steps, one_s * steps / elapsed_s, 2 * one_s / both_at_once(), one_s))
            sent = max(now - then - warm for now, then, warm in zip(_sent(job.client), before, warmup_sent))
            memory = job.client.report_memory()
            job.client.end_run()
            found[key].sent_bytes = sent / max(1, steps - options.warmup_steps)
            found[key].memory = [memory[rank] for rank in sorted(memory)]
            print(f"\r{key}: round {round_} of {options.rounds}", end="", file=sys.stderr, flush=True)
    rows = {key: row_of(key, job, found[key], setting, header, options.steps) for key, job in jobs.items()}
    return statistics.median(row[3] for measured in found.values() for row in measured.times[1:]), rows


def find_jobs(setting, header, layouts, clients, call, options):
    """{name: Job}, with all numbers of patches and extrapolations interleaved for each layout, so that other load
    affects them equally."""
    jobs = {}
    for name, degrees in layouts.items():
        if degrees["tensor"] > 1:
            raise ConfigError(f'Use tensor{degrees["tensor"]} by itself: in layout "{name}" it is combined with '
                              f'stages, which are timed without tensor parallelism.')
        config = ParallelConfig(mode="manual", **{f"{axis}_degree": degree for axis, degree in degrees.items()})
        size = degrees["pipefusion"] * degrees["ring"] * degrees["ulysses"]
        validate(config, size)
        validate_layout(config.layout, header.family.num_heads(header.config), "this model")
        stages = Stages(degrees["pipefusion"], degrees["ring"] * degrees["ulysses"],
                        every_block=options.warmup == "sequence")
        spec = header.spec(setting.dtype, setting.dtype, stages)
        for requested in options.patches:
            num_patches = choose_num_patches(requested, degrees["pipefusion"], call.latent.shape, (2, 2),
                                             stages.sequence_degree)
            patches = cut_patches(call.latent.shape, (2, 2), num_patches)
            for extrapolation in options.extrapolation:
                key = f"{name} M={num_patches}" + (f",f={extrapolation:g}" if len(options.extrapolation) > 1 else "")
                method = Method(config.layout, options.warmup_steps, patches, extrapolation)
                jobs[key] = Job(degrees, clients[size], spec, method)
    return jobs


def warm_up(job, call):
    """Load a job's model and run only its warm-up; returns the bytes that each rank sends in it."""
    layout, warmup_steps = job.method.layout, job.method.warmup_steps
    run(job.client, job.spec, call, 1, Method(layout, 1, []))
    before = _sent(job.client)
    run(job.client, job.spec, call, warmup_steps, Method(layout, warmup_steps, []))
    return [now - then for now, then in zip(_sent(job.client), before)]


def row_of(name, job, measured, setting, header, num_steps):
    """The Row of a Job, with the formulas' values."""
    degrees, method = job.degrees, job.method
    weights, keys_values = ([rank[of] for rank in measured.memory] for of in ("weight_bytes", "key_value_bytes"))
    seconds, ratio, apart, _ = (statistics.median(column) for column in zip(*measured.times[1:]))
    bubble = bubble_ratio(num_steps, method.warmup_steps, degrees["pipefusion"], len(method.patches),
                          job.spec.stages.every_block)
    weight_formula, cached_formula = memory_formulas(header, job.spec, len(weights), setting, degrees)
    return Row(name, seconds, ratio, bubble * degrees["ring"] * degrees["ulysses"], apart, measured.sent_bytes,
               sent_formula(degrees, setting), weights, weight_formula, keys_values,
               [num_bytes * (2 if method.extrapolation else 1) for num_bytes in cached_formula])


def sent_formula(degrees, setting):
    """Bytes that the busiest rank sends per step: hidden states of the image and, once, of the text, B (S + S_t) h / D
    elements.

    With sequence parallelism also its communication, as in synchronous steps (docs/design/pipefusion.md).
    """
    tokens = setting.num_image_tokens + setting.num_text_tokens
    num_blocks = (setting.num_double_blocks + setting.num_single_blocks) / degrees["pipefusion"]
    stage = tokens * setting.width / (degrees["ring"] * degrees["ulysses"])
    return (stage + num_blocks * setting.exchanged(degrees)) * getattr(torch, setting.dtype).itemsize


def memory_formulas(header, spec, num_ranks, setting, degrees):
    """([bytes of parameters], [bytes of stale keys and values]) of each rank.

    Parameters: its stage's blocks, and everything outside the blocks. Keys and values: 2 B (S + S_t) h / U for each of
    its blocks (docs/design/pipefusion.md); twice that if they are extrapolated.
    """
    import diffusers  # slow to import, and --help needs neither
    from accelerate import init_empty_weights
    with init_empty_weights():
        model = getattr(diffusers, header.family.transformer).from_config(header.config)
    sizes = block_sizes(model, header.family)
    counts = split_stages([size * share for size, share in sizes], spec.stages.pipefusion_degree)
    own = [stage_blocks(counts, stage_of(rank, spec.stages)) for rank in range(num_ranks)]
    outside = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())) - sum(size for size, _ in sizes)
    item = getattr(torch, setting.dtype).itemsize
    loaded = [range(len(sizes)) if spec.stages.every_block else blocks for blocks in own]
    tokens = setting.num_image_tokens + setting.num_text_tokens
    return ([item * (outside + sum(sizes[block][0] for block in blocks)) for blocks in loaded],
            [item * 2 * tokens * setting.width / degrees["ulysses"] * len(blocks) for blocks in own])


def _sent(client):
    totals = client.totals()
    return [totals[rank].get("sent_bytes", 0) for rank in sorted(totals)]


def print_table(one_s, rows, options):
    print(f"\nPipeFusion, runs of {options.steps} steps, {options.warmup_steps} of them warm-up ({options.warmup}); "
          f"one worker: {one_s:.3f} s/step")
    print(f"{'layout':<26} {'s/step':>7} {'ratio':>6} {'bubble':>7} {'of it':>6} {'apart':>6} {'sent MB':>8} "
          f"{'formula':>8} {'weights MB a rank':>19} {'formula':>15} {'keys+values MB':>15} {'formula':>13}")

    def megabytes(values):
        return "/".join(f"{value / 1e6:.1f}" for value in values)

    for row in rows.values():
        print(f"{row.name:<26} {row.seconds:>7.3f} {row.ratio:>5.2f}x {row.bubble:>6.2f}x "
              f"{row.ratio / row.bubble:>6.1%} {row.apart:>5.2f}x {row.sent_bytes / 1e6:>8.2f} "
              f"{row.sent_formula / 1e6:>8.2f} {megabytes(row.weight_bytes):>19} {megabytes(row.weight_formula):>15} "
              f"{megabytes(row.key_value_bytes):>15} {megabytes(row.key_value_formula):>13}")
    print("ratio: to one worker's steps just before and after the run. bubble: T / (W + slots / (N M)), the bound of "
          "the schedule on N\ndevices. apart: two independent workers, in the same minutes: 2 if this machine has two "
          "full devices. sent: by the busiest\nrank, per step after the warm-up.")
