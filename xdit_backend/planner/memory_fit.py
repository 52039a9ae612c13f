"""Rejects a run that needs more memory than a device has, before it starts, and suggests settings that would fit.
Arithmetic only."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..protocol.errors import ConfigError
from .memory_model import Memory, has_parts, memory_budget, most_that_fits, rank_blocks

NOTHING = Memory(0.0, 0.0, 0.0)
HOST = "this machine's system RAM"


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


def rank_memory_budget(devices, device_bytes):
    """Memory budget of a rank on the device with the least per rank. devices, device_bytes: for each rank, its device's
    name and total memory."""
    return min(memory_budget(size / devices.count(device)) for device, size in zip(devices, device_bytes))


def weights_memory_in(free_bytes, resident_of):
    """The value of ModelSpec.weights_memory if resident weights may take this many bytes of a device.
    resident_of(budget): bytes of weights that are resident with a budget in bytes."""
    return 0 if resident_of(math.inf) <= free_bytes else int(max(free_bytes, resident_of(1)))


def ranks_hold(plan_of, dims, stages, device_bytes, budget_bytes):
    """([bytes of each rank's resident weights], [bytes streamed per step, or per patch]), if weights may take
    budget_bytes of each device.

    plan_of(budget_bytes, blocks): the OffloadPlan of a rank with these blocks; None: all. dims: None for a U-Net.
    stages: Stages, or None. device_bytes: total memory of each rank's device.
    """
    blocks = rank_blocks(dims, stages, device_bytes) if has_parts(dims, stages) else [None] * len(device_bytes)
    plans = {own: plan_of(budget_bytes, own) for own in set(blocks)}
    return [plans[own].device_bytes for own in blocks], [plans[own].offloaded_bytes for own in blocks]


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
