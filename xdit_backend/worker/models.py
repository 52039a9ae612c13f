"""Models loaded on this rank, with their hooks and the blocks of its stage; inputs and message sizes of a forward."""

import functools
import itertools
import math
import statistics
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..checkpoints.loader import Transformer, load_transformer
from ..checkpoints.offload.host_weights import HostCopies
from ..checkpoints.weight_deltas import change_weights
from ..checkpoints.weight_versions import Versions
from ..distributed.collectives import Traffic, all_gather
from ..hooks.forward_context import ForwardContext, rows_of, tokens_of
from ..hooks.install import install_hooks
from ..hooks.model_hooks import ModelHooks
from ..hooks.token_shards_io import message_size
from ..memory.staging import PinnedAhead, on_device
from ..models import FAMILIES
from ..partition import FULL, ranks_by_part, split_stages, stage_blocks, stage_of
from ..protocol.errors import XDiTError
from ..protocol.shared_memory import map_segment
from ..system import accelerator
from .device_probe import matrix_flops_s
from .self_check import check_split
from .weight_residency import Residency

REPORTED = 32                              # tensors between progress reports


class Models:
    """The models loaded on this rank, by spec name."""

    def __init__(self, rank, world_size, device, staging, report_phase):
        self._rank, self._world_size, self._device, self._report_phase = rank, world_size, device, report_phase
        self._staging = staging
        self._loaded = {}
        self._checked = set()                                  # ComfyUI classes that match their plans

    def __contains__(self, name):
        return name in self._loaded

    def __getitem__(self, name):
        if name not in self._loaded:
            raise XDiTError(f"Queue the prompt again: the model {name} is not loaded on rank {self._rank}.")
        return self._loaded[name]

    def load(self, spec, check=lambda: None, segments=(), traffic=None):
        """Load a model unless it is loaded; returns the numbers of its Residency. A collective: every rank calls it.

        traffic: counts collectives. segments: memory for offloaded weights, one per partition of the model, if any.
        check() is called after each tensor, when no collective follows, and may raise to abort.
        """
        if spec.name in self._loaded:
            return self._loaded[spec.name].residency.numbers
        family = FAMILIES[spec.family]
        if family.is_comfyuis and family.blocks and family.transformer not in self._checked:
            check_split(family)
            self._checked.add(family.transformer)
        count, traffic = itertools.count(), traffic or Traffic()
        blocks = range(0)

        def report(done, total):
            check()
            if next(count) % REPORTED == 0 or done == total:
                self._report_phase("loading weights", done, total, True)

        def resident_blocks(table):
            nonlocal blocks
            blocks = range(len(table.block_sizes))
            if spec.stages is not None:
                counts = spec.stages.num_blocks or self._balanced(table, traffic)
                blocks = stage_blocks(counts, stage_of(self._rank, spec.stages))
            return None if spec.stages is None or spec.stages.every_block else blocks

        transformer = load_transformer(spec, self._device, report, resident_blocks, self._rank % spec.tensor_degree,
                                       self._host_copies(spec, segments))
        model = transformer.model
        if transformer.offloaded is not None:
            transformer.offloaded.restore()                    # allocates the buffers: fails here if memory is short
        on_compile = functools.partial(self._report_phase, "compiling blocks")
        hooks = install_hooks(model, family.plan, splits=transformer.splits, offloaded=transformer.offloaded,
                              on_compile=on_compile)
        self._loaded[spec.name] = Loaded(transformer, hooks, getattr(torch, spec.compute_dtype), blocks,
                                         self._residency(transformer))
        return self._loaded[spec.name].residency.numbers

    def _host_copies(self, spec, segments):
        number, ranks = self._part(spec)
        return HostCopies(map_segment(segments[number]), ranks.index(self._rank), len(ranks)) if segments else None

    def change(self, command, spare_bytes):
        """Update weights of a resident model; returns the numbers of its Residency.

        spare_bytes: limit of cached earlier versions.
        """
        loaded = self[command.name]

        def leave(weights):
            # of offloaded weights, only the current values are available
            if weights is None or not command.version or loaded.transformer.offloaded is not None:
                loaded.versions.drop()
            else:
                loaded.versions.leave(command.version, command.begins, weights, loaded.transformer.files, spare_bytes)

        loaded.transformer.casts.drop()
        change_weights(loaded.transformer, command.changes, leave)
        return self._changed(loaded)

    def go_back(self, command):
        """Restore a cached version of a resident model's weights; "cached" in the numbers: whether it was cached."""
        loaded = self[command.name]
        loaded.transformer.casts.drop()
        was_cached = loaded.versions.go_back(command.version, command.left, loaded.transformer.files)
        return {**self._changed(loaded), "cached": float(was_cached)}

    def _changed(self, loaded):
        loaded.residency = self._residency(loaded.transformer)
        return loaded.residency.numbers

    def _residency(self, transformer):
        return Residency(transformer.model, transformer.files, self._to_device, self._staging.to_host,
                         transformer.offloaded)

    def drop(self, name):
        self._loaded.pop(name, None)

    def park(self, command):
        """Park weights in system RAM, and release them on the device."""
        loaded = self[command.name]
        loaded.transformer.casts.drop()                        # to free memory
        loaded.versions.drop()
        residency, (number, ranks) = loaded.residency, self._part(loaded.transformer.spec)
        targets = [command.targets[rank] for rank in ranks]
        residency.park(targets, ranks.index(self._rank), command.segments[number])
        return residency.numbers

    def _part(self, spec):
        """(number of this rank's partition of a model, the ranks that have it)"""
        groups = ranks_by_part(self._world_size, spec)
        return next((number, ranks) for number, ranks in enumerate(groups) if self._rank in ranks)

    def restore(self, command):
        """Load a model's parked weights back to the device."""
        residency = self[command.name].residency
        residency.restore(lambda done, total: self._report_phase("loading parked weights", done, total))
        return residency.numbers

    def drop_casts(self):
        """Drop the cached casts of a run's patches."""
        for loaded in self._loaded.values():
            loaded.transformer.casts.drop()

    def drop_versions(self):
        """Drop the cached versions of weights."""
        for loaded in self._loaded.values():
            loaded.versions.drop()

    @property
    def cast_bytes(self):
        """Bytes of second copies of weights: casts to the compute dtype, and cached versions."""
        return sum(loaded.transformer.casts.num_bytes + loaded.versions.num_bytes for loaded in self._loaded.values())

    @property
    def weight_bytes(self):
        """Bytes of weights on the device."""
        return sum(loaded.residency.device_bytes for loaded in self._loaded.values())

    @property
    def parked_bytes(self):
        """Bytes of weights in system RAM only."""
        return sum(loaded.residency.parked_bytes for loaded in self._loaded.values())

    def _to_device(self, weight):
        """Copy a weight from system RAM to the device, with the same strides."""
        if self._device.type == "cpu":
            return weight
        return self._staging.to_device(weight) if weight.is_contiguous() else weight.to(self._device)

    def _balanced(self, table, traffic):
        """Number of blocks of each stage, balanced by cost, the speed of the stages' devices and their free memory. A
        collective: every rank calls it."""
        free = (math.inf if self._device.type == "cpu"
                else accelerator.module(self._device).mem_get_info(self._device)[0] * FULL)
        spec = table.spec
        devices = self._of_all(traffic, self._speed(spec, traffic), free - table.outside_bytes)
        stages = [[device for rank, device in enumerate(devices) if stage_of(rank, spec.stages) == stage]
                  for stage in range(spec.stages.pipefusion_degree)]
        return split_stages(table.block_costs, len(stages),
                            speeds=[statistics.mean(speed for speed, _ in ranks) for ranks in stages],
                            sizes=table.block_bytes,
                            limits=[min(free for _, free in ranks) for ranks in stages])

    def _speed(self, spec, traffic):
        """Relative speed of this device: from the spec, or 1 if all are identical, or measured now, since numbers of
        processors cannot be compared across generations. A collective: every rank calls it."""
        if spec.stages.speeds:
            return spec.stages.speeds[self._rank]
        kinds = self._of_all(traffic, *kind_of(self._device))
        return (1.0 if all(kind == kinds[0] for kind in kinds)
                else matrix_flops_s(self._device, getattr(torch, spec.compute_dtype)))

    def _of_all(self, traffic, *numbers):
        """Gather these numbers from every rank: [[number, ...]]. A collective."""
        mine = torch.tensor([numbers], dtype=torch.float64, device=self._device)
        return all_gather(mine, [1] * self._world_size, 0, dist.group.WORLD, traffic).tolist()


