"""Startup watchdog: detects processes of a starting group that make no progress.

Loading libraries from a slow disk may take minutes, during which a worker sends nothing. But each completed read wakes
its process, which the system counts. A process that is stopped, or blocked forever, is not woken. After that phase,
workers send heartbeats.
"""

import time
from contextlib import suppress

import psutil

from .. import system
from ..protocol.messages import JOINING, TRYING_LINKS

HELP = "See docs/guide/troubleshooting.md in the folder of the xDiT nodes."
POLL_S = 1.0                               # between checks
AWAY_S = 5.0                               # after a longer pause between checks, this process itself was suspended
TORCHRUN = -1                              # key used for it next to the ranks
# text of the last Phase -> activity after it; other texts: preparing the device
ACTIVITIES = {None: "loading its libraries", JOINING: JOINING, TRYING_LINKS: TRYING_LINKS}


class StartMonitor:
    """Records when a starting process and its workers last gave a sign of life.

    pid: of torchrun, or another process to monitor in the same way. num_own: number of workers that it starts on this
    machine. workers: WorkerProcesses.workers.
    """

    def __init__(self, pid, num_own, workers=dict):
        self._pid, self._num_own, self._workers, self._polled_s = pid, num_own, workers, time.monotonic()
        # rank, or TORCHRUN -> the system's counters at the last check
        self._counts = {}
        self._since_s = {TORCHRUN: self._polled_s}             # rank, or TORCHRUN -> time of its last sign of life
        self._phases = {}                                      # rank -> text of its last Phase

    def record_sign(self, rank, text=None):
        """Record a message of a rank. text: of a Phase; None: another message."""
        self._since_s[rank] = time.monotonic()
        if text is not None:
            self._phases[rank] = text

    def silent(self, ranks, limit_s):
        """Find one of these ranks, or torchrun, that has been silent for longer than limit_s.

        Returns (rank or TORCHRUN, predicate of a sentence about it), or None.
        """
        now_s = time.monotonic()
        if now_s - self._polled_s > AWAY_S:
            self._since_s = dict.fromkeys(self._since_s, now_s)
        if now_s - self._polled_s >= POLL_S:
            self._polled_s = now_s
            self._poll()
        late = [rank for rank in (*ranks, TORCHRUN) if now_s - self._since_s.get(rank, now_s) > limit_s]
        if not late:
            return None
        rank = min(late, key=self._since_s.get)
        activity = ("starting the workers" if rank == TORCHRUN
                    else ACTIVITIES.get(self._phases.get(rank), "preparing its device"))
        return rank, (f"has given no sign of life for {now_s - self._since_s[rank]:.0f} s while {activity}: it was "
                      f"stopped, or hung, and is ended")

    def _poll(self):
        with suppress(psutil.Error):                           # torchrun has ended, which the handshake notices
            torchrun = psutil.Process(self._pid)
            ranks = self._workers()
            for rank, process in ranks.items():
                self._count(rank, process)
            if len(ranks) < self._num_own:
                self._count(TORCHRUN, torchrun)
            else:
                self._since_s.pop(TORCHRUN, None)              # it has started all workers

    def _count(self, whose, process):
        with suppress(psutil.Error):                           # it has ended, which the handshake notices
            counts = [process.cpu_times(), process.memory_info().rss]
            with suppress(NotImplementedError):                # not counted by the kernels of some containers
                counts.append(process.num_ctx_switches())
            if counts != self._counts.get(whose):
                self._counts[whose], self._since_s[whose] = counts, time.monotonic()


def describe_exit(code):
    """Return " (exit code -9, killed)", or "" for None."""
    if code is None:
        return ""
    return f" (exit code {code}{f', {system.EXIT_CODES[code]}' if code in system.EXIT_CODES else ''})"
