"""A report of this machine that runs in a process of its own, started by the panel: python -m xdit_backend report.

The process prints JSON lines, and ends early when its standard input is closed, which it also is when ComfyUI ends in
any way.
"""

import logging
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field
from pydantic.dataclasses import dataclass

from .. import system
from ..protocol.errors import ConfigError
from ..protocol.validation import STRICT, Printable
from . import logs
from .supervisor import ROOT

MAX_LINE = 2 ** 16
ENDING_S = 30.0                # after a cancel; then the processes are killed
POLL_S = 0.2

log = logging.getLogger(__name__)


@dataclass(frozen=True, config=STRICT)
class Step:
    """Progress of a report."""

    kind: Literal["step"]
    text: Printable
    left_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=STRICT)
class Written:
    """The end of a report. files: names, JSON first. verdict: sentences of results.verdict."""

    kind: Literal["written"]
    files: Annotated[tuple[Annotated[str, Field(pattern=r"^xdit-report-[a-z0-9-]+\.(json|md|png)$")], ...],
                     Field(max_length=3)]
    verdict: Annotated[tuple[Printable, ...], Field(max_length=3)]
    is_complete: bool
    num_failed: int


LINE = pydantic.TypeAdapter(Annotated[Step | Written, Field(discriminator="kind")])


class ReportProcess:
    """The report that the panel has started last, if any.

    folder(): of the files. command: without the folder; for tests.
    """

    def __init__(self, folder, command=("xdit_backend", "report", "--for-panel")):
        self._folder, self._command = folder, command
        self._process, self._job, self._thread, self._lock = None, None, None, threading.Lock()
        self._step, self._step_s, self._written, self._error, self._reason = None, 0.0, None, "", ""

    @property
    def is_running(self):
        return self._thread is not None and self._thread.is_alive()

    def start(self):
        """Start a report. Raises ConfigError if one is running, OSError if it cannot be started."""
        with self._lock:
            if self.is_running:
                raise ConfigError("Wait for the report, or cancel it: it is still running.")
            folder = Path(self._folder())
            folder.mkdir(parents=True, exist_ok=True)
            module, *arguments = self._command
            command, variables = system.python_program(module, *arguments, "--folder", folder)
            self._step, self._step_s, self._written, self._error, self._reason = None, 0.0, None, "", ""
            self._job = system.Job()
            self._process = self._job.start(
                command, cwd=ROOT, env=os.environ | variables | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            self._thread = threading.Thread(target=self._follow, daemon=True)
            self._thread.start()

    def cancel(self, reason="cancelled"):
        """End the report early, at once; what was measured is written. reason: a state of `describe`."""
        if self.is_running and not self._reason:
            self._reason = reason
            with self._lock:
                self._process.stdin.close()
            threading.Thread(target=self._kill_later, args=(self._process, self._job), daemon=True).start()

    def end(self, reason):
        """`cancel`, and wait for the end."""
        self.cancel(reason)
        if self._thread is not None:
            self._thread.join(2 * ENDING_S)

    def describe(self):
        """State for the page: {"state": "none", "running", "ending", "done", "cancelled", "prompt" (a prompt began) or
        "failed", "text", "left_s", "error", "files": names, "verdict": sentences, "failed": number of checks}."""
        step, written = self._step, self._written
        left_s = max(0.0, step.left_s - time.monotonic() + self._step_s) if step else 0.0
        state = ("none" if self._thread is None else "ending" if self.is_running and self._reason else "running"
                 if self.is_running else self._reason or ("done" if written and written.is_complete else
                                                         "cancelled" if written else "failed"))
        return {"state": state, "text": step.text if step else "", "left_s": round(left_s),
                "error": self._error if state == "failed" else "",
                "files": list(written.files) if written else [], "verdict": list(written.verdict) if written else [],
                "failed": written.num_failed if written else 0}

    def path_of(self, name):
        """Path of a file of the last report; None for any other name."""
        return Path(self._folder()) / name if self._written and name in self._written.files else None

    def _follow(self):
        process, errors = self._process, []
        reading = threading.Thread(target=lambda: errors.extend(_last_lines(process.stderr)), daemon=True)
        reading.start()
        while raw := process.stdout.readline(MAX_LINE):
            try:
                line = LINE.validate_json(raw)
            except pydantic.ValidationError:                   # printed by a library
                continue
            if isinstance(line, Step):
                self._step, self._step_s = line, time.monotonic()
            else:
                self._written = line
        process.wait()
        reading.join()
        with self._lock:
            process.stdin.close()
        process.stdout.close()
        process.stderr.close()
        if self._written is None:
            text = errors[-1] if errors else f"exit code {process.returncode}"
            self._error = logs.without_private(text)[:400]
            log.log(logging.WARNING if not self._reason else logging.DEBUG, "the report failed: %s", "\n".join(errors))

    def _kill_later(self, process, job):
        deadline_s = time.monotonic() + ENDING_S
        while process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        job.end()


def _last_lines(stream, count=20):
    lines: list = []
    while raw := stream.readline(MAX_LINE):
        lines = [*lines, raw.decode(errors="replace").rstrip()][-count:]
    return [line for line in lines if line]
