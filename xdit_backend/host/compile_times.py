"""Measured times of compiled and uncompiled runs, by which `compile` auto decides whether compiling pays."""

import statistics
import weakref
from collections import Counter
from typing import Annotated, Literal, TypeAlias

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..protocol.validation import STRICT
from .run_store import MAX_RUNS, RunStore

FILE = "compiled.json"
# before anything was compiled on these devices: Flux.1 dev on one H200 took 0.1727 s a step, compiled 0.1314, and its
# first step 21.5 s (docs/benchmarks.md); a Flux.1 of 4 blocks on a CPU 0.442 and 0.432 s
SAVING_ON_CUDA, SAVING_ON_CPU, COMPILE_S = 0.2, 0.02, 30.0

Seconds: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None


@dataclass(frozen=True, config=STRICT)
class CompileTime:
    """Times of a run. work: its digest, see measured_runs.MeasuredRun, and layout. eager_s, compiled_s: of a step.
    compile_s: of compiling in a new worker group, with what torch caches on disk. why_not: PyTorch's reason for not
    compiling this model; "": it can."""

    work: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    gpus: Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(min_length=1, max_length=4096)]
    eager_s: Seconds = None
    compiled_s: Seconds = None
    compile_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    why_not: Annotated[str, Field(max_length=1000)] = ""

    @property
    def key(self):
        return self.work, self.gpus

    @property
    def saving(self):
        """Fraction of a step that compiled blocks save; None if not measured."""
        return None if self.eager_s is None or self.compiled_s is None else 1 - self.compiled_s / self.eager_s


@dataclass(frozen=True, config=STRICT)
class _File:
    version: Literal[1]
    runs: Annotated[tuple[CompileTime, ...], Field(max_length=MAX_RUNS)]


@dataclass(frozen=True)
class Decision:
    """Whether a run is compiled. saved_s: estimated saving over num_steps planned steps; compile_s: the time that
    compiling takes, 0 if it is done."""

    is_compiled: bool
    saved_s: float = 0.0
    num_steps: int = 0
    compile_s: float = 0.0


class CompileTimes(RunStore):
    """Stored times, and what this session has run. folder(): ComfyUI's user folder of the pack."""

    def __init__(self, folder):
        super().__init__(folder, FILE, _File, "times of compiled runs")
        self._num_steps = Counter()                            # (work, gpus) -> steps in this session
        self._compiled = weakref.WeakKeyDictionary()           # worker group -> {work} that it has compiled

    def decide(self, work, gpus, group, num_steps, is_cuda):
        """The Decision for a run of num_steps steps by this worker group.

        Planned are this run's steps, and as many as this session has run of the same. A run that has not been timed
        uncompiled is not compiled. gpus: names of the devices.
        """
        time, key = self._find(work, gpus), (work, tuple(gpus))
        if time.eager_s is None or time.why_not:
            return Decision(False)
        planned = num_steps + self._num_steps[key]
        saving = time.saving if time.saving is not None else self._usual_saving(gpus, is_cuda)
        compile_s = 0.0 if self.is_ready(work, group) else self._usual_compile_s(time, gpus)
        saved_s = saving * time.eager_s * planned
        return Decision(saved_s > compile_s and saving > 0, saved_s, planned, compile_s)

    def is_ready(self, work, group):
        """Whether this worker group has compiled such a run."""
        return work in self._compiled.get(group, ())

    def record(self, work, gpus, group, is_compiled, step_s, first_s, num_steps):
        """Record a run. step_s: seconds of a step after the first two; first_s: of the first two together."""
        time, key = self._find(work, gpus), (work, tuple(gpus))
        self._num_steps[key] += num_steps
        values = vars(time) | {"compiled_s" if is_compiled else "eager_s": step_s}
        if is_compiled and not self.is_ready(work, group):
            self._compiled.setdefault(group, set()).add(work)
            values["compile_s"] = max(0.0, first_s - 2 * step_s)
        self._store(CompileTime(**values))

    def give_up(self, work, gpus, why):
        """Record that PyTorch cannot compile this model."""
        self._store(CompileTime(**vars(self._find(work, gpus)) | {"why_not": why[:1000]}))

    def _usual_saving(self, gpus, is_cuda):
        known = [time.saving for time in self._known().values() if time.gpus[0] == gpus[0] and time.saving is not None]
        return statistics.median(known) if known else SAVING_ON_CUDA if is_cuda else SAVING_ON_CPU

    def _usual_compile_s(self, time, gpus):
        if time.compile_s is not None:
            return time.compile_s
        known = [other.compile_s for other in self._known().values() if other.gpus[0] == gpus[0]
                 and other.compile_s is not None]
        return max(known, default=COMPILE_S)

    def _find(self, work, gpus):
        return self._known().get((work, tuple(gpus))) or CompileTime(work, tuple(gpus))
