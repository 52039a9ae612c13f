"""What a rank has done when, and the memory of a run: as its marks and the system say."""

import time

import pytest
import torch

from tests.worker.test_clock import Event
from xdit_backend.worker import memory as memory_module
from xdit_backend.worker.memory import Memory
from xdit_backend.worker.timeline import NUM_SPANS, Timeline


def test_spans_are_those_since_a_moment_and_the_last_so_many():
    timeline = Timeline(torch.device("cpu"))
    for index in range(NUM_SPANS + 5):
        timeline.add("whole", float(index), index + 0.5, time=1000.0 - index)

    assert len(timeline.since(0.0)) == NUM_SPANS and timeline.since(0.0)[0].start_s == 5.0
    found = timeline.since(NUM_SPANS + 2.0)
    assert [(span.start_s, span.end_s, span.time) for span in found] == [
        (index, index + 0.5, 1000.0 - index) for index in range(NUM_SPANS + 2, NUM_SPANS + 5)]


def test_events_of_a_device_become_seconds_of_the_host(monkeypatch):
    """An event of the device's second 3, where its second 10 is the host's second 100, is the host's second 93."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "synchronize", lambda self: None, raising=False)
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    monkeypatch.setattr(Event, "times", [3.0, 4.5, 10.0])
    timeline, start, end = Timeline(torch.device("cuda")), Event(True), Event(True)
    start.record()
    end.record()
    timeline.add("patch", start, end, time=500.0, first_row=8)

    span, = timeline.since(90.0)

    assert (span.start_s, span.end_s, span.first_row) == (93.0, 94.5, 8)


def test_memory_is_told_where_the_system_says_little(tmp_path, monkeypatch):
    """As in gVisor, under which some clouds run containers."""
    monkeypatch.setattr(memory_module, "STATUS", tmp_path / "status")
    memory_module.STATUS.write_text("Name:\tpython\nVmSize:\t  100 kB\nVmRSS:\t  90 kB\n")
    memory = Memory(torch.device("cpu"))
    memory.begin_run()
    memory.give_back(1)

    assert memory.report()["reserved_bytes"] > 2 ** 20 and memory.report()["activation_bytes"] == 0


@pytest.mark.skipif(not memory_module.STATUS.exists(), reason="the system does not say")
def test_a_run_s_memory_is_what_it_took_and_gave_back():
    memory, size = Memory(torch.device("cpu")), 300 * 2 ** 20
    memory.give_back()                                         # or the block goes where an earlier test's were, and takes nothing more
    memory.begin_run()
    before = memory.report()
    block = torch.ones(size, dtype=torch.uint8)
    during = memory.report()
    del block

    # The system may take pages of libraries back meanwhile.
    assert during["reserved_bytes"] - before["reserved_bytes"] > 0.4 * size
    assert 0.4 * size < memory.report()["activation_bytes"] < 1.6 * size
    assert memory.report()["total_bytes"] > 2 ** 30
