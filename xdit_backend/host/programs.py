"""A supervisor that starts every worker as a program of its own, where torchrun is not available (Windows).

The programs are in a job (system.Job), which the system ends with the host.
"""

import os
import subprocess
import threading
import time
from contextlib import suppress

import psutil

from .. import system
from . import logs
from .supervisor import POLL_S, poll_ended

WHY_NOT_FORKED = system.why_not_fork() or "torchrun is not used"


class ProgramSupervisor:
    """A Supervisor (supervisor.py). Thread-safe."""

    def __init__(self):
        self._lock, self._started = threading.Lock(), []

    def prepare(self, environment):
        """Do nothing: no process can import libraries for others."""

    def start(self, ranks, environment, check=lambda: None):
        """Start the workers; returns their Programs. Raises OSError if the system cannot start a process."""
        programs = Programs(ranks, environment)
        with self._lock:
            self._started = [each for each in self._started if not each.has_ended] + [programs]
        return programs

    def close(self):
        with self._lock:
            for programs in self._started:
                programs.end((), None)
            self._started.clear()


class Programs:
    """The WorkerProcesses of these LocalRanks. Their supervising process is this one: a thread ends all of them when
    one fails, as torchrun does."""

    def __init__(self, ranks, environment):
        self.pid, self.why_not_forked = os.getpid(), WHY_NOT_FORKED
        self._first_rank, self._job = ranks.first_rank, system.Job()
        self._failure, self._is_ending = None, False
        self._processes: list[subprocess.Popen] = []
        command, variables = system.python_program("xdit_backend.worker", ranks.folder, ",".join(ranks.devices),
                                                   ranks.first_rank, ranks.log_folder)
        try:
            with logs.start(ranks.log_folder) as output:
                for local_rank in range(ranks.num_ranks):
                    own = {"LOCAL_RANK": str(local_rank), "RANK": str(ranks.first_rank + local_rank)}
                    self._processes.append(self._job.start(
                        command, cwd=ranks.scratch_folder, env=environment | variables | own,
                        stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT))
        except BaseException:
            self._job.end()
            raise
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def has_ended(self):
        return all(process.poll() is not None for process in self._processes)

    def wait_ended(self, timeout_s):
        return poll_ended(self, timeout_s)

    def workers(self):
        found = {}
        for rank, process in enumerate(self._processes, self._first_rank):
            with suppress(psutil.Error):                       # it has ended
                found[rank] = psutil.Process(process.pid)
        return found

    def first_failure(self):
        self._note_failure()
        return self._failure

    def end(self, workers, timeout_s):
        if timeout_s is None or not self.wait_ended(timeout_s):
            self._is_ending = True                             # failures from now on are caused here
            self._job.end()
            self.wait_ended(5)

    def _watch(self):
        while not self.has_ended:
            self._note_failure()
            if self._failure:
                self._job.end()
            time.sleep(POLL_S)

    def _note_failure(self):
        codes = [process.poll() for process in self._processes]
        failed = next(((rank, code) for rank, code in enumerate(codes, self._first_rank) if code), None)
        self._failure = self._failure or (None if self._is_ending else failed)
