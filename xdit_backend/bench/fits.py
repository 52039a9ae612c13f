"""Would a layout fit, in the words with which the nodes refuse a run before they load anything? Used by size.py."""

import dataclasses
import functools

import torch

from ..checkpoints.net import exchanged_bytes, job_of
from ..checkpoints.quantise import TYPES, is_installed
from ..checkpoints.transformer import held_bytes
from ..config import ParallelConfig
from ..dry_run.rank import outline
from ..forecast.memory import Memory, rank_memory, rank_weights, weight_bytes
from ..forecast.memory_check import DeviceMemory, Hints, Latents, check_memory
from ..forecast.planner import (
    USUAL_JOB,
    degrees_of,
    describe_layout,
    memory_settings,
    spread_that_fits,
)
from ..protocol.errors import ConfigError
from .plan import WEIGHT_TYPES


def config_of(layout, num_patches=0):
    """The ParallelConfig of a person who sets these degrees, and else what xDiT Parallel Config has."""
    return ParallelConfig(mode="manual", num_patches=num_patches, **dataclasses.asdict(layout))


def answer(subject, layout, machine):
    """ "fits", with the bytes of the fullest rank; or the refusal. subject: a size.Subject."""
    config, stages = config_of(layout, subject.run.num_patches), subject.stages(layout, machine)
    degrees, settings = degrees_of(layout, config, stages), memory_settings(config, stages)
    family, net, shape = subject.checkpoint.family, subject.net, subject.run.shape
    conditioning = {name: torch.empty(given, device="meta") for name, given in
                    (subject.run.conditioning | subject.run.call_conditioning).items()}

    def job(images, sizes):
        return job_of(family, net, (images, shape[1], *sizes), conditioning, USUAL_JOB.steps, subject.run.branches)

    def needed(images, sizes, kept=settings):
        if net is not None:
            return rank_memory(net, job(images, sizes), degrees, kept)
        own = -(-images // degrees.data) * -(-subject.run.branches // degrees.cfg)
        sent = 0 if degrees.displaced == 1 else exchanged_bytes(subject.model, sizes, degrees.displaced,
                                                                getattr(torch, subject.compute), own)
        return Memory(0.0, kept.cached_steps * degrees.displaced * sent, 0.0)

    names = [f"cuda:{index}" for index in range(degrees.devices)]
    devices = [device.memory_bytes for device in machine.devices[:degrees.devices]]
    held = held_bytes(subject.model, family, subject.spec())
    share = 1.0 if net is None else weight_bytes(net, dataclasses.replace(degrees, pipefusion=1)) / net.held_bytes
    weights = rank_weights(round(held * share), net, stages, devices)
    latents = Latents(needed, shape[0], shape[2:], family.pixels(subject.checkpoint.config)[1:])
    hints = Hints(
        spread_that_fits(config, net, family.refused, None if net is None else job(shape[0], shape[2:]), min(devices)),
        lambda: _lighter(subject, held, weights),
        {"forecast_keys_values 0": functools.partial(needed, kept=dataclasses.replace(settings, cached_steps=1))}
        if config.cached_steps > 1 else {})
    try:
        check_memory(f"This run ({describe_layout(layout)})", DeviceMemory(names, devices, weights), hints,
                     latents)
    except ConfigError as error:
        return str(error)
    memory = needed(shape[0], shape[2:])
    return f"fits: {(max(weights) + memory.keys_values + memory.activations) / 1e9:.3g} GB of {min(devices) / 1e9:.3g}"


def _lighter(subject, held, weights):
    """{weight_dtype in which a rank holds less: what each rank then holds}. held: bytes of all weights, as they are."""
    checkpoint, found = subject.checkpoint, {}
    for name in ("fp8_e4m3fn", *(name for name in TYPES if not checkpoint.quantised and is_installed(TYPES[name]))):
        spec = checkpoint.spec("bfloat16" if name in TYPES else WEIGHT_TYPES[name], "bfloat16",
                               quantisation=name if name in TYPES else "")
        size = held_bytes(outline(checkpoint, spec)[0], checkpoint.family, spec)
        if size < held:
            found[name] = [round(each * size / held) for each in weights]
    return found
