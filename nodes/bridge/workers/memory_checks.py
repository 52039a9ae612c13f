"""Memory checks of a MODEL: weights are checked before they are read, a run before its first call."""

import dataclasses
import functools
import math
import os
from contextlib import contextmanager

import torch

from ....xdit_backend.memory.system_memory import available_memory, disk_bytes_s
from ....xdit_backend.partition import ranks_by_part
from ....xdit_backend.planner.descriptions import describe_disk, describe_weights
from ....xdit_backend.planner.memory_fit import (
    OF_A_VAE,
    OF_AN_UPSCALER,
    OF_WEIGHTS,
    SMALLEST_JOB,
    DeviceMemory,
    GroupMemory,
    Hints,
    Latents,
    Measured,
    Method,
    layouts_that_fit,
    run_bytes,
    settings_that_fit,
    sizes_that_fit,
)
from ....xdit_backend.planner.memory_model import rank_weights, working_fraction
from ....xdit_backend.planner.planner import USUAL_JOB, degrees_of
from ....xdit_backend.protocol.devices import machine_of, own_name
from ....xdit_backend.protocol.errors import ConfigError, WorkerOutOfMemoryError


class MemoryCheck:
    """Estimate of the memory that each rank of a MODEL takes on its device.

    plan_of(bytes of a device available for weights, blocks): OffloadPlan of a rank with these blocks, or with all if
    None. unet_memory: for a U-Net, unet_run_memory of its ModelDims. lighter_bytes(): {another weight_dtype: bytes of
    weights of a rank with all blocks}. packed_sizes(): {tensor that the file stores packed: (rows plus columns, summed
    over the layers that hold rows of it, bytes)}.
    """

    def __init__(self, setup, plan_of, unet_memory, lighter_bytes, packed_sizes):
        self._setup, self._lighter_bytes = setup, lighter_bytes
        of_unet = unet_memory and functools.partial(unet_memory, dtype=getattr(torch, setup.spec.compute_dtype))
        self.group = GroupMemory(setup.config, setup.spec.stages, setup.dims, setup.family.refused, setup.devices,
                                  setup.device_bytes, functools.lru_cache(maxsize=32)(plan_of), of_unet)
        # per rank: bytes in VRAM and offloaded bytes; estimates until the workers have reported theirs
        self.weight_bytes, self.offloaded_bytes = self.group.resident(setup.spec.weights_memory or math.inf)
        # weights of a rank with all blocks
        self.model_bytes = (self.group.plan_of(math.inf, None).device_bytes if self.group.has_stage_blocks
                            else max(self.weight_bytes))
        self._checked = set()                                  # calls of this run that were found to fit
        self._run = None                                       # (Latents, Hints, Job, Degrees) of the last check
        # estimated number of patches of a PipeFusion run with offloaded weights; 0: one for each stage
        self.run_patches = 0
        self._disk_bytes_s = 0.0                               # read speed of the file; 0: not measured
        self._packed_sizes, self.added_bytes, self._has_lora = packed_sizes, 0, False           # see expect

    def update(self, loaded):
        """Take the sizes from a loaded model. loaded: host.weight_residency.ModelMemory."""
        self.weight_bytes, self.offloaded_bytes = loaded.weight_bytes, loaded.offloaded_bytes

    def expect(self, changes):
        """Set the weight changes of the next run: {tensor of the file: host.weight_updates.Change}.

        added_bytes, per rank: packed weights stay packed and get a LoRA's factors in float32 in addition; any other
        change unpacks them.
        """
        setup, sizes = self._setup, self._packed_sizes() if changes else {}
        packed = [(change, *sizes[name]) for name, change in changes.items() if name in sizes]
        total = sum(4 * change.rank * sides if change.rank else change.num_bytes - packed_bytes
                    for change, sides, packed_bytes in packed)
        self.added_bytes = total // setup.spec.stages.pipefusion_degree if self.group.has_stage_blocks else total
        self._has_lora = any(change.rank for change, *_ in packed)

    @property
    def changed(self):
        """(has LoRA, added bytes) of the next run, as planner.memory_settings takes them."""
        return self._has_lora, self.added_bytes

    def weights_on(self, device):
        """Bytes of weights of the ranks on this device."""
        return sum(size for size, name in zip(self.weight_bytes, self._setup.devices) if name == str(device))

    def end_run(self):
        self._checked.clear()

    def of_run(self, job, layout, of_one_device, sizes):
        """Bytes that a rank takes in addition to weights. of_one_device: activations without parallelism. sizes: of the
        latent, without batch and channels."""
        degrees = self._degrees(layout)
        activations = of_one_device * working_fraction(job, degrees, branches_apart=True)
        return activations + self._of_rank(job, sizes, degrees).keys_values

    def estimate_of_run(self, job, layout, estimate=0.0):
        """Cost model's estimate for `of_run`; ComfyUI's may be several times that. For a U-Net, returns `estimate`."""
        if self._setup.dims is None:
            return estimate
        needed = self._of_rank(job, (), self._degrees(layout))
        return needed.activations + needed.keys_values

    def _of_rank(self, job, sizes, degrees):
        """Memory of a rank in addition to weights."""
        return self.group.run_memory(job, (job.images, job.branches), sizes, degrees,
                                      self.group.settings(*self.changed))

    def weights_memory_alongside(self, run_bytes, is_loaded):
        """Return ModelSpec.weights_memory for a run that takes so many bytes of a rank in addition to weights.
        is_loaded: the workers have the model; its setting does not change if it suits this run too."""
        spec, configured = self._setup.spec, self._setup.config.weights_memory_bytes
        if configured is not None or not self._may_offload:
            return configured or 0
        taken, group = run_bytes + self.added_bytes, self.group
        if is_loaded and group.most_resident(spec.weights_memory or math.inf) <= group.rank_budget - taken:
            return spec.weights_memory
        return group.weights_memory(taken)

    def check_host(self):
        """Raise ConfigError if offloaded weights that need system RAM of their own do not fit there. If the file does
        not fit in the page cache, measure its read speed, while no worker has it mapped."""
        spec, available = self._setup.spec, available_memory()[0]
        needed = spec.host_bytes * len(ranks_by_part(len(self._setup.devices), spec))
        if needed > available:
            raise ConfigError("Set weight_dtype to default, use a file of that type, or close other programs: the "
                              f"weights of {self._setup.family.title} do not fit in VRAM, and the offloaded ones need "
                              f"{needed / 1e9:.3g} GB of system RAM, of which {available / 1e9:.3g} GB are free. "
                              "Weights that are used as the file stores them need no RAM of their own.")
        if self._disk_bytes > 0:
            self._disk_bytes_s = disk_bytes_s(self._largest_file)

    def describe_placement(self, estimates):
        """Return the text on offloaded weights for the user, or "" if all are resident in VRAM.
        estimates: layout_selection.Estimates."""
        plan, run = estimates.plan or estimates.streaming_plan, estimates.timed
        chosen, num_steps = (None, 1) if plan is None else (plan.chosen, run.job.steps if run else USUAL_JOB.steps)
        streamed, resident = max(self.offloaded_bytes), max(self.weight_bytes)
        num_patches = 1 if self._setup.spec.stages is None else self.requested_patches
        if not streamed:
            return ""
        if self._disk_bytes <= 0:
            return f". {describe_weights(resident, streamed, chosen, num_steps, num_patches)}"
        self._disk_bytes_s = self._disk_bytes_s or disk_bytes_s(self._largest_file)
        from_disk = describe_disk(self._disk_bytes_s, num_patches * self._disk_bytes)
        return f". {describe_weights(resident, streamed, None, 1, num_patches)}, {from_disk}"

    @property
    def _disk_bytes(self):
        """Bytes read from disk in each step, or for each patch. If the offloaded weights exceed the page cache, all of
        them are read each time, since pages are evicted in the order of their use. 0 if they fit."""
        setup = self._setup
        num_shards = len(ranks_by_part(len(setup.devices), setup.spec))
        of_file = (max(self.offloaded_bytes) - setup.spec.host_bytes) * num_shards
        return of_file if of_file > available_memory()[0] else 0

    @property
    def _largest_file(self):
        return max(self._setup.checkpoint.files, key=os.path.getsize)

    @property
    def streamed_bytes(self):
        """Bytes of weights copied to the fullest device in each step, once or for each patch."""
        return max(self.offloaded_bytes) * (1 if self._setup.spec.stages is None else max(1, self.requested_patches))

    @property
    def requested_patches(self):
        """PipeFusion's number of patches, as in planner.choose_num_patches. If stages have offloaded weights, which are
        streamed for each patch, it is the number of stages or 1."""
        stages, requested = self._setup.spec.stages, self._setup.config.requested_patches
        if requested or not any(self.offloaded_bytes):
            return requested
        return 0 if stages is None else self.run_patches or stages.pipefusion_degree

    def _degrees(self, layout):
        setup = self._setup
        degrees = degrees_of(layout, setup.config, setup.spec.stages)
        return degrees if setup.spec.stages is None else dataclasses.replace(
            degrees, num_patches=self.requested_patches or degrees.num_patches)

    @property
    def _may_offload(self):
        """Whether weights_memory "auto" may offload weights to system RAM."""
        return all(map(has_own_memory, self._setup.devices))

    def check_weights(self):
        """Raise ConfigError if the weights do not fit on a device. Called before they are read."""
        streams = self._setup.config.weights_memory_bytes is None and self._may_offload
        self.group.check_weights(
            self._setup.family.title, self._added(self.group.resident(1)[0] if streams else self.weight_bytes),
            self._may_offload, self._lighter)

    def check_run(self, shape, conditioning, num_images, branches, layout, cached_tokens=0):
        """Raise ConfigError if a run cannot fit. A run's identical calls are checked once. cached_tokens: of reference
        images, see cost_model.Job.

        shape: of the full latent of a CFG branch. conditioning: {name: tensor}. branches: number of CFG branches,
        batched or not.
        """
        key = tuple(shape), num_images, branches, layout
        if key in self._checked:
            return
        setup, degrees = self._setup, self._degrees(layout)

        def job(images, sizes):
            found = setup.job((images, shape[1], *sizes), conditioning, USUAL_JOB.steps, branches)
            return dataclasses.replace(found, cached=cached_tokens) if cached_tokens else found

        def needed(images, sizes, settings):
            text = {} if setup.dims is not None else {
                "num_tokens": conditioning["context"].shape[1] if "context" in conditioning else 0}
            return self.group.run_memory(job(images, sizes), (images, branches), sizes, degrees, settings, **text)

        sizes, settings = tuple(shape[2:]), self.group.settings(*self.changed)
        num_here = sum(not machine_of(device) for device in setup.devices)
        latents = Latents(functools.partial(needed, settings=settings), num_images, sizes,
                          setup.family.pixels(setup.transformer_config)[1:])
        hints = self.group.run_hints(needed, settings, job(num_images, sizes), self._lighter)
        self._run = latents, hints, job(num_images, sizes), degrees
        self.group.check_run(layout, self._added(self.weight_bytes), latents, hints, num_here=num_here,
                              host_bytes=available_memory()[0])
        self._checked.add(key)

    @contextmanager
    def explaining(self):
        """Context manager: extend a worker's out-of-memory error with settings that would fit, by the estimates scaled
        to the memory that the worker had taken."""
        try:
            yield
        except WorkerOutOfMemoryError as error:
            is_of_model = error.command not in (*OF_A_VAE, *OF_AN_UPSCALER)
            would = self._after(error) if error.facts and is_of_model else []
            if not would:
                raise
            text = f"Use {'; or '.join(would)}. {error.facts}"
            raise WorkerOutOfMemoryError(text, error.rank, error.device, error.numbers, error.command) from error

    def _after(self, error):
        """[text] of settings that would fit after a worker ran out of memory."""
        setup, numbers, rank = self._setup, error.numbers, error.rank
        taken, available = run_bytes(numbers)
        resident = numbers.get("weight_bytes", 0) + numbers.get("cast_bytes", 0)
        if error.command in OF_WEIGHTS:
            has, weights = resident + available, self.weight_bytes[rank]
            ranks = DeviceMemory([error.device], [has], [weights])
            placement = self.group.placement(SMALLEST_JOB, has)
            return [*self._streamed(has, weights), *settings_that_fit(ranks, Hints(placement, self._lighter_on(rank)))]
        if self._run is None or taken <= available:            # nothing smaller can be estimated
            return []
        latents, hints, job, degrees = self._run
        measured = Measured(error.device, resident, taken, resident + available)
        layouts = [] if setup.dims is None else layouts_that_fit(
            measured, setup.dims, job, Method(degrees, tuple(setup.family.refused), setup.config.may_differ),
            self.group.settings(*self.changed), not any(self.offloaded_bytes))
        placement = self.group.placement(job, measured.total / measured.factor(latents.memory()))
        hints = dataclasses.replace(hints, placement=layouts or placement, lighter=self._lighter_on(rank))
        return [*self._streamed(measured.total - taken, resident), *sizes_that_fit(measured, latents, hints)]

    def _lighter_on(self, rank):
        """`_lighter` for one rank."""
        return lambda: {name: [sizes[rank]] for name, sizes in self._lighter().items()}

    def _streamed(self, free_bytes, resident_bytes):
        return self.group.streaming_that_fits(free_bytes, resident_bytes) if self._may_offload else []

    def _of_ranks(self, weight_bytes):
        setup = self._setup
        return rank_weights(weight_bytes, setup.dims, setup.spec.stages, setup.device_bytes)

    def _lighter(self):
        """{weight_dtype with smaller weights: bytes that each rank then adds to its device}"""
        ranks = {name: self._of_ranks(size) for name, size in self._lighter_bytes().items()}
        return {name: self._added(sizes) for name, sizes in ranks.items() if sizes[0] < max(self.weight_bytes)}

    def _added(self, weight_bytes):
        """Bytes that each rank adds to its device. CPU ranks with the same weights map the same file."""
        devices = self._setup.devices
        first = {ranks[0] for ranks in ranks_by_part(len(devices), self._setup.spec)}
        return [size if device != "cpu" or rank in first else 0
                for rank, (device, size) in enumerate(zip(devices, weight_bytes))]


def has_own_memory(device):
    """Whether a device has memory separate from system RAM."""
    return own_name(device) != "cpu"
