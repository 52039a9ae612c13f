"""Whether a layout fits, with the errors by which the nodes reject a run before loading anything."""

import dataclasses
import functools
import math
from typing import Any

import torch

from ...checkpoints.model_dims import job_of, unet_run_memory
from ...checkpoints.quantisation.quantise_on_load import TYPES, is_installed
from ...checkpoints.tensor_sharding import resident_bytes
from ...config import ParallelConfig
from ...planner.descriptions import describe_layout, describe_weights
from ...planner.layout_search import Machine
from ...planner.memory_check import (
    DeviceMemory,
    Hints,
    Latents,
    check_memory,
    rank_memory_budget,
    ranks_hold,
    weights_memory_in,
)
from ...planner.memory_model import rank_memory
from ...planner.more_devices import placement_that_fits
from ...planner.planner import USUAL_JOB, degrees_of, memory_settings, plan_run
from ...protocol.errors import ConfigError
from ...protocol.specs import Layout
from ..dry_run.simulated_rank import outline, world_size_of
from .plan import WEIGHT_TYPES


def config_of(layout, num_patches=0, **settings):
    """The ParallelConfig with these degrees set by the user, and otherwise the defaults of xDiT Parallel Config."""
    return ParallelConfig(mode="manual", num_patches=num_patches, **dataclasses.asdict(layout), **settings)


def collective_of(layout):
    """The collective in which the ranks of a multi-device layout send the most."""
    return next(each for axis, each in (("ulysses", "all_to_all"), ("tensor", "all_reduce"), ("displaced", "gather"),
                                        ("ring", "hop"), ("pipefusion", "hop"), ("cfg", "hop"), ("data", "hop"))
                if getattr(layout, f"{axis}_degree") > 1)


def auto_fit(subject, machine):
    """The Fit of the layout that xDiT Parallel Config chooses in mode "auto" on all of the machine's devices before
    they are measured."""
    config = auto_config(subject)
    placement = subject.placement(config, machine.devices)
    return Fit(subject, subject.layout_in(config, placement, machine.devices, subject.run.branches), machine, "auto")


