"""The last run: how far it is, and what its workers did when. Kept for the panel, and shown on the node.

Updated by sampler_wrappers.py, remote_model.py and autoencoder.py; read by server/routes.py through panel.py.
"""

import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

from comfy_execution.utils import get_executing_context

from ....xdit_backend.protocol.messages import Span

SHOWN_S = 1.0                              # from one line on the node to the next
NUM_SPANS = 20_000                         # of a rank, that are kept
GB, MB = 1e9, 1e6
SLOW = GB / 20                             # bytes a second, below which a rate says nothing yet


@dataclass
class Run:
    """One sampling, and the decodes and encodes after it. Times are those of time.perf_counter."""

    number: int
    file: str
    devices: tuple
    num_steps: int
    began_s: float
    remote: object = None                  # the RemoteModel; None of a decode alone
    state: str = "running"                 # "done", "cancelled" or "failed"
    error: str = ""
    step: int = 0                          # steps that are done
    ended_s: float = 0.0
    stepped_s: list = field(default_factory=list)      # when the last steps ended
    shown_s: float = 0.0
    how: str = ""
    backends: str = ""                      # by which its attentions were computed, see describe_backends
    streamed_bytes: int = 0                    # of weights, from host memory to a device in every step
    dtype: str = ""
    why_no_plan: str = ""                  # as Forecasts.why_none says
    prompt: str = ""                       # ComfyUI's id of the prompt that it is of
    plan: object = None
    spans: dict[tuple, list[Span]] = field(default_factory=dict)       # (devices, rank) -> what it did
    requested_s: dict[tuple, float] = field(default_factory=dict)          # devices -> until when that was asked for

    @property
    def elapsed_s(self):
        return (self.ended_s or time.perf_counter()) - self.began_s

    @property
    def seconds_per_step(self):
        """Seconds of a step, from the first to the last of those counted; 0 before there are two."""
        return (self.stepped_s[-1] - self.stepped_s[0]) / (len(self.stepped_s) - 1) if len(self.stepped_s) > 1 else 0.0

    def count(self, step):
        """So many steps are done. Returns what the node is to show; "" too soon after the last time."""
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
        """It is over. error: what has ended it before its last step."""
        self.state = "done" if error is None else _state_after(error)
        self.error = str(error) if self.state == "failed" else ""
        self.update_from_remote()
        self.remote, self.ended_s = None, time.perf_counter()

    @property
    def describe_end(self):
        """What the node shows in place of the progress of a run that was cancelled or failed."""
        return f"{self.state} after {self.step} of {self.num_steps} steps"

    def update_from_remote(self):
        """Take over how the run is split, and its Plan, as far as the RemoteModel has chosen by now."""
        if self.remote is not None and self.remote.how is not None:
            self.how, self.plan = self.remote.how, self.remote.estimates.plan
            self.streamed_bytes = self.remote.memory.streamed_bytes


class Runs:
    """The last run, and what the workers are doing before it."""

    def __init__(self):
        self.last = None
        # text, done, total, counts_bytes, and rate (bytes a second): of the slowest rank
        self.phase = {}
        self._number, self._phases, self._phase_began_s = 0, {}, 0.0
        self._collecting = threading.Lock()                    # the panel asks too

    @property
    def is_running(self):
        return self.last is not None and self.last.state == "running"

    @contextmanager
    def sampling(self, remote, num_steps):
        """In this context a run of a RemoteModel is going on."""
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
        """So many steps of a run are done. Returns what the node is to show, see Run.count."""
        self.phase = {}                                        # what came before the steps is over
        return run.count(step)

    def vae(self, devices):
        """A decode or encode begins. It belongs to the run before it; where there is none, it is one itself."""
        if self.last is None:
            self._number += 1
            now = time.perf_counter()
            self.last = Run(self._number, "", tuple(devices), 0, now, state="done", ended_s=now)

    @contextmanager
    def measuring(self, devices):
        """In this context the devices are measured. Where a run waits for that, its picture of the time shows it."""
        run, began_s = self.last if self.is_running else None, time.perf_counter()
        try:
            yield
        finally:
            for rank in range(len(devices)) if run is not None else ():
                run.spans.setdefault((tuple(devices), rank), []).append(Span("measure", began_s, time.perf_counter()))

    def given_up(self, error):
        """What the node shows in place of the phase that this error has ended."""
        phase, self.phase = self.phase, {}
        far = (f", {phase['text']} {phase['done']} of {phase['total']}" if phase.get("total")
               and not phase["counts_bytes"] else "")
        return _state_after(error) + far

    def collect(self, client, ask):
        """Fetch what the ranks of a Client did since the last time. ask(since_s): {rank: Done}, or nothing."""
        with self._collecting:
            run, now, self.phase = self.last, time.perf_counter(), {}
            done = ask(-1.0 if run is None else run.requested_s.get(client.devices, run.began_s))
            if not done or run is None:
                return
            run.requested_s[client.devices] = now
            for rank, reply in done.items():
                if not reply.spans:                            # of a group that took no part in this run
                    continue
                spans = run.spans.setdefault((client.devices, rank), [])
                spans += reply.spans[:NUM_SPANS - len(spans)]

    def describe_phase(self, phase):
        """What the node shows of a Phase. Of ranks that do the same, the slowest one counts."""
        now = time.perf_counter()
        if phase.text != self.phase.get("text"):
            self._phases, self._phase_began_s = {}, now
        self._phases[phase.rank] = phase
        slowest = min(self._phases.values(), key=lambda one: one.done / max(1, one.total))
        done, total, elapsed_s = slowest.done, slowest.total, now - self._phase_began_s
        rate = done / elapsed_s if slowest.counts_bytes and elapsed_s > 0 else 0.0
        self.phase = {"text": phase.text, "done": done, "total": total, "counts_bytes": slowest.counts_bytes,
                      "rate": rate}
        if not total:
            return phase.text
        if not slowest.counts_bytes:
            return f"{phase.text} {done} of {total}"
        unit, digits, name = (GB, 1, "GB") if total >= GB else (MB, 0, "MB")
        words = f"{phase.text} {done / unit:.{digits}f} of {total / unit:.{digits}f} {name}"
        return f"{words}, {rate / GB:.1f} GB/s" if rate > SLOW else words


def describe_backends(counts):
    """By which kernels a run's attentions were computed, most first, and which share by which where there are several.
    counts: of Client.backend_counts."""
    total = sum(counts.values())
    return ", ".join(f"{name} {100 * count / total:.0f} %" if count < total else name
                     for name, count in counts.most_common())


def _state_after(error):
    return "cancelled" if type(error).__name__ == "InterruptProcessingException" else "failed"
