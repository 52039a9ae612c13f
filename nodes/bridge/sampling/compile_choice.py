"""The decision of `compile` auto for a run of a MODEL, and the calls that follow it."""

import dataclasses
import logging
import statistics

import torch

from ....xdit_backend.host.compile_times import Decision
from ....xdit_backend.planner.descriptions import describe_seconds
from ....xdit_backend.protocol.devices import own_name
from ..workers.worker_groups import GROUPS

BACKEND = "inductor"
CANNOT = "Set compile to off"              # beginning of the workers' message for a model that cannot be compiled
FIRST = 2                                  # steps in which graphs are compiled

log = logging.getLogger(__name__)


class CompileChoice:
    """Decisions for one MODEL's runs, one run at a time. A decision is made before the first step and holds for the
    run; a call with tensors of other shapes than the first call's runs uncompiled, so that nothing is compiled again in
    the middle of it."""

    def __init__(self):
        self.decision = Decision(False)
        self._work = self._gpus = self._group = self._shapes = None

    def begin(self, remote, work, num_steps, explicit):
        """Decide for a run. work: run_digest without the compile setting. explicit: whether a node selects a backend.
        Returns whether it is compiled. PipeFusion and displaced patches, whose calls have several shapes, are not."""
        self.end()
        if not remote.config.compiles_where_it_pays or explicit or remote.uses_cache:
            return False
        self._work, self._gpus = work, remote.estimates.gpus
        self._group = GROUPS.client(remote.devices).group
        self.decision = GROUPS.compile_times.decide(work, self._gpus, self._group, num_steps,
                                                    own_name(remote.devices[0]) != "cpu")
        return self.decision.is_compiled

    def end(self):
        self.decision, self._work, self._shapes = Decision(False), None, None

    def applied(self, calls, layout):
        """The calls, compiled if the run is and they have the shapes of its first ones."""
        if not self.decision.is_compiled:
            return calls
        shapes = layout, [_shapes(vars(call)) for call in calls]
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            return calls
        return [dataclasses.replace(call, options=dataclasses.replace(call.options, compile_backend=BACKEND))
                for call in calls]

    def gives_up(self, error):
        """Whether a call failed since PyTorch cannot compile the model; the run then goes on uncompiled."""
        if not self.decision.is_compiled or not str(error).startswith(CANNOT):
            return False
        log.warning("this model is not compiled: %s", error)
        GROUPS.compile_times.give_up(self._work, self._gpus, str(error))
        self.decision = Decision(False)
        return True

    def record(self, run):
        """Record the times of a completed progress.Run."""
        ends = [run.began_s, *run.stepped_s]
        seconds = [end - start for start, end in zip(ends, ends[1:])]
        if self._work is not None and len(seconds) > FIRST:
            GROUPS.compile_times.record(self._work, self._gpus, self._group, self.decision.is_compiled,
                                        statistics.median(seconds[FIRST:]), sum(seconds[:FIRST]), len(seconds))

    def describe(self):
        """Describe the decision to the user; "" for a run that is not compiled."""
        if not self.decision.is_compiled:
            return ""
        saved_s, compile_s = map(describe_seconds, (self.decision.saved_s, self.decision.compile_s))
        if not self.decision.compile_s:
            return f", compiled blocks (estimated to save {saved_s} in {self.decision.num_steps} steps)"
        return (f", compiled blocks (estimated to save {saved_s} in {self.decision.num_steps} steps; compiling takes "
                f"{compile_s})")


def _shapes(value):
    """Everything of a Call on which its graphs depend: shapes and dtypes, names and types."""
    if torch.is_tensor(value):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {name: _shapes(each) for name, each in value.items() if name not in ("name", "options")}
    if isinstance(value, (list, tuple)):
        return [_shapes(each) for each in value]
    return type(value)
