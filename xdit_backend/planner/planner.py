"""The automatic choice of weight placement and parallel layout. Arithmetic only: the host decides before a model is
loaded and before a run, and workers execute the layout that each command names."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ..config import validate_layout
from ..partition import FULL, num_tokens, patch_dim, stage_of
from ..protocol.specs import Layout, Stages
from .cost_model import Degrees, Device, Job, Links
from .descriptions import describe_seconds, layout_description
from .layout_search import WORTH, Estimate, Machine, are_identical, candidates, choose, estimate, estimates, speeds_of
from .memory_model import MemorySettings, weight_bytes
from .vae_cost import work_seconds

USUAL = {"gpu": Device(1e14, 1e14, 1e12), "cpu": Device(5e10, 3e10, 1e10, block_launch_s=5e-4)}
LONG_S = 20.0                              # estimated run time on one usual device from which a probe is worthwhile
USUAL_JOB = Job(4096, 512, 20)             # a one-megapixel image
# weights up to this fraction of a device's memory are replicated, so that warm-up can use sequence parallelism
WARMUP_FULL = 0.4
FASTER = 1.15                              # speedup over the best exact layout that justifies stale keys and values
# PSNR in dB between the demo model's images with PipeFusion and one device's: 4 patches, one warm-up step
# (docs/benchmarks.md)
PSNR_DB = {"forecast": 43, "as they were": 37}


@dataclasses.dataclass(frozen=True)
class AttentionHeads:
    """Properties of a model's attention that limit its layouts. family: the model's title, for messages.

    num_heads: None for a U-Net, which supports CFG and data parallelism only. num_key_heads: None: equal to num_heads.
    shards_tokens: False if the family does not support sequence parallelism.
    """

    family: str
    num_heads: int | None
    num_key_heads: int | None = None
    shards_tokens: bool = True


class WeightPlacement(NamedTuple):
    """Distribution of a model's weights over ranks. stages: None if every rank runs every block."""

    stages: Stages | None = None
    tensor_degree: int = 1


