"""A hundred cancels in a row leave nothing: in the host, in the workers, in shared memory."""

import json
import os
import random
import signal
import time

import psutil
import pytest

from tests.support.model_zoo import example
from tests.support.tolerances import within
from tests.unit.host.conftest import call_of, decode, decoded, layout
from xdit_backend.protocol.specs import Stages

NUM_CANCELS = 100
LEAK_BYTES = 2 ** 18                       # a cancel that left so much would show; its tensors are smaller, and counted


class Cancelled(Exception):
    """What ComfyUI's cancel button raises, for this host."""


def counted(client):
    """{rank: what lives in a worker}, once it has done what it was asked:
    tensors, objects of ours, and bytes that C allocated."""
    pids = {rank: int(numbers["pid"]) for rank, numbers in client.report_memory().items()}
    told = {}
    for rank, pid in pids.items():
        log = client.group._resources.exit_report.folder / f"rank-{rank}.log"
        before = log.read_text().count("counted ")
        os.kill(pid, signal.SIGUSR1)
        while (text := log.read_text()).count("counted ") == before or not text.endswith("\n"):
            assert psutil.pid_exists(pid)
            time.sleep(0.02)
        told[rank] = json.loads(text.rpartition("counted ")[2])
    return told


def opened(client):
    """[(open files, threads)] of this process and of the workers."""
    pids = sorted(int(numbers["pid"]) for numbers in client.report_memory().values())
    return [(process.num_fds(), process.num_threads()) for process in [psutil.Process(), *map(psutil.Process, pids)]]


@pytest.mark.slow
def test_a_hundred_cancels_leave_nothing_and_the_next_runs_are_right(client, spec_of):
    """What lives is counted, not the system's megabytes: those are as the C library cuts up what it keeps."""
    chance, one = random.Random(5), example("SD3", rows=32, columns=32)
    runs = {
        "cfg": lambda: client.predict(spec_of("SD3"), layout(cfg=2), 4, [call_of(one)] * 2),
        "ring": lambda: client.predict(spec_of("SD3"), layout(ring=2), 4, [call_of(one)]),
        "stages": lambda: client.predict(spec_of("SD3", stages=Stages(2)), layout(pipefusion=2), 4, [call_of(one)]),
        "load": lambda: client.drop(spec_of("SD3").name) or client.models.load(spec_of("SD3")),
        "decode": lambda: decode(client)}
    pids = sorted(int(numbers["pid"]) for numbers in client.report_memory().values())

    def run_each():
        for run in runs.values():
            run()
            client.end_run()

    for _ in range(3):                                         # by then everything has been there
        run_each()
    before, open_before, num_cancelled = counted(client), opened(client), 0
    for _ in range(NUM_CANCELS):
        checks = iter(range(chance.choice((0, 1, 2, 4, 8))))   # for so many moments it goes on

        def check(checks=checks):
            if next(checks, None) is None:
                raise Cancelled
        client.workers.check = check
        try:
            runs[chance.choice(list(runs))]()
        except Cancelled:
            num_cancelled += 1
        finally:
            client.workers.check = lambda: None
            client.end_run()
    for _ in range(3):
        run_each()
    after = counted(client)

    # those that have not a moment: about a fifth, by this seed
    assert num_cancelled >= NUM_CANCELS // 10
    for rank, now in after.items():
        then = before[rank]
        assert (now["tensors"] < then["tensors"] + NUM_CANCELS // 5
                and now["own"] < then["own"] + NUM_CANCELS // 5), (then, now)
        assert now["allocated_bytes"] < then["allocated_bytes"] + NUM_CANCELS * LEAK_BYTES, (then, now)
    assert all(now <= then + 8 for pair in zip(opened(client), open_before)
               for now, then in zip(*pair)), (open_before, opened(client))
    assert client.group.segments.names() == []
    assert [numbers["num_conditionings"] for numbers in client.report_memory().values()] == [0, 0]
    assert sorted(int(numbers["pid"]) for numbers in client.report_memory().values()) == pids
    for name in ("cfg", "ring", "stages"):
        within((runs[name]()[0] - one.run()).abs().max(), 1e-6)
    within((decode(client) - decoded()).abs().max(), 1e-6)
    client.end_run()
    client.drop("vae")
