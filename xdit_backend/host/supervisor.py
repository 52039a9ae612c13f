"""Interface of a process supervisor, which starts the workers of one machine and reports how they end.

On Linux it is torchrun, forked from a process that has imported the workers' libraries (forkserver.py), on Windows
programs.py.
A supervisor does no rendezvous: ranks, world size and the store are known before it starts.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

ROOT = Path(__file__).resolve().parents[2]         # the folder that contains the package, for the workers' PYTHONPATH
POLL_S = 0.02


@dataclass(frozen=True)
class LocalRanks:
    """The consecutive ranks of a worker group that run on this machine.

    devices: of all ranks of the group. folder: the group's private folder (0700, in memory), which has the workers'
    socket and store. scratch_folder: its folder on disk. log_folder: receives `rank-N.log` of each worker and the
    supervisor's own output.
    """

    devices: tuple[str, ...]
    first_rank: int
    num_ranks: int
    folder: Path
    scratch_folder: Path
    log_folder: Path


class WorkerProcesses(Protocol):
    """The running workers of a LocalRanks, and their supervising process."""

    pid: int
    why_not_forked: str                            # reason why each worker imports its libraries itself, or ""

    @property
    def has_ended(self) -> bool:
        """Whether all workers and their supervising process have ended."""

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for the end, at most timeout_s; returns has_ended."""

    def workers(self) -> dict[int, psutil.Process]:
        """{rank: its process} of the workers started so far. Raises psutil.Error if the supervising process ended."""

    def first_failure(self) -> tuple[int, int] | None:
        """(rank, exit code) of the worker that failed first; None if no failure is known."""

    def end(self, workers, timeout_s: float | None) -> None:
        """Wait for the end, then terminate and finally kill what still runs.

        workers: processes of ranks, which are killed even if the supervising process is already gone.
        timeout_s: None kills at once.
        """


def poll_ended(processes, timeout_s):
    """WorkerProcesses.wait_ended by polling has_ended."""
    deadline_s = time.monotonic() + timeout_s
    while not processes.has_ended and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return processes.has_ended


class Supervisor(Protocol):
    """Starts worker processes. Thread-safe."""

    def prepare(self, environment: dict[str, str]) -> object:
        """Load the libraries of workers that will run in this environment; returns at once."""

    def start(self, ranks: LocalRanks, environment: dict[str, str], check=lambda: None) -> WorkerProcesses:
        """Start one worker process per rank. check() may raise to give up.

        Raises WorkerStartError if they cannot be started.
        """

    def close(self) -> None:
        """End all processes that it started."""
