"""A process that starts and gets on, however slowly, is told from one that does not."""

import os
import subprocess
import sys
import time

import psutil

from xdit_backend.host import startup_watchdog
from xdit_backend.host.startup_watchdog import StartMonitor
from xdit_backend.protocol.messages import TRYING_LINKS


def test_who_gets_a_piece_now_and_then_lives_and_who_is_stopped_does_not(monkeypatch):
    """Rank 0 reads from something slow, which takes no time of a processor that the system would count."""
    monkeypatch.setattr(startup_watchdog, "POLL_S", 0.1)
    ranks = [subprocess.Popen([sys.executable, "-c", "import os\nprint(flush=True)\nwhile os.read(0, 1): pass"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    processes = {rank: psutil.Process(process.pid) for rank, process in enumerate(ranks)}
    try:
        for process in ranks:
            process.stdout.readline()
        processes[1].suspend()
        signs, found = StartMonitor(os.getpid(), 2, lambda: processes), None
        while found is None:
            time.sleep(0.1)
            ranks[0].stdin.write(b"x")
            ranks[0].stdin.flush()
            found = signs.silent([0, 1], 3)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()

    assert (found[0] == 1 and found[1].startswith("has given no sign of life for 3 s while loading its libraries: it "
                                                  "was stopped, or hung"))


def test_silence_is_what_nobody_has_said_while_somebody_listened(monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(startup_watchdog.time, "monotonic", lambda: now_s)
    signs = StartMonitor(os.getpid(), 0)                       # no worker is this process's: they are on other machines
    signs.record_sign(0, TRYING_LINKS)
    for _ in range(30):
        now_s += 2
        signs.record_sign(0)
        assert signs.silent([0, 1], 10) is None
    now_s += 1000                                              # this process was stopped
    assert signs.silent([0, 1], 10) is None
    for _ in range(5):
        now_s += 2
        assert signs.silent([0, 1], 10) is None
    now_s += 2

    rank, words = signs.silent([0, 1], 10)
    assert (rank == 0 and words.startswith(f"has given no sign of life for 12 s while {TRYING_LINKS}: it was stopped, "
                                           f"or hung"))
