"""Workers that are programs of their own, in a job: what Windows has in torchrun's place, tested everywhere."""

import subprocess
import time

import psutil
import pytest

from xdit_backend.host import programs
from xdit_backend.host.launcher import WorkerGroup
from xdit_backend.host.programs import Programs, ProgramSupervisor
from xdit_backend.host.supervisor import LocalRanks
from xdit_backend.protocol.errors import WorkerDiedError
from xdit_backend.protocol.messages import ReportMemory


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(code of each worker): Programs whose workers run this instead; ended afterwards."""
    started = []

    def start(*codes):
        import os
        import sys

        def command(*_):
            return [sys.executable, "-c", "import os; exec(os.environ['CODE_' + os.environ['LOCAL_RANK']])"], {}
        monkeypatch.setattr(programs.system, "python_program", command)
        ranks = LocalRanks(("cpu",) * (len(codes) + 3), 3, len(codes), tmp_path, tmp_path, tmp_path)
        codes = {f"CODE_{rank}": code for rank, code in enumerate(codes)}
        started.append(Programs(ranks, dict(os.environ) | codes))
        return started[-1]
    yield start
    for each in started:
        each.end((), None)


SLEEP = "import time; time.sleep(60)"


def test_two_workers_work_and_end_with_their_group():
    group = WorkerGroup(("cpu", "cpu"), supervisor=ProgramSupervisor())
    pids = [int(done.numbers["pid"]) for done in group.request(ReportMemory).values()]
    why_not_forked = group.why_not_forked
    assert all(psutil.pid_exists(pid) for pid in pids)

    group.close()

    assert why_not_forked and not any(psutil.pid_exists(pid) for pid in pids)


def test_a_killed_worker_is_named_and_the_others_end():
    group = WorkerGroup(("cpu", "cpu"), supervisor=ProgramSupervisor())
    pids = {rank: int(done.numbers["pid"]) for rank, done in group.request(ReportMemory).items()}
    psutil.Process(pids[1]).kill()

    with pytest.raises(WorkerDiedError, match=r"^Worker rank 1 \(cpu\) died \(exit code -?\d+, killed\)"):
        while True:
            group.request(ReportMemory)

    assert not any(map(psutil.pid_exists, pids.values()))
    group.close()


def test_the_first_failure_is_told_and_ends_the_others(start):
    running = start(SLEEP, "raise SystemExit(7)", SLEEP)

    assert running.wait_ended(60)
    assert running.first_failure() == (4, 7)


def test_what_ends_in_good_order_is_no_failure(start):
    running = start("", "")

    assert running.wait_ended(60) and running.first_failure() is None


def test_what_is_ended_by_the_host_is_no_failure(start):
    running = start(SLEEP, SLEEP)
    assert sorted(running.workers()) == [3, 4] and not running.has_ended

    running.end((), timeout_s=0.1)

    assert running.has_ended and running.first_failure() is None


def test_a_system_that_starts_no_more_processes_leaves_none(start, monkeypatch):
    begun, popen = [], subprocess.Popen

    def refuse_second(*arguments, **options):
        if begun:
            raise OSError("no more processes")
        begun.append(popen(*arguments, **options))
        return begun[-1]
    monkeypatch.setattr(subprocess, "Popen", refuse_second)

    with pytest.raises(OSError, match="no more processes"):
        start(SLEEP, SLEEP)

    deadline_s = time.monotonic() + 30
    while begun[0].poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert begun[0].poll() is not None
