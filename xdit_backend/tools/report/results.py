"""Data of a report, as stored in its JSON file (schema version 1), and its verdict."""

import re
import statistics
from typing import Any, Literal

import pydantic
from pydantic.dataclasses import dataclass

from ...planner.descriptions import describe_method
from ...protocol.errors import ConfigError
from ...protocol.validation import STRICT, ByName, Many

SCHEMA = 1
NEAR = 0.1                     # relative error up to which an estimate counts as right
MAX_BYTES = 2 ** 20            # of a report's file


@dataclass(frozen=True, config=STRICT)
class Statistics:
    """Seconds of several rounds."""

    median: float
    minimum: float
    maximum: float
    rounds: int

    def shown(self):
        """The values with three significant digits; of one round, only one."""
        interval = f" ({self.minimum:.3g} to {self.maximum:.3g})" if self.rounds > 1 else ""
        return f"{self.median:.3g} s{interval}"


def statistics_of(seconds):
    """The Statistics of seconds measured in rounds."""
    return Statistics(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


@dataclass(frozen=True, config=STRICT)
class Check:
    """One comparison or fault. error: largest difference from one device relative to the largest value, or None for a
    fault. message: what failed, in one line; "" if it passed. command: repeats it alone."""

    name: str
    passed: bool
    seconds: float
    command: str
    message: str = ""
    error: float | None = None


@dataclass(frozen=True, config=STRICT)
class LinkTime:
    """Time of one collective between neighbouring ranks. num_bytes: that each rank sends."""

    backend: str                   # of torch.distributed
    collective: Literal["hop", "all_to_all"]
    num_bytes: int
    seconds: Statistics

    @property
    def bytes_s(self):
        return self.num_bytes / self.seconds.median


@dataclass(frozen=True, config=STRICT)
class Timing:
    """A model under a layout. seconds: per step with all branches of guidance. estimate_s: by the cost model; None for
    a U-Net. peak_bytes: of the fullest rank, without weights; None on CPUs."""

    model: str
    layout: str
    num_devices: int
    seconds: Statistics
    flops_s: float | None = None
    estimate_s: float | None = None
    weight_bytes: int = 0
    peak_bytes: int | None = None
    estimated_bytes: int | None = None


@dataclass(frozen=True, config=STRICT)
class Report:
    """Everything that a report's file contains. machine: facts by name. notes: a sentence per limit of this
    machine. sizes: {model: its size}. chosen: {model: layout that auto mode would use}."""

    schema: Literal[1]
    date: str
    version: str
    devices: Many[str]
    machine: ByName[str, Any]
    notes: Many[str]
    checks: Many[Check]
    links: Many[LinkTime]
    sizes: ByName[str, str]
    timings: Many[Timing]
    chosen: ByName[str, str]
    seconds: float
    is_complete: bool              # False: ended early, by the user or its time limit

    @property
    def failed(self):
        return [check for check in self.checks if not check.passed]

    def of_model(self, model):
        """{layout: Timing} of a model, one device first."""
        found = {timing.layout: timing for timing in self.timings if timing.model == model}
        return dict(sorted(found.items(), key=lambda item: item[1].num_devices > 1))

    def speedup(self, timing):
        """Time on one device relative to this Timing; None where one device was not timed."""
        one = self.of_model(timing.model).get("one")
        return None if one is None else one.seconds.median / timing.seconds.median


def read_report(path):
    """The Report in a JSON file. Raises ConfigError if it is none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"Leave out {path.name}: it has {path.stat().st_size} bytes, and a report has at most "
                              f"{MAX_BYTES}.")
        return pydantic.TypeAdapter(Report).validate_json(path.read_bytes())
    except (OSError, pydantic.ValidationError) as error:
        raise ConfigError(f"Make {path.name} again with python -m xdit_backend report: it is not a report of schema "
                          f"version {SCHEMA} ({str(error).splitlines()[0]}).") from error


def to_json(report):
    """A Report as the text of its file."""
    return pydantic.TypeAdapter(Report).dump_json(report, indent=1).decode()


def verdict(report):
    """Three sentences: whether results are right, how fast the best method is, and whether the estimates hold."""
    return [_correctness(report), _speed(report), _estimates(report)]


def _correctness(report):
    if not report.checks:
        return "Nothing was checked."
    if not report.failed:
        return f"All {len(report.checks)} checks passed: every method gives one device's result on this machine."
    names = ", ".join(check.name for check in report.failed)
    return f"{len(report.failed)} of {len(report.checks)} checks failed: {names}."


def _speed(report):
    best = {}
    for timing in report.timings:
        speedup = report.speedup(timing)
        if speedup is not None and timing.num_devices > 1:
            best[timing.model] = max(best.get(timing.model, (0.0, "")), (speedup, timing.layout))
    if not best:
        return "No method was timed on several devices."
    if max(best.values())[0] <= 1:
        return "No method is faster than one device here."
    return "The fastest method is " + "; ".join(
        f"{layout_title(layout)} for {model}, {speedup:.2f} times as fast as one device"
        for model, (speedup, layout) in best.items()) + "."


def layout_title(layout):
    """A layout's name for the reader: "CFG 2 x Ulysses 2" for "cfg2-ulysses2"."""
    degrees = {axis: int(degree) for axis, degree in re.findall(r"([a-z]+)(\d+)", layout)}
    return " x ".join(describe_method(lambda axis: degrees.get(axis, 1))) or "one device"


def _estimates(report):
    errors = [abs(timing.estimate_s / timing.seconds.median - 1) for timing in report.timings
              if timing.estimate_s is not None]
    if not errors:
        return "Nothing was estimated."
    right = sum(error <= NEAR for error in errors)
    followed = [model for model, layout in report.chosen.items()
                if layout == min(report.of_model(model).values(), key=lambda timing: timing.seconds.median).layout]
    return (f"{right} of {len(errors)} estimates are within {NEAR:.0%} (median error {statistics.median(errors):.0%}), "
            f"and auto mode would choose the fastest of the timed layouts for {len(followed)} of {len(report.chosen)} "
            f"models.")
