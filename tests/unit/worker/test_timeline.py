"""What a rank has done when, as its marks say."""

import time

import torch

from tests.unit.worker.test_busy_time import Event
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