EVERYWHERE = WeightPlacement()                      # every rank has all weights


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices available for a model's weights. memory_bytes: of each device. per_machine: config.devices_per_machine.
    machine: measured by a probe, or None."""

    memory_bytes: Sequence[float]
    per_machine: int = 0
    machine: Machine | None = None

    @property
    def smallest(self):
        return min(self.memory_bytes)

    @property
    def speeds(self):
        return () if self.machine is None else speeds_of(self.machine.devices)

    def holds(self, dims):
        """Whether all weights fit on every device."""
        return dims.resident_bytes <= FULL * self.smallest

    def divisors(self):
        """Divisors of the number of devices, above 1."""
        count = len(self.memory_bytes)
        return [degree for degree in range(2, count + 1) if count % degree == 0]


def choose_placement(config, dims, devices, is_splittable=lambda degree: True, has_stages=True, branches=(1, 2),
                     has_own_memory=False):
    """Choose the WeightPlacement when a model is loaded.

    Manual mode: the user's degrees. Auto mode:
    - If the weights fit on every device, or weights_memory is a number, every rank has all blocks.
    - If they do not fit: of PipeFusion and tensor parallelism, with degrees that fit, the fastest by estimate on
      devices.machine; an exact one if it is about as fast. If only exact methods are allowed, PipeFusion uses one
      patch, and its stages wait for each other.
    - If weights may be offloaded and a probe has measured the transfer rate, placements that do not fit compete as
      well, with part of their weights streamed.
    - Without a probe: PipeFusion (tensor parallelism if only exact methods are allowed) with the lowest degree that
      fits. If none fits, every rank has all blocks and offloads some.
    - Several machines: each machine, or an equal fraction of it, is a stage, so that tokens are sharded within a
      machine. If the weights fit on every device, and only exact methods are allowed or the estimate is as fast,
      machines split branches and images instead.
    is_splittable(tensor_degree): of the checkpoint. has_stages: of the family. branches: of usual runs. has_own_memory:
    whether the devices' memory is separate from the host's.
    """
    if config.mode == "manual":
        return _manual_placement(config, dims, devices)
    if config.weights_memory_bytes:
        return EVERYWHERE
    if devices.per_machine and has_stages:
        return _placement_over_machines(config, dims, devices, branches)
    if len(devices.memory_bytes) == 1 or devices.holds(dims):
        return EVERYWHERE
    staged = _staged(config, dims, devices) if has_stages else []
    split = [WeightPlacement(None, degree) for degree in _split_degrees(dims, devices) if is_splittable(degree)]
    fit_staged = [placement for placement in staged if _weights_fit(placement.stages, dims, devices.memory_bytes)]
    fit_split = [placement for placement in split
                 if weight_bytes(dims, Degrees(tensor=placement.tensor_degree)) <= FULL * devices.smallest]
    approximate, can_stream = config.may_differ, config.weights_memory_bytes is None
    if can_stream and devices.machine is not None and all(device.host_bytes_s for device in devices.machine.devices):
        return _fastest(config, dims, devices, [*staged, *split, EVERYWHERE], branches)
    if not fit_staged and not fit_split:                       # loading is rejected, with settings that would fit
        return EVERYWHERE if can_stream and has_own_memory else (
            (staged or split if approximate else split or staged) or [EVERYWHERE])[-1]
    fitting = fit_staged + fit_split if approximate else fit_split + fit_staged
    return (fitting[0] if devices.machine is None or len(fitting) == 1
            else _fastest(config, dims, devices, fitting, branches))


def _manual_placement(config, dims, devices):
    tensor_degree = config.tensor_degree
    if config.pipefusion_degree == 1:
        return WeightPlacement(None, tensor_degree)
    rank_shard = dims.resident_bytes / tensor_degree
    every_block = config.warmup == "sequence" or (config.warmup == "auto"
                                                  and rank_shard <= WARMUP_FULL * devices.smallest)
    stages = Stages(config.pipefusion_degree, config.layout.stage_ranks,
                    config.num_stage_blocks, every_block, config.offload_keys_values, devices.speeds)
    return WeightPlacement(stages, tensor_degree)


def _placement_over_machines(config, dims, devices, branches):
    count, per_machine, machine = len(devices.memory_bytes), devices.per_machine, devices.machine
    inside = [Stages(count // size, size, offload=config.offload_keys_values, speeds=devices.speeds)
              for size in range(per_machine, 0, -1)
              if per_machine % size == 0 and count // size <= dims.blocks]
    stages = next((each for each in inside if _weights_fit(each, dims, devices.memory_bytes)),
                  inside[-1] if inside else None)
    approximate = config.may_differ
    if stages is None or not devices.holds(dims) or (approximate and machine is None):
        return WeightPlacement(stages)
    if not approximate:
        return EVERYWHERE
    replicated_s, staged_s = (_usual_runs(config, dims, machine, WeightPlacement(each), branches).seconds
                         for each in (None, stages))
    return WeightPlacement(None if replicated_s <= WORTH * staged_s else stages)


def _staged(config, dims, devices):
    """All placements with stages."""
    count = len(devices.memory_bytes)
    return [WeightPlacement(Stages(degree, count // degree, offload=config.offload_keys_values, speeds=devices.speeds))
            for degree in devices.divisors() if degree <= dims.blocks]


def _split_degrees(dims, devices):
    """Tensor degrees for these devices, within a machine; none if a probe did not measure all-reduce."""
    machine, per_machine = devices.machine, devices.per_machine
    if machine is not None and not any(name == "all_reduce" for name, _ in machine.links.rates):
        return []
    allowed = tensor_degrees(dims)
    return [degree for degree in devices.divisors()
            if degree in allowed and (not per_machine or per_machine % degree == 0)]


def _fastest(config, dims, devices, placements, branches):
    """The placement whose usual runs have the lowest estimate, or an exact one that is nearly as fast."""
    usual = [(_usual_runs(config, dims, devices.machine, placement, branches), placement) for placement in placements]
    chosen = choose(sorted((made for made, _ in usual), key=lambda made: (not made.fits, made.seconds)),
                    identical=False)
    return next(placement for made, placement in usual if made is chosen)


def _usual_runs(config, dims, machine, placement, branches):
    """The Estimate of usual runs with each number of branches, one after the other: the sum of their seconds, and the
    other fields of the most demanding run."""
    made = [plan_run(config, machine, dims, usual_job(dims, each), *placement).chosen for each in branches]
    most = min(made, key=lambda one: (one.fits, one.is_exact, -one.memory.total))
    return dataclasses.replace(most, causes={"compute": sum(one.seconds for one in made)})


def usual_job(dims, branches=1):
    """The run that placements are compared by before the actual run is known."""
    return dataclasses.replace(USUAL_JOB, tokens=dims.usual_tokens, branches=branches)


def usual_branches(model_config):
    """Numbers of guidance branches in usual runs of a model: one if guidance is embedded, else one or two."""
    return (1,) if model_config.get("guidance_embeds") else (1, 2)


def tensor_degrees(dims):
    """Tensor degrees above 1: divisors of the numbers of heads and key heads."""
    return [degree for degree in range(2, dims.heads + 1) if dims.heads % degree == (dims.key_heads or dims.heads)
            % degree == 0]


def _weights_fit(stages, dims, device_bytes):
    """Whether the weights fit on these stages, with blocks distributed by free memory."""
    free_bytes = [FULL * min(size for rank, size in enumerate(device_bytes) if stage_of(rank, stages) == stage)
                  - dims.outside_bytes
                  for stage in range(stages.pipefusion_degree)]
    return min(free_bytes) > 0 and dims.resident_bytes - dims.outside_bytes <= sum(free_bytes)


class Faster(NamedTuple):
    """A placement with stages, chosen for speed, and the Estimates of a usual run with it and with the best exact
    layout."""

    placement: WeightPlacement
    staged: Estimate
    exact: Estimate

    @property
    def words(self):
        """Text for the user: the layouts and the estimated times."""
        return (f"{layout_description(self.staged)} for speed: a usual image is estimated to take "
                f"{describe_seconds(self.staged.seconds)} instead of {describe_seconds(self.exact.seconds)} by "
                f"{layout_description(self.exact)}")


def placement_for_speed(config, dims, devices, branches=(1, 2)):
    """A Faster placement for a model whose weights fit on every device; None if no placement with stages is FASTER
    times as fast as the best exact layout, or the devices have not been measured.

    devices: planner.Devices. branches: of usual runs, each of which must gain.
    """
    count, machine = len(devices.memory_bytes), devices.machine
    if machine is None or count == 1 or not has_stages_for_speed(config, dims, devices.smallest) or (
            config.requested_patches == 1 or devices.per_machine or config.weights_memory_bytes):
        return None
    jobs = [usual_job(dims, each) for each in branches]

    def plans(placement):
        return [plan_run(config, machine, dims, job, *placement).chosen for job in jobs]

    holds_all = [False, True] if config.warmup == "sequence" or (
        config.warmup == "auto" and dims.resident_bytes <= WARMUP_FULL * devices.smallest) else [False]
    staged = {}
    for degree in devices.divisors():
        for every_block in holds_all if degree <= dims.blocks else []:
            placement = WeightPlacement(Stages(degree, count // degree, (), every_block, config.offload_keys_values,
                                               devices.speeds))
            made = plans(placement)
            if all(one.fits for one in made):
                staged[placement] = made
    exact = plans(EVERYWHERE)
    if not staged:
        return None
    best = min(staged, key=lambda placement: sum(one.seconds for one in staged[placement]))
    if any(one.fits and one.seconds < FASTER * made.seconds for one, made in zip(exact, staged[best])):
        return None
    return Faster(best, staged[best][0], exact[0])


def has_stages_for_speed(config, dims, smallest_bytes):
    """Whether this model may be split into stages for speed, although its weights fit on every device. smallest_bytes:
    memory of the smallest device."""
    return (config.approximate == "for speed" and config.mode == "auto"
            and dims.resident_bytes <= FULL * smallest_bytes)


def describe_quality(config):
    """Text for the user: how close PipeFusion's images are to a single-GPU run."""
    how = "forecast" if config.forecast_keys_values > 0 else "as they were"
    return f"for speed: close to a single-GPU run ({PSNR_DB[how]} dB in the demo model with 4 patches)"


