"""Whether a layout fits, with the errors by which the nodes reject a run before loading anything."""

import dataclasses
import functools
import math
from typing import Any

import torch

from ...checkpoints.model_dims import job_of, unet_run_memory
from ...checkpoints.quantisation.quantise_on_load import TYPES, is_installed
from ...config import ParallelConfig
from ...planner.descriptions import describe_weights
from ...planner.layout_search import Machine
from ...planner.memory_fit import GroupMemory, Latents
from ...planner.planner import USUAL_JOB, degrees_of, plan_run
from ...protocol.errors import ConfigError
from ...protocol.specs import Layout
from ..dry_run.simulated_rank import table_of, world_size_of
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

    @functools.cached_property
    def memory(self):
        """The GroupMemory of the ranks."""
        subject, num_devices = self.subject, self.degrees.devices
        family = subject.checkpoint.family
        of_unet = functools.partial(unet_run_memory, family, subject.model, dtype=getattr(torch, subject.compute))
        return GroupMemory(self.config, self.stages, subject.dims, family.refused,
                           [f"cuda:{index}" for index in range(num_devices)],
                           [device.memory_bytes for device in self.machine.devices[:num_devices]],
                           functools.partial(subject.plan_of, self.layout.tensor_degree), of_unet)

    def job(self, images, sizes):
        """The Job of a run; None for a U-Net."""
        subject, shape = self.subject, self.subject.run.shape
        if subject.dims is None:
            return None
        conditioning = {name: torch.empty(size, device="meta") for name, size in
                        (subject.run.conditioning | subject.run.call_conditioning).items()}
        return job_of(subject.checkpoint.family, subject.dims, (images, shape[1], *sizes), conditioning,
                      USUAL_JOB.steps, subject.run.branches)

    def needed(self, images, sizes, settings=None):
        """Memory of the fullest rank."""
        run, settings = self.subject.run, settings or self.memory.settings()
        return self.memory.run_memory(self.job(images, sizes), (images, run.branches), sizes, self.degrees, settings,
                                      num_tokens=run.conditioning.get("context", (0, 0))[1])

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
        layout = self.subject.layout_in(self.config, self.placement, self.memory.devices, 2)
        degrees = degrees_of(layout, self.config, self.stages)
        memory = self.memory.run_memory(job, (images, 2), sizes, degrees, self.memory.settings())
        return memory.keys_values + memory.activations

    @functools.cached_property
    def weights_memory(self):
        """The node's ModelSpec.weights_memory."""
        configured = self.config.weights_memory_bytes
        return self.memory.weights_memory(self.requested_bytes) if configured is None else configured

    @functools.cached_property
    def hold(self):
        """([bytes of each rank's resident weights], [bytes of its offloaded weights])."""
        return self.memory.resident(self.weights_memory or math.inf)

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
        return self.subject.table().resident_bytes

    def answer(self):
        """"fits" with the bytes of the fullest rank, or the error."""
        subject, memory, shape = self.subject, self.memory, self.subject.run.shape
        family, smallest, images, sizes = subject.checkpoint.family, min(memory.device_bytes), shape[0], shape[2:]
        hints = memory.run_hints(self.needed, memory.settings(), self.job(images, sizes),
                                 lambda: _lighter(subject, self.all_bytes, self.weights))
        try:
            memory.check_run(self.layout, self.weights, Latents(
                self.needed, images, sizes, family.pixels(subject.checkpoint.config)[1:]), hints)
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
        size = table_of(checkpoint, spec).resident_bytes
        if size < all_bytes:
            found[name] = [round(each * size / all_bytes) for each in weights]
    return found
