"""Stored measurements of sampling runs on this machine, by which a run is compared with the same one on one device.

Only measurements are compared with each other, never a measurement with an estimate.
"""

import datetime
import logging
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field
from pydantic.dataclasses import dataclass

from ..protocol.validation import STRICT
from .machine_profiles import write_json

FILE = "measured.json"
MAX_RUNS = 256                             # the oldest are dropped
MAX_BYTES = 2 ** 20
ONE_DEVICE = "one device"

log = logging.getLogger(__name__)


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


class MeasuredRuns:
    """The measured runs in ComfyUI's user folder, read at the first use. folder(): the folder of the file."""

    def __init__(self, folder):
        self._folder, self._runs = folder, None                # key -> MeasuredRun, the last measured one last

    def record(self, work, gpus, layout, step_s):
        """Store a run's measurement in place of an earlier one of the same run; returns the MeasuredRun."""
        run = MeasuredRun(work, tuple(gpus), layout, float(step_s), datetime.date.today().isoformat())
        known = self._known()
        known.pop(run.key, None)
        known[run.key] = run
        for key in list(known)[:max(0, len(known) - MAX_RUNS)]:
            del known[key]
        write_json(self._path, pydantic.TypeAdapter(_File).dump_python(_File(1, tuple(known.values())), mode="json"))
        return run

    def find(self, work, gpus, layout):
        """The measurement of such a run, or None."""
        return self._known().get((work, tuple(gpus), layout))

    def on_one_device(self, work, gpus):
        """The fastest measurement of the same run on any one of these devices, or None."""
        found = [run for name in dict.fromkeys(gpus) if (run := self.find(work, (name,), ONE_DEVICE)) is not None]
        return min(found, key=lambda run: run.step_s, default=None)

    @property
    def _path(self):
        return Path(self._folder()) / FILE

    def _known(self):
        if self._runs is None:
            self._runs = {run.key: run for run in self._read()}
        return self._runs

    def _read(self):
        try:
            with open(self._path, "rb") as file:
                raw = file.read(MAX_BYTES + 1)
            if len(raw) > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES} bytes")
            return pydantic.TypeAdapter(_File).validate_json(raw).runs
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as error:                 # ValidationError is a ValueError
            log.warning("the stored measurements of runs are ignored: %s: %s", self._path, str(error).splitlines()[0])
            return ()
