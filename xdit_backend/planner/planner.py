"""The automatic choice of a parallel method for a run, and its description for a person. Pure arithmetic.

Called by the host alone, before a model is loaded and before a run; the workers follow what a command names.
"""

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

USUAL = {"cuda": Device(1e14, 1e14, 1e12), "cpu": Device(5e10, 3e10, 1e10, block_launch_s=5e-4)}
LONG_S = 20.0                              # of a run, on one usual device: from then on devices are measured before it
USUAL_JOB = Job(4096, 512, 20)             # a picture of a megapixel


@dataclasses.dataclass(frozen=True)
class AttentionHeads:
    """What of a model's attention a layout has to fit. family: the model's, for a person.

    num_heads: None of a U-Net, which shares out branches and images alone. num_key_heads: None: as many.
    shards_tokens: False where the family refuses it.
    """

    family: str
    num_heads: int | None
    num_key_heads: int | None = None
    shards_tokens: bool = True


class WeightPlacement(NamedTuple):
    """How the weights of a model are spread over ranks. stages: None where every rank runs every block."""

    stages: Stages | None = None
    tensor_degree: int = 1


EVERYWHERE = WeightPlacement()                      # every rank has all weights


@dataclasses.dataclass(frozen=True)
class Devices:
    """What weights are spread over. memory_bytes: of each device. per_machine: config.devices_per_machine. machine: of
    a probe, or None."""

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
        """Has each of them room for all weights?"""
        return dims.resident_bytes <= FULL * self.smallest

    def divisors(self):
        """Degrees above 1 that divide their number."""
        count = len(self.memory_bytes)
        return [degree for degree in range(2, count + 1) if count % degree == 0]


