"""Progress of the last run, and what its workers did when, for the panel and the node."""

import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

from comfy_execution.utils import get_executing_context

from ....xdit_backend.host.measured_runs import MeasuredRun
from ....xdit_backend.protocol.messages import JOINING, STARTING, TRYING_LINKS, Span

SHOWN_S = 1.0                              # minimum between two updates of the node's text
NUM_SPANS = 20_000                         # maximum stored for each rank
START = STARTING, JOINING, TRYING_LINKS    # phases of a start, in their order
GB, MB = 1e9, 1e6
SLOW = GB / 20                             # bytes/s; a lower rate is not shown


@dataclass
class Run:
    """One sampling run and the decodes, encodes and upscalings after it. Times are time.perf_counter's."""

    number: int
    file: str
    devices: tuple
    num_steps: int
    began_s: float
    remote: object = None                  # the RemoteModel; None for a decode alone and after the end
    state: str = "running"                 # "done", "cancelled" or "failed"
    error: str = ""
    step: int = 0                          # completed steps
    ended_s: float = 0.0
    stepped_s: list = field(default_factory=list)      # when the last steps ended
    shown_s: float = 0.0
    how: str = ""
    backends: str = ""                     # attention backends, see describe_backends
    streamed_bytes: int = 0                # of weights, from system RAM to a device in each step
    dtype: str = ""
    why_no_plan: str = ""                  # see Estimates.why_none
    prompt: str = ""                       # id of ComfyUI's prompt
    plan: object = None
    on_one_device: MeasuredRun | None = None               # measurement of such a run on one device
    num_working: int = 1                   # devices that compute
    spans: dict[tuple, list[Span]] = field(default_factory=dict)       # (devices, rank) -> its spans
    requested_s: dict[tuple, float] = field(default_factory=dict)      # devices -> time of the last request for spans

    @property
    def elapsed_s(self):
        return (self.ended_s or time.perf_counter()) - self.began_s

    @property
    def seconds_per_step(self):
        """Mean seconds per step over the counted steps; 0 with fewer than two."""
        return (self.stepped_s[-1] - self.stepped_s[0]) / (len(self.stepped_s) - 1) if len(self.stepped_s) > 1 else 0.0

    def count(self, step):
        """Record the number of completed steps. Returns the node's text, or "" within SHOWN_S of the last one."""
        now = time.perf_counter()
        if step > self.step:
            self.step = step
            self.stepped_s.append(now)
        self.update_from_remote()
        if now - max(self.shown_s, self.began_s) < SHOWN_S or not self.seconds_per_step:
            return ""
        self.shown_s = now
        return (f"step {self.step} of {self.num_steps}, {self.seconds_per_step:.2f} s a step, "
                f"{(self.num_steps - self.step) * self.seconds_per_step:.0f} s left, {self.how}")

    def end(self, error=None):
        """Mark the run as ended. error: the exception that ended it early."""
        self.state = "done" if error is None else _state_after(error)
        self.error = str(error) if self.state == "failed" else ""
        self.update_from_remote()
        self.remote, self.ended_s = None, time.perf_counter()

    @property
    def describe_end(self):
        """The node's text for a run that was cancelled or failed."""
        return f"{self.state} after {self.step} of {self.num_steps} steps"

    def update_from_remote(self):
        """Copy the description of the split and the Plan once the RemoteModel has chosen them."""
        if self.remote is not None and self.remote.how is not None:
            self.how, self.plan = self.remote.how, self.remote.estimates.plan
            self.num_working = self.remote.estimates.num_working
            self.on_one_device = self.remote.estimates.on_one_device
            self.streamed_bytes = self.remote.memory.streamed_bytes


