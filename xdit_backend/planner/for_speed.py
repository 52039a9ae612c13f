"""PipeFusion for a model that fits on each device, where a person takes a nearly equal picture for a faster one
(`approximate` "for speed"). Pure arithmetic. Called when a model is loaded, after planner.choose_spread."""

from typing import NamedTuple

from ..partition import FULL
from ..protocol.specs import Stages
from .descriptions import layout_words, seconds_words
from .layout_search import Forecast
from .planner import EVERYWHERE, WARMUP_FULL, WeightPlacement, plan_run, usual_job

FASTER = 1.15                              # times as fast as the best exact layout that stale keys and values must be
# decibels of the demo model's pictures to one device's, 4 patches and a warm-up step (docs/quality.md)
PSNR_DB = {"forecast": 43, "as they were": 37}


class Faster(NamedTuple):
    """A Spread over stages, and Forecasts of a usual run: its own, and of the best layout whose picture is one
    device's."""

    spread: WeightPlacement
    staged: Forecast
    exact: Forecast

    @property
    def words(self):
        """What it gains and costs, for a person."""
        return (f"{layout_words(self.staged)} for speed: a usual picture is forecast to take "
                f"{seconds_words(self.staged.seconds)} instead of {seconds_words(self.exact.seconds)} by "
                f"{layout_words(self.exact)}")


def spread_for_speed(config, net, devices, branches=(1, 2)):
    """The Faster spread of a model whose weights fit on each device; None where nothing is FASTER than the best exact
    layout, or the devices were not measured.

    devices: planner.Devices. branches: of usual runs, each of which has to gain.
    """
    count, machine = len(devices.memory_bytes), devices.machine
    if machine is None or count == 1 or not has_stages_for_speed(config, net, devices.smallest) or (
            config.requested_patches == 1 or devices.per_machine or config.weights_memory_bytes):
        return None
    jobs = [usual_job(net, each) for each in branches]

    def plans(spread):
        return [plan_run(config, machine, net, job, *spread).chosen for job in jobs]

    holds_all = [False, True] if config.warmup == "sequence" or (
        config.warmup == "auto" and net.held_bytes <= WARMUP_FULL * devices.smallest) else [False]
    staged = {}
    for degree in devices.divisors():
        for every_block in holds_all if degree <= net.blocks else []:
            spread = WeightPlacement(Stages(degree, count // degree, (), every_block, config.offload_keys_values,
                                   devices.speeds))
            made = plans(spread)
            if all(one.fits for one in made):
                staged[spread] = made
    exact = plans(EVERYWHERE)
    if not staged:
        return None
    best = min(staged, key=lambda spread: sum(one.seconds for one in staged[spread]))
    if any(one.fits and one.seconds < FASTER * made.seconds for one, made in zip(exact, staged[best])):
        return None
    return Faster(best, staged[best][0], exact[0])


def has_stages_for_speed(config, net, smallest_bytes):
    """Does this model have stages, if it has any, though its weights fit on each device? smallest_bytes: memory of the
    smallest device."""
    return (config.approximate == "for speed" and config.mode == "auto"
            and net.held_bytes <= FULL * smallest_bytes)


def quality_words(config):
    """How near PipeFusion's pictures are to one device's, for a person."""
    how = "forecast" if config.forecast_keys_values > 0 else "as they were"
    return f"for speed: near to one device's picture ({PSNR_DB[how]} dB in the demo model with 4 patches)"
