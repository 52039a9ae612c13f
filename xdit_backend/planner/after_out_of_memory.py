"""Settings with which a run would fit after it ran out of memory: the estimates, scaled to the measured use. Arithmetic
only."""

from dataclasses import dataclass, replace

from .cost_model import Degrees
from .layout_search import candidates
from .memory_check import DeviceMemory, settings_that_fit
from .memory_model import DEFAULT_SETTINGS, Memory, rank_memory
from .planner import tensor_degrees

AXES = "cfg", "data", "ulysses", "ring", "tensor", "displaced", "pipefusion"


@dataclass(frozen=True)
class Measured:
    """Bytes on the rank that ran out of memory: of weights; of the run, including the failed allocation; and of its
    device in all, for both."""

    device: str
    weights: float
    run: float
    total: float

    def factor(self, estimate):
        """Ratio of measured to estimated bytes of a run; at least 1. estimate: Memory."""
        return max(1.0, self.run / max(1.0, estimate.keys_values + estimate.activations))


def sizes_that_fit(measured, latents, hints):
    """[text] of the number and size of images that would fit, and of other settings. hints: with weights of one
    rank."""
    factor = measured.factor(latents.memory())

    def scaled(needed):
        return lambda images, sizes: _times(needed(images, sizes), factor)
    rank = DeviceMemory([measured.device], [measured.total], [measured.weights])
    settings = {name: scaled(needed) for name, needed in hints.other_settings.items()}
    return settings_that_fit(rank, replace(hints, other_settings=settings),
                             replace(latents, needed=scaled(latents.needed)))


@dataclass(frozen=True)
class Method:
    """degrees: of the layout that ran out of memory. refused: methods that the family does not support. may_differ:
    whether approximate methods are allowed."""

    degrees: Degrees
    refused: tuple = ()
    may_differ: bool = False

    def allows(self, other):
        used = {axis for axis in AXES if getattr(other, axis) > 1}
        refused = {*self.refused, *(("ring",) if "ulysses" in self.refused else ())}
        same = all(getattr(other, axis) == getattr(self.degrees, axis) for axis in AXES)
        return not same and not used & refused and (self.may_differ or other.pipefusion == 1)


def layouts_that_fit(measured, dims, job, method, settings=DEFAULT_SETTINGS, has_all_weights=True):
    """[text] with the layout on the same devices that uses the least memory, an exact one if possible; [] if none fits.
    has_all_weights: whether all weights of the rank were resident."""
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