def choose_layout(config, num_devices, num_branches, attention, placement=EVERYWHERE, per_machine=0):
    """Return the Layout for one prediction on devices that no probe has measured; with a probe, use plan_run.

    Manual mode: the user's degrees. Auto mode: CFG parallelism if there are two branches and an even number of
    devices, then Ulysses as far as the heads allow, then Ring. CFG parallelism comes first because it sends only the
    prediction; Ulysses sends less than Ring (xDiT, arXiv 2411.01738, table 1).
    attention: the model's AttentionHeads. placement: from choose_placement. per_machine: config.devices_per_machine;
    tokens are sharded within one machine. Raises ConfigError if the layout is invalid for this model.
    """
    if config.mode == "manual":
        layout = config.layout
        validate_layout(layout, attention.num_heads, attention.family, attention.num_key_heads)
        return layout
    stages, tensor_degree = placement
    num_devices //= tensor_degree
    cfg_degree = 2 if num_branches == 2 and num_devices % 2 == 0 and stages is None else 1
    if attention.num_heads is None or not attention.shards_tokens:
        return Layout(cfg_degree=cfg_degree, data_degree=num_devices // cfg_degree, tensor_degree=tensor_degree)
    rest, data_degree = num_devices // cfg_degree if stages is None else stages.sequence_degree, 1
    if per_machine and stages is None:
        inside = math.gcd(rest, max(1, per_machine // tensor_degree))
        rest, data_degree = inside, rest // inside
    heads = attention.num_heads // tensor_degree
    ulysses_degree = max(d for d in range(1, rest + 1) if rest % d == 0 and heads % d == 0)
    return Layout(cfg_degree=cfg_degree, data_degree=data_degree, ring_degree=rest // ulysses_degree,
                  ulysses_degree=ulysses_degree,
                  pipefusion_degree=1 if stages is None else stages.pipefusion_degree, tensor_degree=tensor_degree)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Estimates of the chosen layout, of the fastest device alone, and of all possible layouts, best first."""

    chosen: Estimate
    one: Estimate
    ordered: list

    @property
    def layout(self):
        degrees = self.chosen.degrees
        return Layout(**{field.name: getattr(degrees, field.name.removesuffix("_degree"))
                         for field in dataclasses.fields(Layout)})


def is_long(dims, job, kind):
    """Whether a run may be so long that a probe of a few seconds is worthwhile, by usual rates of this kind of
    device (torch's device type)."""
    return estimate(dims, job, Degrees(), _usual_machine(kind)).seconds >= LONG_S


def is_long_work(work, kind):
    """is_long for a decode or encode. work: vae_cost.Work of all its items."""
    return work_seconds(work, _usual_machine(kind), 1) >= LONG_S


def _usual_machine(kind):
    return Machine((USUAL["cpu" if kind == "cpu" else "gpu"],), Links())


def plan_run(config, machine, dims, job, stages=None, tensor_degree=1, changed=()):
    """The Plan of a run on devices that a probe has measured. Manual mode: the user's degrees.

    Auto mode, with all blocks on every rank: exact layouts whose sequence parallelism stays within a machine. With
    stages: the splits of sequence parallelism within a stage.
    stages, tensor_degree: the WeightPlacement. changed: further arguments of memory_settings.
    """
    settings = memory_settings(config, stages, *changed)
    if config.mode == "manual":
        layouts = [degrees_of(config.layout, config, stages)]
    elif stages is None:
        of_rank = dataclasses.replace(dims, heads=dims.heads // tensor_degree)
        layouts = [dataclasses.replace(degrees, tensor=tensor_degree)
                   for degrees in candidates(of_rank, job, len(machine.devices) // tensor_degree,
                                             machine.links.per_machine // tensor_degree)
                   if degrees.pipefusion == 1 and not machine.links.crosses(degrees.sequence * tensor_degree)]
    else:
        layouts = [degrees_of(Layout(pipefusion_degree=stages.pipefusion_degree, ulysses_degree=ulysses,
                                     ring_degree=stages.sequence_degree // ulysses), config, stages)
                   for ulysses in range(1, stages.sequence_degree + 1) if stages.sequence_degree % ulysses == 0
                   and dims.heads % ulysses == 0]
    ordered = estimates(dims, job, machine, layouts, settings)
    if stages is not None and not config.requested_patches and any(one.memory.streamed for one in ordered):
        layouts = [dataclasses.replace(degrees, num_patches=count) for degrees in layouts
                   for count in streamed_patches(stages)]
        ordered = estimates(dims, job, machine, layouts, settings)
    fastest = dataclasses.replace(machine, devices=(max(machine.devices, key=lambda device: device.matrix_flops_s),))
    one = estimate(dims, job, Degrees(), fastest, memory_settings(config, None, *changed))
    return Plan(choose(ordered, are_identical(dims, job, machine.devices)), one, ordered)


def streamed_patches(stages):
    """Candidate numbers of patches for stages that stream offloaded weights: as few as keep all stages busy, or one, so
    that weights are streamed once per step while stages wait for each other.

    Grouping more patches into the same number of passes through a block gains nothing: stages are busy only if each has
    a pass of its own, and a single pass over all patches keeps them waiting as one patch does, which is exact.
    """
    return stages.pipefusion_degree, 1


def memory_settings(config, stages=None, has_lora=False, added_bytes=0.0):
    """The MemorySettings for a ParallelConfig. stages: of the WeightPlacement. Others: fields of MemorySettings."""
    own, staged = config.weights_memory_bytes, stages is not None
    return MemorySettings(config.cached_steps, staged and stages.offload,
                          staged and config.warmup in ("auto", "micro_batches"),
                          weights_memory=math.inf if own is None else own, has_lora=has_lora, added_bytes=added_bytes)


def degrees_of(layout, config, stages=None):
    """A Layout as Degrees for the cost model."""
    degrees = {field.name.removesuffix("_degree"): getattr(layout, field.name) for field in dataclasses.fields(layout)}
    num_patches = (config.requested_patches or 2 * layout.pipefusion_degree) if layout.pipefusion_degree > 1 else 0
    is_synchronous = layout.displaced_degree > 1 and config.displaced_mode == "full_sync"
    return Degrees(**degrees, num_patches=num_patches, warmup_steps=sys.maxsize if is_synchronous
                   else config.warmup_steps, warmup_by_sequence=stages is not None and stages.every_block)


def choose_num_patches(requested, num_stages, shape, patch_size, sequence_degree=1):
    """The number of patches that a latent is split into; fewer than requested if it has too few rows.

    requested 0: twice the number of stages, since one patch more than stages hides the hop through system RAM, and more
    than two per stage make kernels small (docs/design/pipefusion.md). A patch has at least one token for every
    sequence rank.
    """
    dim = patch_dim(shape, patch_size)
    rows = -(-shape[dim] // patch_size[dim - 2])
    tokens_a_row = num_tokens(shape[dim + 1:], patch_size[dim - 1:])
    rows_needed = -(-sequence_degree // tokens_a_row)
    return max(1, min(requested or 2 * num_stages, rows // rows_needed))


def warmup_layout(layout, stages):
    """The layout of synchronous steps: all ranks as one sequence group if every rank has all blocks."""
    if not stages.every_block:
        return layout
    return dataclasses.replace(layout, pipefusion_degree=1, ring_degree=layout.pipefusion_degree * layout.ring_degree)


def branches_together(layout):
    """The layout for a call that compares images in each layer, so that they cannot be split across data ranks: the
    data axis moves to CFG, and ranks beyond the branches are idle."""
    return dataclasses.replace(layout, cfg_degree=layout.data_degree * layout.cfg_degree, data_degree=1)
