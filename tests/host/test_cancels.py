"""A hundred cancels in a row leave nothing: in the host, in the workers, in shared memory."""

import random
import time

import psutil
import pytest

from tests.host.conftest import call_of, decode, decoded, layout
from tests.models.zoo import example
from tests.tolerances import within
from xdit_backend.protocol.messages import Stages


class Cancelled(Exception):
    """What ComfyUI's cancel button raises, for this host."""


@pytest.mark.slow
def test_a_hundred_cancels_leave_nothing_and_the_next_runs_are_right(client, spec_of):
    chance, one = random.Random(5), example("SD3", rows=32, columns=32)
    runs = {
        "cfg": lambda: client.predict(spec_of("SD3"), layout(cfg=2), 4, [call_of(one)] * 2),
        "ring": lambda: client.predict(spec_of("SD3"), layout(ring=2), 4, [call_of(one)]),
        "stages": lambda: client.predict(spec_of("SD3", stages=Stages(2)), layout(pipefusion=2), 4, [call_of(one)]),
        "load": lambda: client.drop(spec_of("SD3").name) or client.load_model(spec_of("SD3")),
        "decode": lambda: decode(client)}
    pids = sorted(int(numbers["pid"]) for numbers in client.report_memory().values())

    def held():
        client.report_memory()                                 # when all that was given up is done
        processes = [psutil.Process(), *map(psutil.Process, pids)]
        return [(process.num_fds(), process.num_threads()) for process in processes], [
            process.memory_full_info().uss / 2 ** 20 for process in processes]

    for run in runs.values():
        run()
    num_cancelled = 0
    for number in range(100):
        if number == 20:                                       # by now everything has been there once
            before = held()
        until_s = time.monotonic() + chance.uniform(0, 0.1)

        def check(until_s=until_s):
            if time.monotonic() > until_s:
                raise Cancelled
        client.check = check
        try:
            runs[chance.choice(list(runs))]()
        except Cancelled:
            num_cancelled += 1
        finally:
            client.check = lambda: None
            client.end_run()
    after = held()

    assert num_cancelled > 30
    assert all(now <= then + 2 for pair in zip(after[0], before[0]) for now, then in zip(*pair)), (before, after)
    assert all(now < then + 30 for now, then in zip(after[1], before[1])), (before, after)
    assert client.group.segments.names() == []
    assert [numbers["num_conditionings"] for numbers in client.report_memory().values()] == [0, 0]
    assert sorted(int(numbers["pid"]) for numbers in client.report_memory().values()) == pids
    for name in ("cfg", "ring", "stages"):
        within((runs[name]()[0] - one.run()).abs().max(), 1e-6)
    within((decode(client) - decoded()).abs().max(), 1e-6)
    client.end_run()
    client.drop("vae")