def choose_layout(config, num_devices, num_branches, attention, placement=EVERYWHERE, per_machine=0):
    """Return the Layout for one prediction where no probe has measured the devices; plan_run knows better where one
    has.

    Manual mode: the person's degrees. Auto mode: CFG parallel when there are two branches and an even number of
    devices, then Ulysses as far as the heads allow, then Ring. CFG parallel comes first because it sends only the
    prediction; Ulysses sends less than Ring (xDiT, arXiv 2411.01738, table 1).
    attention: the model's AttentionHeads. spread: of choose_placement. per_machine: config.devices_per_machine; tokens
    are shared within one. Raises ConfigError when the layout cannot work for this model.
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


# where all weights take less, every rank holds them, so that warm-up runs by sequence parallelism
WARMUP_FULL = 0.4


def choose_placement(config, dims, devices, is_splittable=lambda degree: True, has_stages=True, branches=(1, 2),
                  has_own_memory=False):
    """The Spread of the weights when a model is loaded.

    Manual mode: the person's degrees. Auto mode: where the weights do not fit on one device, of PipeFusion and tensor
    parallelism and of degrees that fit, the fastest by forecast (of the Devices' machine), the exact one if that is
    about as fast. Where nothing approximate is allowed, PipeFusion has one patch, and stages wait for each other.
    Without a probe PipeFusion, or tensor parallelism where nothing approximate is allowed, and the least degree.
    Where there are several machines, these, or equal parts of them, are stages, so that tokens are shared within one.
    Where the weights fit on each device, and nothing approximate is allowed or it is forecast to be as fast, machines
    share branches and images. Where weights may come from host memory, and a probe has measured how fast, all spreads
    count as well whose weights do not fit, with those that come. Without a probe, where no spread fits, and where a
    number of weights_memory is given, every rank has all blocks, and weights come.
    is_splittable(tensor_degree), has_stages, has_own_memory: of the file, the family, the devices. branches: of runs.
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
    if not fit_staged and not fit_split:                       # refused when the model is loaded, with what would fit
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
    return WeightPlacement(Stages(config.pipefusion_degree, config.ring_degree * config.ulysses_degree * tensor_degree,
                         config.num_stage_blocks, every_block, config.offload_keys_values, devices.speeds),
                  tensor_degree)


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
    whole_s, staged_s = (_usual_runs(config, dims, machine, WeightPlacement(each), branches).seconds
                         for each in (None, stages))
    return WeightPlacement(None if whole_s <= WORTH * staged_s else stages)


def _staged(config, dims, devices):
    """All spreads over stages."""
    count = len(devices.memory_bytes)
    return [WeightPlacement(Stages(degree, count // degree, offload=config.offload_keys_values, speeds=devices.speeds))
            for degree in devices.divisors() if degree <= dims.blocks]


def _split_degrees(dims, devices):
    """The tensor degrees of these devices, within a machine; none where a probe has not measured what they need."""
    machine, per_machine = devices.machine, devices.per_machine
    if machine is not None and not any(name == "all_reduce" for name, _ in machine.links.rates):
        return []
    allowed = tensor_degrees(dims)
    return [degree for degree in devices.divisors()
            if degree in allowed and (not per_machine or per_machine % degree == 0)]


def _fastest(config, dims, devices, spreads, branches):
    """Of several spreads, the one whose usual runs are forecast to be the fastest, or an exact one that nearly is."""
    usual = [(_usual_runs(config, dims, devices.machine, placement, branches), placement) for placement in spreads]
    chosen = choose(sorted((made for made, _ in usual), key=lambda made: (not made.fits, made.seconds)),
                    identical=False)
    return next(placement for made, placement in usual if made is chosen)


def _usual_runs(config, dims, machine, placement, branches):
    """The Forecast of a usual run with each of these numbers of branches, one after the other: all else than their
    seconds is of the one that asks most."""
    made = [plan_run(config, machine, dims, usual_job(dims, each), *placement).chosen for each in branches]
    most = min(made, key=lambda one: (one.fits, one.is_exact, -one.memory.total))
    return dataclasses.replace(most, causes={"compute": sum(one.seconds for one in made)})


def usual_job(dims, branches=1):
    """What weights are spread for, before a run is known."""
    return dataclasses.replace(USUAL_JOB, tokens=dims.usual_tokens, branches=branches)


def usual_branches(model_config):
    """Of runs of a model: one where guidance is built in, else one or two."""
    return (1,) if model_config.get("guidance_embeds") else (1, 2)


def tensor_degrees(dims):
    """That divide the heads, above 1."""
    return [degree for degree in range(2, dims.heads + 1) if dims.heads % degree == (dims.key_heads or dims.heads)
            % degree == 0]


def _weights_fit(stages, dims, device_bytes):
    """Do the weights fit on these stages? Blocks go where there is room for them."""
    free_bytes = [FULL * min(size for rank, size in enumerate(device_bytes) if stage_of(rank, stages) == stage)
             - dims.outside_bytes
             for stage in range(stages.pipefusion_degree)]
    return min(free_bytes) > 0 and dims.resident_bytes - dims.outside_bytes <= sum(free_bytes)


# --- the choice by forecast ---

@dataclasses.dataclass(frozen=True)
class Plan:
    """Forecasts: of the layout that a run takes, of the fastest device alone, and of all layouts that could be taken,
    the best first."""

    chosen: Estimate
    one: Estimate
    ordered: list

    @property
    def layout(self):
        degrees = self.chosen.degrees
        return Layout(**{field.name: getattr(degrees, field.name.removesuffix("_degree"))
                         for field in dataclasses.fields(Layout)})


def is_long(dims, job, kind):
    """May a run be so long that a few seconds of measuring before it are worth their time? By usual rates of a device
    of this kind."""
    usual = Machine((USUAL[kind],), Links())
    return estimate(dims, job, Degrees(), usual).seconds >= LONG_S


def is_long_work(work, kind):
    """As is_long, of a decode or encode: planner.vae_cost.Work of all its items."""
    return work_seconds(work, Machine((USUAL[kind],), Links()), 1) >= LONG_S


def plan_run(config, machine, dims, job, stages=None, tensor_degree=1, changed=()):
    """The Plan of a run on devices that a probe has measured. Manual mode: the person's degrees.

    Auto mode: where every rank has all blocks, only layouts whose picture is one device's, whose ranks share tokens
    within a machine; with stages, how their ranks share tokens.
    stages, tensor_degree: how the model is spread, of choose_placement. changed: as memory_settings'.
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
    """Numbers of patches of stages whose weights come from host memory, of which a forecast chooses: as few as keep
    all stages busy, or one, for which they come once a step, while stages wait for each other.

    More patches in the same number of passes through a block would win nothing: stages are busy only while each has
    a pass of its own, and one pass of all patches keeps them waiting as one patch does, whose picture is exact.
    """
    return stages.pipefusion_degree, 1


def memory_settings(config, stages=None, has_lora=False, added_bytes=0.0):
    """The MemorySettings of a ParallelConfig. stages: how the model is spread. Others: MemorySettings'."""
    own, staged = config.weights_memory_bytes, stages is not None
    return MemorySettings(config.cached_steps, staged and stages.offload,
                          staged and config.warmup in ("auto", "micro_batches"),
                          weights_memory=math.inf if own is None else own, has_lora=has_lora, added_bytes=added_bytes)


def degrees_of(layout, config, stages=None):
    """A Layout as the forecast takes it."""
    given = {field.name.removesuffix("_degree"): getattr(layout, field.name) for field in dataclasses.fields(layout)}
    num_patches = (config.requested_patches or 2 * layout.pipefusion_degree) if layout.pipefusion_degree > 1 else 0
    is_synchronous = layout.displaced_degree > 1 and config.displaced_mode == "full_sync"
    return Degrees(**given, num_patches=num_patches, warmup_steps=sys.maxsize if is_synchronous
                   else config.warmup_steps, warmup_by_sequence=stages is not None and stages.every_block)


def choose_num_patches(requested, num_stages, shape, patch_size, sequence_degree=1):
    """How many patches a latent is cut into; fewer than requested where it has too few rows.

    0 requested: twice the stages, since a patch more than there are stages hides the way through the host, and more
    than two a stage make kernels small (docs/design/pipefusion.md). A patch has at least one token for every
    sequence rank.
    """
    dim = patch_dim(shape, patch_size)
    rows = -(-shape[dim] // patch_size[dim - 2])
    tokens_a_row = num_tokens(shape[dim + 1:], patch_size[dim - 1:])
    rows_needed = -(-sequence_degree // tokens_a_row)
    return max(1, min(requested or 2 * num_stages, rows // rows_needed))


def warmup_layout(layout, stages):
    """The layout of whole steps: the same ranks as one sequence group where every rank holds all blocks."""
    if not stages.every_block:
        return layout
    return dataclasses.replace(layout, pipefusion_degree=1, ring_degree=layout.pipefusion_degree * layout.ring_degree)


def branches_together(layout):
    """The layout of a call whose images may not be apart, as something compares them in each layer: others rest."""
    return dataclasses.replace(layout, cfg_degree=layout.data_degree * layout.cfg_degree, data_degree=1)


FASTER = 1.15                              # times as fast as the best exact layout that stale keys and values must be
# decibels of the demo model's pictures to one device's, 4 patches and a warm-up step (docs/benchmarks.md)
PSNR_DB = {"forecast": 43, "as they were": 37}


class Faster(NamedTuple):
    """A Spread over stages, and Forecasts of a usual run: its own, and of the best layout whose picture is one
    device's."""

    placement: WeightPlacement
    staged: Estimate
    exact: Estimate

    @property
    def words(self):
        """What it gains and costs, for a person."""
        return (f"{layout_description(self.staged)} for speed: a usual picture is forecast to take "
                f"{describe_seconds(self.staged.seconds)} instead of {describe_seconds(self.exact.seconds)} by "
                f"{layout_description(self.exact)}")


def placement_for_speed(config, dims, devices, branches=(1, 2)):
    """The Faster spread of a model whose weights fit on each device; None where nothing is FASTER than the best exact
    layout, or the devices were not measured.

    devices: planner.Devices. branches: of usual runs, each of which has to gain.
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
    """Does this model have stages, if it has any, though its weights fit on each device? smallest_bytes: memory of the
    smallest device."""
    return (config.approximate == "for speed" and config.mode == "auto"
            and dims.resident_bytes <= FULL * smallest_bytes)


def describe_quality(config):
    """How near PipeFusion's pictures are to one device's, for a person."""
    how = "forecast" if config.forecast_keys_values > 0 else "as they were"
    return f"for speed: near to one device's picture ({PSNR_DB[how]} dB in the demo model with 4 patches)"