class Runs:
    """The last run, and the current phase of the workers before its first step."""

    def __init__(self):
        self.last = None
        # text, done, total, counts_bytes and rate (bytes/s) of the slowest rank
        self.phase = {}
        self._number, self._phases, self._phase_began_s, self._shown_phase = 0, {}, 0.0, None
        self._collecting = threading.Lock()                    # the panel collects from another thread

    @property
    def is_running(self):
        return self.last is not None and self.last.state == "running"

    @contextmanager
    def sampling(self, remote, num_steps):
        """Context manager: track a run of a RemoteModel."""
        self._number += 1
        context = get_executing_context()
        self.last = run = Run(self._number, os.path.basename(remote.spec.path), tuple(remote.devices), num_steps,
                              time.perf_counter(), remote, dtype=remote.spec.compute_dtype,
                              why_no_plan=remote.estimates.why_none,
                              prompt="" if context is None else context.prompt_id)
        try:
            yield run
        except BaseException as error:
            run.end(error)
            raise
        else:
            run.end()
        finally:
            self.phase = {}

    def count(self, run, step):
        """Record the number of completed steps of a run. Returns the node's text, see Run.count."""
        self.phase = {}                                        # the phases before the first step are over
        return run.count(step)

    def begin_alone(self, devices):
        """Begin a decode, encode or upscaling. It belongs to the last run; if there is none, it becomes a run."""
        if self.last is None:
            self._number += 1
            now = time.perf_counter()
            self.last = Run(self._number, "", tuple(devices), 0, now, state="done", ended_s=now)

    @contextmanager
    def measuring(self, devices):
        """Context manager: record that the devices are measured, as a span of the current run if there is one."""
        run, began_s = self.last if self.is_running else None, time.perf_counter()
        try:
            yield
        finally:
            for rank in range(len(devices)) if run is not None else ():
                run.spans.setdefault((tuple(devices), rank), []).append(Span("measure", began_s, time.perf_counter()))

    def describe_interruption(self, error):
        """Return the node's text for a phase that this error interrupted."""
        phase, self.phase = self.phase, {}
        progress = (f", {phase['text']} {phase['done']} of {phase['total']}" if phase.get("total")
                    and not phase["counts_bytes"] else "")
        return _state_after(error) + progress

    def collect(self, client, ask):
        """Fetch the spans of a Client's ranks since the last call. ask(since_s) returns {rank: Done}, or nothing."""
        with self._collecting:
            run, now, self.phase = self.last, time.perf_counter(), {}
            done = ask(-1.0 if run is None else run.requested_s.get(client.devices, run.began_s))
            if not done or run is None:
                return
            run.requested_s[client.devices] = now
            for rank, reply in done.items():
                if not reply.spans:                            # this group took no part in the run
                    continue
                spans = run.spans.setdefault((client.devices, rank), [])
                spans += reply.spans[:NUM_SPANS - len(spans)]

    def describe_phase(self, phase):
        """Return the node's text for a Phase; "" for one that is over: ranks pass through the phases of a start at
        different times. Of several ranks in the same phase, the slowest is shown, and no number decreases unless a
        rank begins again."""
        now = time.perf_counter()
        if _order_of(phase) < _order_of(self._shown_phase) and not _begins_start(phase):
            return ""
        known = self._phases.get(phase.rank)
        begins_again = known is not None and phase.done < known.done
        if phase.text != self.phase.get("text") or begins_again:
            self._phases, self._phase_began_s, self.phase = {}, now, {}
        if phase.text in START or phase.total:
            self._shown_phase = phase
        self._phases[phase.rank] = phase
        slowest = min(self._phases.values(), key=lambda one: one.done / max(1, one.total))
        if slowest.done * self.phase.get("total", 0) < self.phase.get("done", 0) * slowest.total:
            return ""                                          # a rank that has begun later
        done, total, elapsed_s = slowest.done, slowest.total, now - self._phase_began_s
        rate = done / elapsed_s if slowest.counts_bytes and elapsed_s > 0 else 0.0
        self.phase = {"text": phase.text, "done": done, "total": total, "counts_bytes": slowest.counts_bytes,
                      "rate": rate}
        if not total:
            return phase.text
        if not slowest.counts_bytes:
            return f"{phase.text} {done} of {total}"
        unit, digits, name = (GB, 1, "GB") if total >= GB else (MB, 0, "MB")
        text = f"{phase.text} {done / unit:.{digits}f} of {total / unit:.{digits}f} {name}"
        return f"{text}, {rate / GB:.1f} GB/s" if rate > SLOW else text


def _order_of(phase):
    """Position of a Phase in a start of workers; phases after it are all of the last one."""
    return START.index(phase.text) if phase is not None and phase.text in START else len(START) * (phase is not None)


def _begins_start(phase):
    return phase.text == START[0] and not phase.done and phase.total > 0


def describe_backends(counts):
    """Return the attention backends of a run, most used first, with percentages if there are several.
    counts: see Client.backend_counts."""
    total = sum(counts.values())
    return ", ".join(f"{name} {100 * count / total:.0f} %" if count < total else name
                     for name, count in counts.most_common())


def _state_after(error):
    return "cancelled" if type(error).__name__ == "InterruptProcessingException" else "failed"
