"""PipeFusion for a model that fits on each device, where a person takes a nearly equal picture for a faster one
(`approximate` "for speed"). Pure arithmetic. Called when a model is loaded, after planner.choose_placement."""

from typing import NamedTuple

from ..partition import FULL
from ..protocol.specs import Stages
from .descriptions import describe_seconds, layout_description
from .layout_search import Estimate
from .planner import EVERYWHERE, WARMUP_FULL, WeightPlacement, plan_run, usual_job

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
