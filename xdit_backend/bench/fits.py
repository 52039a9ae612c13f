"""Would a layout fit, in the words with which the nodes refuse a run before they load anything? Used by size.py."""

import dataclasses
import functools
from typing import Any

import torch

from ..checkpoints.net import exchanged_bytes, job_of
from ..checkpoints.quantise import TYPES, is_installed
from ..checkpoints.shares import held_bytes
from ..config import ParallelConfig
from ..dry_run.rank import outline
from ..forecast.choice import Machine
from ..forecast.memory import Memory, rank_memory, rank_weights, weight_bytes
from ..forecast.memory_check import DeviceMemory, Hints, Latents, check_memory, rank_room, weights_memory_in
from ..forecast.more_devices import spread_that_fits
from ..forecast.planner import (
    USUAL_JOB,
    degrees_of,
    describe_layout,
    memory_settings,
)
from ..forecast.words import weights_words
from ..protocol.errors import ConfigError
from ..protocol.specs import Layout
from .plan import WEIGHT_TYPES


def config_of(layout, num_patches=0, **settings):
    """The ParallelConfig of a person who sets these degrees, and else what xDiT Parallel Config has."""
    return ParallelConfig(mode="manual", num_patches=num_patches, **dataclasses.asdict(layout), **settings)


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """How a size.Subject would be on a machine's devices under a Layout."""

    subject: Any
    layout: Layout
    machine: Machine

    @property
    def config(self):
        return config_of(self.layout, self.subject.run.num_patches, weights_memory=self.subject.weights_memory)

    @functools.cached_property
    def stages(self):
        return self.subject.stages(self.layout, self.machine)

    @property
    def degrees(self):
        return degrees_of(self.layout, self.config, self.stages)

    @property
    def settings(self):
        return memory_settings(self.config, self.stages)

    @property
    def names(self):
        return [f"cuda:{index}" for index in range(self.degrees.devices)]

    @property
    def device_bytes(self):
        return [device.memory_bytes for device in self.machine.devices[:self.degrees.devices]]

    def job(self, images, sizes):
        subject, shape = self.subject, self.subject.run.shape
        conditioning = {name: torch.empty(given, device="meta") for name, given in
                        (subject.run.conditioning | subject.run.call_conditioning).items()}
        return job_of(subject.checkpoint.family, subject.net, (images, shape[1], *sizes), conditioning,
                      USUAL_JOB.steps, subject.run.branches)

    def needed(self, images, sizes, settings=None):
        """Memory of the fullest rank."""
        subject, degrees, settings = self.subject, self.degrees, settings or self.settings
        if subject.net is not None:
            return rank_memory(subject.net, self.job(images, sizes), degrees, settings)
        own = -(-images // degrees.data) * -(-subject.run.branches // degrees.cfg)
        sent = 0 if degrees.displaced == 1 else exchanged_bytes(subject.model, sizes, degrees.displaced,
                                                                getattr(torch, subject.compute), own)
        return Memory(0.0, settings.cached_steps * degrees.displaced * sent, 0.0)

    @property
    def run_bytes(self):
        """What the run takes of the fullest rank beside weights."""
        memory = self.needed(self.subject.run.shape[0], self.subject.run.shape[2:])
        return memory.keys_values + memory.activations

    @functools.cached_property
    def weights_memory(self):
        """ModelSpec.weights_memory, as the node has it."""
        given = self.config.weights_memory_bytes
        if given is not None or self.stages is not None:
            return given or 0
        plan_of = functools.partial(self.subject.plan_of, self.layout.tensor_degree)
        return weights_memory_in(rank_room(self.names, self.device_bytes) - self.run_bytes,
                                 lambda budget: plan_of(budget).device_bytes)

    @functools.cached_property
    def offload(self):
        """The OffloadPlan; None where all weights are on the devices."""
        return self.subject.plan_of(self.layout.tensor_degree, self.weights_memory) if self.weights_memory else None

    @functools.cached_property
    def weights(self):
        """Bytes of each rank's weights on its device."""
        if self.offload is not None:
            return [self.offload.device_bytes] * self.degrees.devices
        net, whole = self.subject.net, dataclasses.replace(self.degrees, pipefusion=1)
        share = 1.0 if net is None else weight_bytes(net, whole) / net.held_bytes
        return rank_weights(round(self.held * share), net, self.stages, self.device_bytes)

    @functools.cached_property
    def held(self):
        """Bytes of all weights, as they are held."""
        return held_bytes(self.subject.model, self.subject.checkpoint.family, self.subject.spec())

    def answer(self):
        """ "fits", with the bytes of the fullest rank; or the refusal."""
        subject, settings, shape = self.subject, self.settings, self.subject.run.shape
        family, smallest = subject.checkpoint.family, min(self.device_bytes)
        without_forecast = functools.partial(self.needed, settings=dataclasses.replace(settings, cached_steps=1))
        hints = Hints(
            spread_that_fits(self.config, subject.net, family.refused,
                             None if subject.net is None else self.job(shape[0], shape[2:]), smallest),
            lambda: _lighter(subject, self.held, self.weights),
            {"forecast_keys_values 0": without_forecast} if settings.cached_steps > 1 else {})
        try:
            check_memory(f"this run ({describe_layout(self.layout)})",
                         DeviceMemory(self.names, self.device_bytes, self.weights), hints,
                         Latents(self.needed, shape[0], shape[2:], family.pixels(subject.checkpoint.config)[1:]))
        except ConfigError as error:
            return str(error)
        text = f"fits: {(max(self.weights) + self.run_bytes) / 1e9:.3g} GB of {smallest / 1e9:.3g}"
        return text if self.offload is None else (
            f"{text}. {weights_words(self.offload.device_bytes, self.offload.offloaded_bytes, None, 1)}")


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
