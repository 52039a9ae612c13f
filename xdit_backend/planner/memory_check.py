"""Refuses a run that takes more memory than a device has, before it starts, with what would fit. Pure arithmetic.
Used by the bridge."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..protocol.errors import ConfigError
from .memory_model import Memory, has_parts, memory_budget, most_that_fits, rank_blocks

NOTHING = Memory(0.0, 0.0, 0.0)
HOST = "this machine's host memory"


@dataclass(frozen=True)
class DeviceMemory:
    """devices, device_bytes, weight_bytes: for each rank the name of its device, what that has in all, and what the
    rank adds to the weights there. num_here, host_bytes: how many ranks are on this machine, and what its host memory
    has for what is not on their devices."""

    devices: Sequence[str]
    device_bytes: Sequence[float]
    weight_bytes: Sequence[float]
    num_here: int = 0
    host_bytes: float = 0


@dataclass(frozen=True)
class Latents:
    """What is to be sampled. needed(images, sizes): Memory of a rank beside weights, for so many images of a latent
    with these sizes (without batch and channels). pixels: of the picture that a latent's row and column stand for."""

    needed: Callable[[int, tuple], Memory]
    images: int
    sizes: tuple
    pixels: tuple

    def memory(self):
        return self.needed(self.images, self.sizes)


@dataclass(frozen=True)
class Hints:
    """What else may fit. spread: texts of how it would on more devices. lighter(): {other weight_dtype: weight_bytes
    with it}. other_settings: {another setting: Latents.needed with it}."""

    placement: Sequence[str] = ()
    lighter: Callable[[], dict] = dict
    other_settings: dict[str, Callable] = field(default_factory=dict)


def rank_memory_budget(devices, device_bytes):
    """Bytes that a rank has on the fullest device for all that it holds there. devices, device_bytes: of each rank, its
    name and what it has in all."""
    return min(memory_budget(size / devices.count(device)) for device, size in zip(devices, device_bytes))


def weights_memory_in(free_bytes, held_of):
    """What ModelSpec.weights_memory is to be where weights may take so many bytes of a device. held_of(bytes that they
    may take): those that they do."""
    return 0 if held_of(math.inf) <= free_bytes else int(max(free_bytes, held_of(1)))


def ranks_hold(plan_of, dims, stages, device_bytes, budget_bytes):
    """([bytes of each rank's weights on its device], [of those that come from host memory: once a step, or a patch]),
    where weights may take so many of each device.

    plan_of(budget_bytes, blocks): the OffloadPlan of a rank with these blocks; None: all. net: None of a U-Net.
    stages: Stages, or None. device_bytes: of each rank, what its device has in all.
    """
    blocks = rank_blocks(dims, stages, device_bytes) if has_parts(dims, stages) else [None] * len(device_bytes)
    plans = {own: plan_of(budget_bytes, own) for own in set(blocks)}
    return [plans[own].device_bytes for own in blocks], [plans[own].offloaded_bytes for own in blocks]


def check_memory(what, ranks, hints, latents=None):
    """Raise ConfigError where a device is too small for what its ranks need.

    what: is to run, for a person. latents: None: the weights alone are looked at.
    """
    fullest = _fullest(ranks, latents)
    if fullest.lacks <= 0:
        return
    held = fullest.held
    parts = {"weights": held.weights, "keys and values": held.keys_values, "activations": held.activations}
    text = ", ".join(f"{part / 1e9:.3g} GB of {name}" for name, part in parts.items() if part)
    would = settings_that_fit(ranks, hints, latents)
    raise ConfigError(f"Use {'; or '.join(would) or 'more devices, or larger ones'}: {what} needs about "
                      f"{held.total / 1e9:.3g} GB on {fullest.device} ({text}), and that has "
                      f"{fullest.has / 1e9:.3g} GB.")


def settings_that_fit(ranks, hints, latents=None):
    """[text] of latents and of settings with which it would fit."""
    return [*(_latents_that_fit(ranks, latents) if latents is not None else ()),
            *_settings_that_fit(ranks, hints, latents, _fullest(ranks, latents).device)]


@dataclass(frozen=True)
class Fullest:
    """The device that lacks most: bytes that it lacks, what its ranks hold, what it has."""

    lacks: float
    device: str
    held: Memory
    has: float


def _fullest(ranks, latents):
    memory = latents.memory() if latents is not None else NOTHING
    found = []
    for device in dict.fromkeys(ranks.devices):
        on_it = [rank for rank, name in enumerate(ranks.devices) if name == device]
        held = Memory(sum(ranks.weight_bytes[rank] for rank in on_it), memory.keys_values * len(on_it),
                      memory.activations * len(on_it))
        has = ranks.device_bytes[on_it[0]]
        found.append(Fullest(held.total - has, device, held, has))
    if memory.host and ranks.num_here:
        in_host = memory.host * ranks.num_here
        found.append(Fullest(in_host - ranks.host_bytes, HOST, Memory(0.0, in_host, 0.0), ranks.host_bytes))
    return max(found, key=lambda each: each.lacks)


def _fits(ranks, latents):
    return _fullest(ranks, latents).lacks <= 0


def _latents_that_fit(ranks, latents):
    """How many images at once, and how large ones, would fit, for a person."""
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
    """With which other settings it would fit, for a person. device: the fullest."""
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
    """Sizes of a latent of the same shape with so many rows."""
    return (*sizes[:-2], rows, max(1, rows * sizes[-1] // sizes[-2]))