def auto_config(subject):
    return ParallelConfig(num_patches=subject.run.num_patches, weights_memory=subject.weights_memory)


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """A size.Subject on a machine's devices under a Layout. mode: of xDiT Parallel Config; "manual" uses these degrees
    for every run, "auto" for runs with this number of branches."""

    subject: Any
    layout: Layout
    machine: Machine
    mode: str = "manual"

    @property
    def config(self):
        if self.mode == "auto":
            return auto_config(self.subject)
        return config_of(self.layout, self.subject.run.num_patches, weights_memory=self.subject.weights_memory)

    @functools.cached_property
    def placement(self):
        return self.subject.placement(self.config, self.machine.devices[:world_size_of(self.layout)])

    @property
    def stages(self):
        return self.placement.stages

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
        conditioning = {name: torch.empty(size, device="meta") for name, size in
                        (subject.run.conditioning | subject.run.call_conditioning).items()}
        return job_of(subject.checkpoint.family, subject.dims, (images, shape[1], *sizes), conditioning,
                      USUAL_JOB.steps, subject.run.branches)

    def needed(self, images, sizes, settings=None):
        """Memory of the fullest rank."""
        subject, degrees, settings = self.subject, self.degrees, settings or self.settings
        if subject.dims is not None:
            return rank_memory(subject.dims, self.job(images, sizes), degrees, settings)
        return unet_run_memory(subject.checkpoint.family, subject.model, sizes, (images, subject.run.branches), degrees,
                               getattr(torch, subject.compute), cached_steps=settings.cached_steps,
                               num_tokens=subject.run.conditioning.get("context", (0, 0))[1])

    @property
    def run_bytes(self):
        """Memory of the run on the fullest rank, without weights."""
        memory = self.needed(self.subject.run.shape[0], self.subject.run.shape[2:])
        return memory.keys_values + memory.activations

    @property
    def requested_bytes(self):
        """run_bytes of the run for which ComfyUI frees memory in advance: with both guidance branches, and a text of
        unknown length. Resident weights leave this much free."""
        images, sizes = self.subject.run.shape[0], self.subject.run.shape[2:]
        if self.subject.dims is None:
            return self.run_bytes
        job = dataclasses.replace(USUAL_JOB, tokens=self.job(images, sizes).tokens, branches=2, images=images)
        layout = self.subject.layout_in(self.config, self.placement, self.names, 2)
        memory = rank_memory(self.subject.dims, job, degrees_of(layout, self.config, self.stages), self.settings)
        return memory.keys_values + memory.activations

    @functools.cached_property
    def weights_memory(self):
        """The node's ModelSpec.weights_memory."""
        configured = self.config.weights_memory_bytes
        if configured is not None:
            return configured
        return weights_memory_in(rank_memory_budget(self.names, self.device_bytes) - self.requested_bytes,
                                 lambda budget_bytes: max(self._hold(budget_bytes)[0]))

    def _hold(self, budget_bytes):
        subject = self.subject
        return ranks_hold(functools.partial(subject.plan_of, self.layout.tensor_degree), subject.dims, self.stages,
                          self.device_bytes, budget_bytes)

    @functools.cached_property
    def hold(self):
        """([bytes of each rank's resident weights], [bytes of its offloaded weights])."""
        return self._hold(self.weights_memory or math.inf)

    @property
    def weights(self):
        return self.hold[0]

    @property
    def run(self):
        """The subject's run; with as few patches as possible if stages stream weights for each of them, and with
        weights sharded among ranks where the node does that."""
        run = dataclasses.replace(self.subject.run, shards_weights=self.shards_weights)
        if self.stages is None or run.num_patches or not any(self.hold[1]):
            return run
        return dataclasses.replace(run, num_patches=self.layout.pipefusion_degree)

    @functools.cached_property
    def shards_weights(self):
        """Whether each rank copies a shard of the offloaded weights and all-gathers the others, once the node has
        measured such devices."""
        known = {name for name, _ in self.machine.links.rates}
        if (not any(self.hold[1]) or self.subject.dims is None or self.degrees.devices == 1
                or not {"gather", collective_of(self.layout)} <= known):
            return False
        machine = dataclasses.replace(self.machine, devices=self.machine.devices[:self.degrees.devices])
        config = config_of(self.layout, self.subject.run.num_patches, weights_memory=self.subject.weights_memory)
        shape = self.subject.run.shape
        return plan_run(config, machine, self.subject.dims, self.job(shape[0], shape[2:]), self.stages,
                        self.layout.tensor_degree).chosen.shards_weights

    @functools.cached_property
    def all_bytes(self):
        """Bytes of all weights as stored."""
        return resident_bytes(self.subject.model, self.subject.checkpoint.family, self.subject.spec())

    def answer(self):
        """"fits" with the bytes of the fullest rank, or the error."""
        subject, settings, shape = self.subject, self.settings, self.subject.run.shape
        family, smallest = subject.checkpoint.family, min(self.device_bytes)
        without_estimate = functools.partial(self.needed, settings=dataclasses.replace(settings, cached_steps=1))
        hints = Hints(
            placement_that_fits(self.config, subject.dims, family.refused,
                             None if subject.dims is None else self.job(shape[0], shape[2:]), smallest),
            lambda: _lighter(subject, self.all_bytes, self.weights),
            {"forecast_keys_values 0": without_estimate} if settings.cached_steps > 1 else {})
        try:
            check_memory(f"this run ({describe_layout(self.layout)})",
                         DeviceMemory(self.names, self.device_bytes, self.weights), hints,
                         Latents(self.needed, shape[0], shape[2:], family.pixels(subject.checkpoint.config)[1:]))
        except ConfigError as error:
            return str(error)
        text = f"fits: {(max(self.weights) + self.run_bytes) / 1e9:.3g} GB of {smallest / 1e9:.3g}"
        streamed = self.hold[1]
        num_patches = 1 if self.stages is None else self.run.num_patches
        if not any(streamed):
            return text
        weights = describe_weights(max(self.weights), max(streamed), None, 1, num_patches, self.shards_weights)
        return f"{text}. {weights}"


def _lighter(subject, all_bytes, weights):
    """{weight_dtype with smaller weights: bytes of each rank's weights}. all_bytes: of all weights as stored."""
    checkpoint, found = subject.checkpoint, {}
    for name in ("fp8_e4m3fn", *(name for name in TYPES if not checkpoint.quantised and is_installed(TYPES[name]))):
        spec = checkpoint.spec("bfloat16" if name in TYPES else WEIGHT_TYPES[name], "bfloat16",
                               quantisation=name if name in TYPES else "")
        size = resident_bytes(outline(checkpoint, spec)[0], checkpoint.family, spec)
        if size < all_bytes:
            found[name] = [round(each * size / all_bytes) for each in weights]
    return found
