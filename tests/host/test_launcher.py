"""Worker groups start, fail and end in defined ways, and leave nothing behind."""

import os
import signal
import time

import psutil
import pytest

from tests.conftest import left_behind
from tests.host.conftest import call_of, manual
from tests.models.zoo import example
from xdit_backend.host.client import Client
from xdit_backend.host.launcher import WorkerGroup
from xdit_backend.protocol.errors import WorkerDiedError, WorkerStartError
from xdit_backend.protocol.messages import ReportMemory


def gone(before, within_s=5):
    deadline_s = time.monotonic() + within_s
    while set(left_behind()) - before and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return not set(left_behind()) - before


def test_a_worker_that_cannot_start_says_why():
    before, phases = set(left_behind()), []

    with pytest.raises(WorkerStartError) as error:
        WorkerGroup(("cuda:99",), phases.append)

    assert "cuda:99" in str(error.value) and "Error" in str(error.value)
    assert phases and phases[0].text == "starting workers"
    assert gone(before)


def test_giving_up_while_starting_leaves_nothing():
    before = set(left_behind())

    def cancel():
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        WorkerGroup(("cpu", "cpu"), check=cancel)

    assert gone(before)


def test_a_group_starts_serves_and_ends():
    before = set(left_behind())
    group = WorkerGroup(("cpu", "cpu"))

    first = {rank: reply.numbers["pid"] for rank, reply in group.request(ReportMemory).items()}
    second = {rank: reply.numbers["pid"] for rank, reply in group.request(ReportMemory).items()}
    group.close()
    group.close()

    assert first == second and len(set(first.values())) == 2
    assert not group.alive and gone(before, within_s=1)


@pytest.mark.parametrize("victim", ["worker", "torchrun"])
def test_a_killed_process_fails_the_request_by_name_and_the_client_starts_anew(spec_of, victim):
    before = set(left_behind())
    client, one = Client(("cpu", "cpu")), example("SD3")
    run = lambda: client.predict(spec_of("SD3"), manual(ring=2), 4, 4, [call_of(one)])  # noqa: E731
    try:
        want, = run()
        pid = int(client.report_memory()[1]["pid"]) if victim == "worker" else client.group._process.pid
        os.kill(pid, signal.SIGKILL)
        started_s = time.monotonic()
        with pytest.raises(WorkerDiedError, match="Worker rank . .cpu. died") if victim == "worker" else _nothing():
            run()
        assert time.monotonic() - started_s < (10 if victim == "worker" else 60)
        assert not [p for p in psutil.pids() if p == pid and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]
        result, = run()
    finally:
        client.close()

    assert (result - want).abs().max() == 0
    assert gone(before)


class _nothing:
    """A host that finds the launcher gone starts a new group at once; nothing was lost, so nothing is said."""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return False


def test_a_dying_host_takes_its_group_along(tmp_path):
    """kill -9 on the host: its workers and files are gone within 5 seconds."""
    import subprocess
    import sys

    from tests.conftest import ROOT
    code = ("import time; from xdit_backend.host.launcher import WorkerGroup\n"
            "group = WorkerGroup(('cpu', 'cpu')); print('ready', flush=True); time.sleep(60)")
    before = set(left_behind())
    host = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
                            stdout=subprocess.PIPE, text=True)
    assert host.stdout.readline() == "ready\n"
    assert set(left_behind()) - before

    host.kill()
    host.wait()

    assert gone(before, within_s=5)
