"""Times of a report: models of published shapes with random weights on one device and under every method, interleaved,
and the cost model's estimates of them."""

import dataclasses
import time
from collections.abc import Callable

import torch

from ...checkpoints.model_dims import dims_of, job_of
from ...config import ParallelConfig
from ...host.calls import ForwardPass
from ...host.client import Client
from ...partition import cut_patches
from ...planner.cost_model import Degrees
from ...planner.layout_search import estimate
from ...planner.planner import choose_num_patches, plan_run
from ..bench.pipefusion import run
from ..bench.sampler import Method
from ..dry_run.commands import Run
from ..dry_run.simulated_rank import count
from .checks import layout_of, stages_of
from .results import Timing, statistics_of
from .subjects import cut_subject, unet_subject

ROUNDS = 3
MIN_STEPS, MAX_STEPS = 2, 10   # in a round


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to time. size: text for the user. make(folder) -> Subject."""

    name: str
    size: str
    make: Callable


def models(is_cuda):
    """[Model]: on GPUs at published width and size with fewer blocks; on CPUs also narrower and for small images."""
    if is_cuda:
        return [
            Model("Flux.1", "width 3072, 1 + 2 of 19 + 38 blocks, 1024 x 1024, bf16", lambda folder: cut_subject(
                "Flux.1", "flux.1-dev", {"num_layers": 1, "num_single_layers": 2}, "bfloat16", (1024, 1024), folder)),
            Model("SDXL", "all blocks, 1024 x 1024, bf16", lambda folder: cut_subject(
                "SDXL", "sdxl", {}, "bfloat16", (1024, 1024), folder)),
            Model("Wan 2.1 14B", "width 5120, 2 of 40 blocks, 832 x 480, 33 frames, bf16", lambda folder: cut_subject(
                "Wan 2.1 14B", "wan2.1-14b-480p", {"num_layers": 2}, "bfloat16", (832, 480), folder, 33)),
            Model("Qwen-Image", "width 3072, 2 of 60 blocks, 1328 x 1328, bf16", lambda folder: cut_subject(
                "Qwen-Image", "qwen-image", {"num_layers": 2}, "bfloat16", (1328, 1328), folder))]
    return [
        Model("Flux.1", "width 768 of 3072, 1 + 2 of 19 + 38 blocks, 384 x 384, float32", lambda folder: cut_subject(
            "Flux.1", "flux.1-dev", {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 6}, "float32",
            (384, 384), folder)),
        Model("U-Net of SD 1.5", "width 64 of 320, 384 x 384, float32", lambda folder: unet_subject(
            "U-Net of SD 1.5", 64, (384, 384), folder)),
        Model("Wan 2.1 14B", "width 1280 of 5120, 2 of 40 blocks, 256 x 256, 5 frames, float32",
              lambda folder: cut_subject("Wan 2.1 14B", "wan2.1-14b-480p", {
                  "num_layers": 2, "num_attention_heads": 10, "ffn_dim": 3456}, "float32", (256, 256), folder, 5)),
        Model("Qwen-Image", "width 768 of 3072, 2 of 60 blocks, 384 x 384, float32", lambda folder: cut_subject(
            "Qwen-Image", "qwen-image", {"num_layers": 2, "num_attention_heads": 6}, "float32", (384, 384), folder))]


def timed_layouts(subject, num_devices):
    """{name: degrees} to time: one device, each method on all devices, and CFG with each other method on four."""
    branches, is_unet = len(subject.calls), subject.family.plan.is_unet
    methods = ["displaced"] if is_unet else ["ulysses", "ring", "tensor", "pipefusion"]
    heads = None if is_unet else subject.family.num_heads(subject.checkpoint.config)
    blocks = None if is_unet else subject.family.num_blocks(subject.checkpoint.config)

    def works(method, degree):
        if method == "pipefusion":
            return blocks >= degree
        return method not in ("ulysses", "tensor") or heads % degree == 0
    found = {"one": {}}
    if num_devices == 1:
        return found
    if branches == num_devices == 2:
        found["cfg2"] = {"cfg": 2}
    found |= {f"{method}{num_devices}": {method: num_devices} for method in methods if works(method, num_devices)}
    if branches == 2 and num_devices % 2 == 0 and num_devices > 2:
        half = num_devices // 2
        found |= {f"cfg2-{method}{half}": {"cfg": 2, method: half} for method in methods if works(method, half)}
    return found


@dataclasses.dataclass(frozen=True)
class Way:
    """A layout to time. run(number of steps): runs them."""

    name: str
    degrees: dict
    client: Client
    spec: object
    run: Callable

    @property
    def num_devices(self):
        return len(self.client.devices)


def ways_of(subject, clients):
    """[Way] of every layout of a subject. clients: {number of devices: Client}."""
    many = max(clients)
    return [_way(subject, name, degrees, clients[many if degrees else 1])
            for name, degrees in timed_layouts(subject, many).items()]


def _way(subject, name, degrees, client):
    layout, stages, forward = layout_of(degrees), None, ForwardPass()
    if degrees.get("pipefusion", 1) > 1:
        stages = stages_of(degrees)
    spec = subject.spec(stages, degrees.get("tensor", 1))
    if degrees.get("displaced", 1) > 1:
        forward = ForwardPass(keep=True, stale=True)

    def timestep(call, step):
        return dataclasses.replace(call, timestep=call.timestep * (1 - step / (2 * MAX_STEPS)))

    def steps(number):
        for step in range(number):
            calls = [timestep(call, step) for call in subject.calls]
            requested = ForwardPass(keep=True) if forward.stale and step == 0 else forward
            client.wait([client.submit(spec, layout, subject.num_channels, calls, requested, run=name)])
        client.end_run(name)

    def staged(number):
        shape, patch = subject.calls[0].latent.shape, subject.family.patch_size(subject.checkpoint.config)
        patches = cut_patches(shape, patch, choose_num_patches(0, stages.pipefusion_degree, shape, patch,
                                                               stages.sequence_degree))
        # branches follow each other through the pipeline, as one batch
        call = _batched(subject.calls) if layout.cfg_degree == 1 else subject.calls[0]
        run(client, spec, call, number, Method(layout, 1, patches))
        client.end_run()
    return Way(name, degrees, client, spec, staged if stages else steps)


def _batched(calls):
    return dataclasses.replace(calls[0], latent=torch.cat([call.latent for call in calls]),
                               timestep=torch.cat([call.timestep for call in calls]),
                               conditioning={name: torch.cat([call.conditioning[name] for call in calls])
                                             for name in calls[0].conditioning})


def time_model(subject, model, clients, machine, seconds, show):
    """([Timing] of a subject, name of the layout that auto mode would choose; "" for a U-Net).

    machine: planner.layout_search.Machine of all devices. seconds: about what the rounds may take; at least one runs,
    at most ROUNDS. show(text): progress. Raises XDiTError of a method that fails.
    """
    ways = ways_of(subject, clients)
    first_s, steps_s, memory = {}, {way.name: [] for way in ways}, {}
    for way in ways:
        show(f"{model.name}: loading for {way.name}")
        way.run(1)
        started_s = time.perf_counter()
        way.run(MIN_STEPS)
        first_s[way.name] = (time.perf_counter() - started_s) / MIN_STEPS
    steps = max(MIN_STEPS, min(MAX_STEPS, int(seconds / (ROUNDS * sum(first_s.values())))))
    begun_s = time.monotonic()
    for round_ in range(ROUNDS):
        if round_ and time.monotonic() - begun_s > seconds * round_ / (round_ + 1):
            break                                              # another round would take longer than the rest
        for way in ways:
            show(f"{model.name}: {way.name}, round {round_ + 1} of {ROUNDS}")
            started_s = time.perf_counter()
            way.run(steps)
            steps_s[way.name].append((time.perf_counter() - started_s) / steps)
            memory[way.name] = _memory(way)
    for way in ways:
        way.client.drop(way.spec.name)
    flops = counted(subject, ways[0]).flops
    estimated, chosen = estimates(subject, ways, machine, steps)
    timings = []
    for way in ways:
        measured, (weight_bytes, peak_bytes) = statistics_of(steps_s[way.name]), memory[way.name]
        timings.append(Timing(
            model.name, way.name, way.num_devices, measured, flops / measured.median, estimated.get(way.name),
            weight_bytes, peak_bytes, None if peak_bytes is None else counted(subject, way).peak_bytes))
    return timings, chosen


def _memory(way):
    """(bytes of weights of the fullest rank, peak bytes in addition to weights; None on CPUs)."""
    weight_bytes = max(way.client.models.memory(way.spec.name).weight_bytes)
    if not way.client.devices[0].startswith("cuda"):
        return int(weight_bytes), None
    return int(weight_bytes), int(max(numbers["activation_bytes"] for numbers in way.client.report_memory().values()))


def counted(subject, way):
    """The dry run's Counted of a Way's first rank. On one device it has the FLOPs of all branches."""
    shapes = {name: tuple(tensor.shape) for name, tensor in subject.calls[0].conditioning.items()}
    requested = Run(tuple(subject.calls[0].latent.shape), shapes, branches=len(subject.calls))
    return count(subject.checkpoint, way.spec, layout_of(way.degrees), 0, requested)


def estimates(subject, ways, machine, steps):
    """({layout: estimated seconds per step}, layout that auto mode would choose). ({}, "") for a U-Net."""
    family = subject.family
    if family.plan.is_unet:
        return {}, ""
    dims = dims_of(family, subject.checkpoint.meta_model(), subject.checkpoint.weight_table(subject.spec()))
    first = subject.calls[0]
    job = job_of(family, dims, tuple(first.latent.shape), first.conditioning, steps, len(subject.calls))
    patch = family.patch_size(subject.checkpoint.config)

    def degrees(way):
        num_patches = 0 if "pipefusion" not in way.degrees else choose_num_patches(
            0, way.degrees["pipefusion"], first.latent.shape, patch)
        return Degrees(**way.degrees, num_patches=num_patches)
    made = {way.name: estimate(dims, job, degrees(way), machine).seconds / steps for way in ways}
    if len(machine.devices) == 1:
        return made, "one"
    chosen = plan_run(ParallelConfig(), machine, dims, job).chosen.degrees
    return made, layout_name(chosen)


def layout_name(degrees):
    """The name of Degrees, such as "cfg2-ulysses2"; "one" for one device, also where the others would have other
    images."""
    axes = [f"{axis}{getattr(degrees, axis)}" for axis in ("cfg", "ulysses", "ring", "tensor", "pipefusion",
                                                          "displaced") if getattr(degrees, axis) > 1]
    return "-".join(axes) or "one"