def kind_of(device):
    """Numbers that differ between heterogeneous GPUs; all CPUs have the same."""
    if device.type == "cpu":
        return 0, 0, 0
    return accelerator.num_processors(device), *(accelerator.capability(device) or (0, 0))


@dataclass
class Loaded:
    """A model on this rank."""

    transformer: Transformer
    hooks: ModelHooks
    dtype: torch.dtype             # compute dtype
    blocks: range                  # the blocks of this rank's stage; all without stages
    residency: Residency | None = None
    versions: Versions = field(default_factory=Versions)

    @property
    def family(self):
        return self.transformer.family

    def context(self, mesh, traffic, latent, timestep, conditioning, patch=None, **fields):
        """ForwardContext of a latent or its patch. fields: further fields, for caches and communication; control:
        {insertion point: unsharded ControlNet residual in system RAM}."""
        control = fields.pop("control", None)
        family, num_blocks, exchange = self.family, self.hooks.num_blocks, fields.get("exchange")
        for name in fields.keys() & {"first_image", "num_images"}:             # in sequences of the blocks
            fields[name] *= family.inputs.latent.sequences(latent.shape)
        if "key_values" in fields:
            fields |= {"cached_blocks": self.blocks, "step": tuple(timestep.flatten().tolist())}
        if exchange is not None:
            fields["bands"] = self.hooks.bands_of(exchange, latent.shape[2], mesh)
        call = latent, on_device(timestep, latent.device), conditioning, self.transformer.config, patch
        context = ForwardContext(
            family.forward_arguments(*call),
            mesh, traffic, self.blocks if mesh.degrees["pipefusion"] > 1 else range(num_blocks), num_blocks,
            tokens_of(family, mesh, latent.shape, conditioning, patch), patch,
            None if patch is None else rows_of(family, latent.shape, patch), **fields)
        context.patches.biases = family.biases_of(*call)
        if control:
            context.patches.control = PinnedAhead(self.hooks.own_control(control, context), latent.device)
        return context

    def received_size(self, mesh, shape, conditioning, patch=None):
        """Number of elements of the previous stage's message for a latent (or patch) of this shape."""
        tokens = tokens_of(self.family, mesh, shape, conditioning, patch)
        units = self.hooks.message_units(self.blocks.start)
        widths = [self.family.stream_width(self.transformer.config, streams, self.blocks.start - 1)
                  for streams in units]
        return message_size(units, shape[0] * self.family.inputs.latent.sequences(shape), widths, tokens)
