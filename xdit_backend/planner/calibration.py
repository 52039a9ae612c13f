"""Calibration of forecasts by real runs: one factor for each family and card, from runs of one device; links are never
calibrated. Pure arithmetic."""

import math
from dataclasses import dataclass, replace

MIN_FACTOR = 0.2             # and 1 / it: what is farther off was no such run
MIN_WEIGHT = 0.25            # of the newest run, so that what changes (a driver, a cooler) is followed
# by how much a forecast may be off before a run of its family has been measured on this card
NEW = 0.15
KNOWN = 0.07                   # and after


@dataclass(frozen=True)
class Calibration:
    """factor: how many times longer runs took than the probe's numbers forecast, the geometric mean. count: of runs."""

    factor: float = 1.0
    count: int = 0


def after(calibration, ratio):
    """The Calibration after a run that took `ratio` times the forecast."""
    calibration = calibration or Calibration()
    weight = max(MIN_WEIGHT, 1 / (calibration.count + 1))
    factor = math.exp((1 - weight) * math.log(calibration.factor) + weight * math.log(ratio))
    return Calibration(min(max(factor, MIN_FACTOR), 1 / MIN_FACTOR), calibration.count + 1)


def calibrated(machine, known, family):
    """The machine with its cards' speeds as runs of this family have shown them. known: {(family, card):
    Calibration}."""
    factors = [known.get((family, device.name), Calibration()).factor for device in machine.devices]
    if set(factors) == {1.0}:
        return machine
    return replace(machine, devices=tuple(device.slower(factor) for device, factor in zip(machine.devices, factors)))
