"""Stored measurements of sampling runs on this machine, by which a run is compared with the same one on one device.

Only measurements are compared with each other, never a measurement with an estimate.
"""

import datetime
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..protocol.validation import STRICT
from .run_store import MAX_RUNS, RunStore

FILE = "measured.json"
ONE_DEVICE = "one device"


@dataclass(frozen=True, config=STRICT)
class MeasuredRun:
    """A run that was measured. work: digest of what it computed, see nodes/bridge/sampling/run_digest.py. gpus: names
    of the devices that computed. layout: its methods, or ONE_DEVICE. step_s: mean seconds of a step, without the first
    one, which includes preparation."""

    work: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    gpus: Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(min_length=1, max_length=4096)]
    layout: Annotated[str, Field(max_length=256)]
    step_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]

    @property
    def key(self):
        return self.work, self.gpus, self.layout


@dataclass(frozen=True, config=STRICT)
class _File:
    version: Literal[1]
    runs: Annotated[tuple[MeasuredRun, ...], Field(max_length=MAX_RUNS)]


class MeasuredRuns(RunStore):
    """The measured runs in ComfyUI's user folder, read at the first use. folder(): the folder of the file."""

    def __init__(self, folder):
        super().__init__(folder, FILE, _File, "measurements of runs")

    def record(self, work, gpus, layout, step_s):
        """Store a run's measurement in place of an earlier one of the same run; returns the MeasuredRun."""
        run = MeasuredRun(work, tuple(gpus), layout, float(step_s), datetime.date.today().isoformat())
        self._store(run)
        return run

    def find(self, work, gpus, layout):
        """The measurement of such a run, or None."""
        return self._known().get((work, tuple(gpus), layout))

    def on_one_device(self, work, gpus):
        """The fastest measurement of the same run on any one of these devices, or None."""
        found = [run for name in dict.fromkeys(gpus) if (run := self.find(work, (name,), ONE_DEVICE)) is not None]
        return min(found, key=lambda run: run.step_s, default=None)
