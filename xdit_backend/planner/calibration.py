"""Calibration of time estimates by completed runs: one factor per family and GPU model, from runs on one device. Links
are not calibrated. Arithmetic only."""

import math
from dataclasses import dataclass, replace

MIN_FACTOR = 0.2             # and its inverse; a ratio beyond these is not a valid measurement
MIN_WEIGHT = 0.25            # of the newest run, so that the factor follows changes such as drivers and cooling
# relative error to expect of an estimate before a run of its family has been measured on this GPU model
NEW = 0.15
KNOWN = 0.07                 # and after


@dataclass(frozen=True)
class Calibration:
    """factor: geometric mean of measured time over estimated time. count: number of runs."""

    factor: float = 1.0
    count: int = 0


def after(calibration, ratio):
    """The Calibration after a run that took `ratio` times its estimate."""
    calibration = calibration or Calibration()
    weight = max(MIN_WEIGHT, 1 / (calibration.count + 1))
    factor = math.exp((1 - weight) * math.log(calibration.factor) + weight * math.log(ratio))
    return Calibration(min(max(factor, MIN_FACTOR), 1 / MIN_FACTOR), calibration.count + 1)


def calibrated(machine, known, family):
    """The machine with device speeds calibrated for a family. known: {(family, GPU name): Calibration}."""
    factors = [known.get((family, device.name), Calibration()).factor for device in machine.devices]
    if set(factors) == {1.0}:
        return machine
    return replace(machine, devices=tuple(device.slower(factor) for device, factor in zip(machine.devices, factors)))
