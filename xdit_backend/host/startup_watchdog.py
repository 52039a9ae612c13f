"""Do the processes of a group that starts make progress? Used by the launcher, and where other machines join.

Libraries that come from a slow disk may take minutes, in which a worker says nothing. But each read that completes
wakes its process, and the system counts that. A process that is stopped, or waits for what never comes, is not woken.
Later a worker waits for others, and sends heartbeats.
"""

import signal
import time
from contextlib import suppress

import psutil

from ..protocol.messages import JOINING, TRYING_LINKS

HELP = "What to try stands in docs/guide/troubleshooting.md, in the folder of the xDiT nodes."
POLL_S = 1.0                               # from one check to the next
AWAY_S = 5.0                               # for so long this process did not look: it was stopped itself
TORCHRUN = -1                              # stands for it beside the ranks
# After what it has said last; else it prepares its device.
ACTIVITIES = {None: "loading its libraries", JOINING: JOINING, TRYING_LINKS: TRYING_LINKS}


class StartMonitor:
    """Records when a starting process and the workers below it last gave a sign of life.

    pid: of torchrun, or another process that is watched likewise. num_own: the number of workers that it starts here.
    workers: WorkerProcesses.workers.
    """

    def __init__(self, pid, num_own, workers=dict):
        self._pid, self._num_own, self._workers, self._polled_s = pid, num_own, workers, time.monotonic()
        # rank, or TORCHRUN -> what the system counted at the last look
        self._counts = {}
        self._since_s = {TORCHRUN: self._polled_s}             # rank, or TORCHRUN -> when it last gave a sign
        self._phases = {}                                      # rank -> the text of its last Phase

    def record_sign(self, rank, text=None):
        """A rank has sent a message. text: what it does now; None: it only said that it lives."""
        self._since_s[rank] = time.monotonic()
        if text is not None:
            self._phases[rank] = text

    def silent(self, ranks, limit_s):
        """Which of these ranks has given no sign for so long, or is torchrun it, and what it did:
        (rank or TORCHRUN, words), else None."""
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
        with suppress(psutil.Error):                           # torchrun has ended, as others notice
            torchrun = psutil.Process(self._pid)
            ranks = self._workers()
            for rank, process in ranks.items():
                self._count(rank, process)
            if len(ranks) < self._num_own:
                self._count(TORCHRUN, torchrun)
            else:
                self._since_s.pop(TORCHRUN, None)              # it has done its part

    def _count(self, whose, process):
        with suppress(psutil.Error):                           # it has ended, as others notice
            counts = [process.cpu_times(), process.memory_info().rss]
            with suppress(NotImplementedError):                # a kernel that does not tell, as that of some containers
                counts.append(process.num_ctx_switches())
            if counts != self._counts.get(whose):
                self._counts[whose], self._since_s[whose] = counts, time.monotonic()


def describe_exit(code):
    """" (exit code -9, killed)", or "" where it is not known. SIGBUS is of memory whose file lacks it."""
    if code is None:
        return ""
    names = {-number.value: number.name for number in signal.Signals} | {
        -signal.SIGKILL: "killed",
        -signal.SIGBUS: "SIGBUS: a file that it reads was cut short, or shared memory is full"}
    return f" (exit code {code}{f', {names[code]}' if code in names else ''})"

