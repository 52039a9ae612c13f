"""Memory fit: whether a model and its run fit on the devices of a worker group, before a run and after a worker was out
of memory, and the settings with which they would fit. Arithmetic only."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..config import ParallelConfig
from ..protocol.devices import own_name
from ..protocol.errors import ConfigError
from ..protocol.specs import Stages
from .cost_model import Degrees, Job, ModelDims
from .descriptions import describe_layout, gigabytes
from .layout_search import candidates
from .memory_model import (
    DEFAULT_SETTINGS,
    Memory,
    has_parts,
    memory_budget,
    most_that_fits,
    rank_blocks,
    rank_memory,
)
from .planner import memory_settings, tensor_degrees

NOTHING = Memory(0.0, 0.0, 0.0)
SMALLEST_JOB = Job(1, 0, 1)                # of a check of the weights alone
HOST = "this machine's system RAM"
MOST_SUGGESTED = 16                        # larger numbers of devices are not suggested
AXES = "cfg", "data", "ulysses", "ring", "tensor", "displaced", "pipefusion"
# memory that scales with the size of a run
OF_A_RUN = ("key_value_bytes", "exchange_bytes", "conditioning_bytes", "activation_bytes")
# weight_dtype -> size relative to 16-bit weights: 8 bits a number; nf4 has 36 bytes for 64 numbers
OF_16_BITS = {"fp8_e4m3fn": 0.5, "int8": 0.5, "nf4, with the package bitsandbytes": 36 / 128}
MIN_BYTES = 2 ** 20                        # smaller amounts are not reported
OF_WEIGHTS = ("LoadModel", "RestoreModel", "ChangeWeights", "ReturnWeights", "LoadNetwork", "LoadAutoencoder")
OF_A_VAE, OF_AN_UPSCALER = ("Decode", "Encode"), ("Upscale", "LoadUpscaler")


@dataclass(frozen=True)
class DeviceMemory:
    """devices, device_bytes, weight_bytes: for each rank, the name of its device, that device's total memory, and the
    bytes of weights that the rank adds there. num_here: number of ranks on this machine. host_bytes: its free system
    RAM for offloaded tensors."""

    devices: Sequence[str]
    device_bytes: Sequence[float]
    weight_bytes: Sequence[float]
    num_here: int = 0
    host_bytes: float = 0


@dataclass(frozen=True)
class Latents:
    """The latents to be sampled. needed(images, sizes): Memory of a rank without weights, for this number of images of
    a latent with these sizes (without batch and channels). pixels: image pixels per latent row and column."""

    needed: Callable[[int, tuple], Memory]
    images: int
    sizes: tuple
    pixels: tuple

    def memory(self):
        return self.needed(self.images, self.sizes)


@dataclass(frozen=True)
class Hints:
    """Other settings that may fit. placement: texts of placements on more devices. lighter(): {other weight_dtype: its
    weight_bytes}. other_settings: {text of a setting: its Latents.needed}."""

    placement: Sequence[str] = ()
    lighter: Callable[[], dict] = dict
    other_settings: dict[str, Callable] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupMemory:
    """Memory of a model on the devices of a worker group.

    plan_of(budget_bytes, blocks): the OffloadPlan of a rank with these blocks, or with all if None, whose weights may
    take budget_bytes of its device. dims: None for a U-Net; its runs take unet_memory(sizes, (images, branches),
    degrees, cached_steps=, num_tokens=). refused: methods that the family does not support. devices, device_bytes: for
    each rank, its device's name and total memory.
    """

    config: ParallelConfig
    stages: Stages | None
    dims: ModelDims | None
    refused: Any
    devices: Sequence[str]
    device_bytes: Sequence[float]
    plan_of: Callable
    unet_memory: Callable | None = None

    @property
    def has_stage_blocks(self):
        """Whether a rank has only the blocks of its stage."""
        return has_parts(self.dims, self.stages)

    def resident(self, budget_bytes):
        """([bytes of each rank's resident weights], [bytes streamed per step, or per patch]), if weights may take
        budget_bytes of each device."""
        blocks = (rank_blocks(self.dims, self.stages, self.device_bytes) if self.has_stage_blocks
                  else [None] * len(self.device_bytes))
        plans = {own: self.plan_of(budget_bytes, own) for own in set(blocks)}
        return [plans[own].device_bytes for own in blocks], [plans[own].offloaded_bytes for own in blocks]

    def most_resident(self, budget_bytes):
        return max(self.resident(budget_bytes)[0])

    @property
    def least_bytes(self):
        """Least bytes that weights take on a device."""
        return self.most_resident(1)

    @property
    def rank_budget(self):
        """Memory budget of a rank on the device with the least per rank."""
        return min(memory_budget(size / self.devices.count(device))
                   for device, size in zip(self.devices, self.device_bytes))

    def weights_memory(self, run_bytes):
        """ModelSpec.weights_memory with the setting "auto", for a run that takes so many bytes of a rank in addition to
        weights."""
        return weights_memory_in(self.rank_budget - run_bytes, self.most_resident)

    def settings(self, has_lora=False, added_bytes=0.0):
        return memory_settings(self.config, self.stages, has_lora, added_bytes)

    def run_memory(self, job, batch, sizes, degrees, settings, **text):
        """Memory of the fullest rank in a run. job: None for a U-Net; batch: its (images, branches); sizes: of its
        latent, without batch and channels; text: num_tokens, if known."""
        if self.dims is not None:
            return rank_memory(self.dims, job, degrees, settings)
        return self.unet_memory(sizes, batch, degrees, cached_steps=settings.cached_steps, **text)

    def placement(self, job, device_bytes=None):
        """[text] of numbers of devices on which a run would fit. device_bytes: of each; None: the smallest here."""
        return placement_that_fits(self.config, self.dims, self.refused, job,
                                   min(self.device_bytes) if device_bytes is None else device_bytes)

    def check_weights(self, title, resident_bytes, may_offload, lighter):
        """Raise ConfigError if the weights do not fit on a device.

        resident_bytes(weights): bytes that each rank adds to its device, for [bytes of its weights]. may_offload:
        weights can be offloaded to system RAM. lighter: of Hints.
        """
        config, least = self.config, self.least_bytes
        configured, num_devices = config.weights_memory_bytes, len(self.devices)
        if configured and least > configured:
            raise ConfigError(f'Set weights_memory to "auto", or to {math.ceil(least / 1e7) / 100} GB or '
                              f"more: the weights of {title} outside its blocks and those of two blocks "
                              f"need that much of each device, and "
                              f'weights_memory="{config.weights_memory}" is less.')
        hints = self.placement(SMALLEST_JOB)
        if configured == 0 and may_offload and least <= self.rank_budget:
            hints.insert(0, 'weights_memory "auto", which offloads weights to system RAM')
        check_memory(f"{title} over {num_devices} device{'s' if num_devices > 1 else ''}",
                     DeviceMemory(self.devices, self.device_bytes, resident_bytes), Hints(hints, lighter))

    def run_hints(self, needed, settings, job, lighter):
        """Hints for a run. needed(images, sizes, settings): Memory of a rank without weights."""
        without = functools.partial(needed, settings=replace(settings, cached_steps=1))
        return Hints(self.placement(job), lighter,
                     {"forecast_keys_values 0": without} if settings.cached_steps > 1 else {})

    def check_run(self, layout, weight_bytes, latents, hints, **host):
        """Raise ConfigError if a run does not fit. weight_bytes: that each rank adds to its device. host: num_here and
        host_bytes of DeviceMemory."""
        check_memory(f"this run ({describe_layout(layout)})",
                     DeviceMemory(self.devices, self.device_bytes, weight_bytes, **host), hints, latents)

    def streaming_that_fits(self, free_bytes, resident_bytes):
        """[text] of the weights_memory with which weights take at most free_bytes, and less than resident_bytes."""
        setting = weights_memory_in(max(0.0, free_bytes), self.most_resident)
        if not setting or not self.most_resident(setting) <= min(free_bytes, resident_bytes):
            return []
        return [f'weights_memory "{math.floor(setting / 1e7) / 100:g}", with which the other weights are streamed from '
                "system RAM"]


def weights_memory_in(free_bytes, resident_of):
    """The value of ModelSpec.weights_memory if resident weights may take this many bytes of a device.
    resident_of(budget): bytes of weights that are resident with a budget in bytes."""
    return 0 if resident_of(math.inf) <= free_bytes else int(max(free_bytes, resident_of(1)))


# --- before a run ---

def check_memory(what, ranks, hints, latents=None):
    """Raise ConfigError if a device is too small for what its ranks need.

    what: name of the run, for the message. latents: None: only weights are checked.
    """
    fullest = _fullest(ranks, latents)
    if fullest.lacks <= 0:
        return
    needed = fullest.needed
    breakdown = {"weights": needed.weights, "keys and values": needed.keys_values, "activations": needed.activations}
    text = ", ".join(f"{part / 1e9:.3g} GB of {name}" for name, part in breakdown.items() if part)
    would = settings_that_fit(ranks, hints, latents)
    raise ConfigError(f"Use {'; or '.join(would) or 'more devices, or larger ones'}: {what} needs about "
                      f"{needed.total / 1e9:.3g} GB on {fullest.device} ({text}), and that has "
                      f"{fullest.has / 1e9:.3g} GB.")


def settings_that_fit(ranks, hints, latents=None):
    """[text] of latent sizes and settings with which it would fit."""
    return [*(_latents_that_fit(ranks, latents) if latents is not None else ()),
            *_settings_that_fit(ranks, hints, latents, _fullest(ranks, latents).device)]


@dataclass(frozen=True)
class Fullest:
    """The device that lacks most: bytes that it lacks, bytes that its ranks need, total bytes."""

    lacks: float
    device: str
    needed: Memory
    has: float


def _fullest(ranks, latents):
    memory = latents.memory() if latents is not None else NOTHING
    found = []
    for device in dict.fromkeys(ranks.devices):
        on_it = [rank for rank, name in enumerate(ranks.devices) if name == device]
        needed = Memory(sum(ranks.weight_bytes[rank] for rank in on_it), memory.keys_values * len(on_it),
                        memory.activations * len(on_it))
        has = ranks.device_bytes[on_it[0]]
        found.append(Fullest(needed.total - has, device, needed, has))
    if memory.host and ranks.num_here:
        in_host = memory.host * ranks.num_here
        found.append(Fullest(in_host - ranks.host_bytes, HOST, Memory(0.0, in_host, 0.0), ranks.host_bytes))
    return max(found, key=lambda each: each.lacks)


def _fits(ranks, latents):
    return _fullest(ranks, latents).lacks <= 0


def _latents_that_fit(ranks, latents):
    """Texts of how many images at once, and of what size, would fit."""
    images, sizes, pixels = latents.images, latents.sizes, latents.pixels
    rows, columns = sizes[-2:]
    fewer = most_that_fits(lambda count: _fits(ranks, replace(latents, images=count)), images - 1)
    smaller = most_that_fits(lambda row: _fits(ranks, replace(latents, sizes=_scaled(sizes, row))), rows - 1)
    if fewer:
        yield f"at most {fewer} of the {images} images at once"
    if smaller:
        height, width = (size * pixel for size, pixel in zip(_scaled(sizes, smaller)[-2:], pixels))
        yield f"at most {width} x {height} pixels instead of {columns * pixels[1]} x {rows * pixels[0]}"


def _settings_that_fit(ranks, hints, latents, device):
    """Texts of other settings with which it would fit. device: the fullest."""
    for text, needed in hints.other_settings.items():
        if _fits(ranks, replace(latents, needed=needed)):
            yield text
    if device != HOST:
        yield from hints.placement
    types = [f"{name} ({sum(size for size, on in zip(sizes, ranks.devices) if on == device) / 1e9:.3g} GB of weights)"
             for name, sizes in hints.lighter().items() if _fits(replace(ranks, weight_bytes=sizes), latents)]
    if types:
        yield f"weight_dtype {' or '.join(types)}"


def _scaled(sizes, rows):
    """Sizes of a latent with the same aspect ratio and this many rows."""
    return (*sizes[:-2], rows, max(1, rows * sizes[-1] // sizes[-2]))


# --- more devices ---

def stages_that_fit(config, dims, job, device_bytes):
    """The lowest pipefusion_degree with which a run would fit on as many devices of this memory; None: none does."""
    stages = Stages(2, offload=config.offload_keys_values)
    settings = memory_settings(config, stages)
    return next((degree for degree in range(2, dims.blocks + 1)
                 if rank_memory(dims, job, Degrees(pipefusion=degree, num_patches=2 * degree), settings).total
                 <= device_bytes), None)


def tensor_degree_that_fits(dims, job, device_bytes):
    """The lowest tensor_degree with which a run would fit, as stages_that_fit."""
    return next((degree for degree in tensor_degrees(dims)
                 if rank_memory(dims, job, Degrees(tensor=degree)).total <= device_bytes), None)


def placement_that_fits(config, dims, refused, job, device_bytes):
    """[text] with the degree, and thus the number of devices of this memory, with which a run would fit; [] if it is
    above MOST_SUGGESTED. Only exact methods if config allows no others. dims: None: U-Net. refused: methods that the
    family does not support."""
    if dims is None:
        return []
    if config.may_differ and "pipefusion" not in refused:
        name, degree = "pipefusion_degree", stages_that_fit(config, dims, job, device_bytes)
    elif "tensor" in refused:
        return []
    else:
        name, degree = "tensor_degree", tensor_degree_that_fits(dims, job, device_bytes)
    return [f"{name}={degree} on as many devices like these"] if degree and degree <= MOST_SUGGESTED else []


# --- after a worker was out of memory ---

@dataclass(frozen=True)
class Measured:
    """Bytes of the rank that ran out of memory: of its weights; of the run, including the failed request; of its
    device, available for both."""

    device: str
    weights: float
    run: float
    total: float

    def factor(self, estimate):
        """Ratio of the measured use to a run's estimate, a Memory; at least 1."""
        return max(1.0, self.run / max(1.0, estimate.keys_values + estimate.activations))


def sizes_that_fit(measured, latents, hints):
    """Numbers and sizes of images, and other settings, that would fit: [text]. hints: for one rank's weights."""
    factor = measured.factor(latents.memory())

    def scaled(needed):
        return lambda images, sizes: _times(needed(images, sizes), factor)
    rank = DeviceMemory([measured.device], [measured.total], [measured.weights])
    settings = {name: scaled(needed) for name, needed in hints.other_settings.items()}
    return settings_that_fit(rank, replace(hints, other_settings=settings),
                             replace(latents, needed=scaled(latents.needed)))


@dataclass(frozen=True)
class Method:
    """Constraints on other layouts. degrees: of the run that was out of memory. refused: methods that the family does
    not support. may_differ: allow approximate results."""

    degrees: Degrees
    refused: tuple = ()
    may_differ: bool = False

    def allows(self, other):
        used = {axis for axis in AXES if getattr(other, axis) > 1}
        refused = {*self.refused, *(("ring",) if "ulysses" in self.refused else ())}
        same = all(getattr(other, axis) == getattr(self.degrees, axis) for axis in AXES)
        return not same and not used & refused and (self.may_differ or other.pipefusion == 1)


def layouts_that_fit(measured, dims, job, method, settings=DEFAULT_SETTINGS, has_all_weights=True):
    """The other layout of the same devices that needs least memory, preferably an exact one: [text], or [] if none
    fits. has_all_weights: all weights of the rank were resident."""
    num_devices, current = method.degrees.devices, rank_memory(dims, job, method.degrees, settings)
    factor = measured.factor(current)
    of_weights = measured.weights / current.weights if has_all_weights and current.weights else 1.0

    def total(degrees):
        needed = rank_memory(dims, job, degrees, settings)
        return needed.weights * of_weights + factor * (needed.keys_values + needed.activations)
    others = [*candidates(dims, job, num_devices),
              *(Degrees(tensor=degree) for degree in tensor_degrees(dims) if degree == num_devices)]
    fitting = [(degrees.pipefusion > 1, total(degrees), degrees) for degrees in others if method.allows(degrees)]
    fitting = [each for each in fitting if each[1] <= measured.total]
    if not fitting:
        return []
    _, num_bytes, degrees = min(fitting, key=lambda each: each[:2])
    text = " and ".join(f"{axis}_degree={getattr(degrees, axis)}" for axis in AXES if getattr(degrees, axis) > 1)
    return [f"{text} on the same devices (about {num_bytes / 1e9:.3g} GB of {measured.total / 1e9:.3g} GB each)"]


def _times(memory, factor):
    return Memory(memory.weights, memory.keys_values * factor, memory.activations * factor)


def run_bytes(numbers):
    """(bytes that a rank used or requested in addition to weights, bytes that were available for that)."""
    taken = sum(numbers.get(key, 0) for key in OF_A_RUN)
    return taken + numbers.get("requested_bytes", 0), taken + numbers.get("free_bytes", 0)


def remedies(numbers, num_ranks, command="Predict", device=""):
    """Suggest settings that would fit, in a sentence.

    They are upper bounds: the run needs at least the memory that it used and requested, and may need more. command:
    name of its message. device: the one that ran out of memory; "": a GPU.
    """
    if command in OF_AN_UPSCALER:
        hints = ["a smaller upscale model"]
        if (weights := numbers.get("weight_bytes", 0)) >= 2 ** 30:
            hints.append(f"the device without loaded models, which take {gigabytes(weights)} (ComfyUI's Unload Models)")
    else:
        hints = [] if command in OF_WEIGHTS else _of_sizes(numbers, num_ranks, command in OF_A_VAE)
    if command not in (*OF_A_VAE, *OF_AN_UPSCALER):
        hints += _of_weights(numbers, own_name(device) != "cpu", command in OF_WEIGHTS)
    if (others := numbers.get("other_bytes", 0)) >= 2 ** 30:
        hints.append(f"the device without other programs, which take {gigabytes(others)} (nvidia-smi shows them)")
    return f"Use {'; or '.join(hints) or 'larger devices'}."


def _of_sizes(numbers, num_ranks, is_of_vae):
    needed, available = run_bytes(numbers)
    smaller = "a smaller image" if is_of_vae else "a smaller latent"
    if needed - numbers.get("requested_bytes", 0) < MIN_BYTES or available >= needed:
        return [smaller, "more devices"]
    fraction, devices = available / needed, max(num_ranks + 1, math.ceil(num_ranks * needed / available))
    return [f"{smaller} or batch: at most {fraction:.0%} of these pixels (each side times {math.sqrt(fraction):.2f}), "
            f"frames or images fit next to the weights",
            f"at least {devices} devices for Distributed VAE Decode or Encode" if is_of_vae
            else f"at least {devices} devices with ulysses_degree or ring_degree"]


def _of_weights(numbers, can_stream, is_load):
    weights, lacking = numbers.get("weight_bytes", 0), numbers.get("requested_bytes", 0) - numbers.get("free_bytes", 0)
    hints = []
    if can_stream and is_load:
        hints.append('weights_memory "auto", or fewer GB than now, with which weights are streamed from system RAM')
    elif can_stream and 0 < lacking < weights - MIN_BYTES:
        cached = math.floor((weights - lacking) / 1e7) / 100
        hints.append(f'weights_memory "{cached:g}", with which the other weights are streamed from system RAM')
    if weights >= MIN_BYTES:
        types = [f"{name} ({gigabytes(weights * share)})" for name, share in OF_16_BITS.items()
                 if weights * (1 - share) >= lacking]
        if types:
            hints.append(f"instead of 16-bit weights, weight_dtype {' or '.join(types)}")
    if weights >= MIN_BYTES or is_load:
        hints.append("pipefusion_degree or tensor_degree, which shard the weights over the devices")
    return hints
