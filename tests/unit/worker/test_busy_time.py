"""Busy time: what a device worked, without its waits, counted once and only when it is over."""

import time

import pytest
import torch

from xdit_backend.worker.busy_time import Clock


class Event:
    """A CUDA event whose time is given; it has passed when the device's clock says so."""

    times, now = [], 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.times.pop(0)

    def query(self):
        return Event.now >= self.at

    def elapsed_time(self, end):
        return (end.at - self.at) * 1000


def test_cuda_work_is_counted_when_it_is_over(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.times, Event.now = [1.0, 2.0, 5.0, 6.0, 6.0, 9.0], 0.0
    clock = Clock(torch.device("cuda:0"))
    start, requested, came, end = (clock.mark() for _ in range(4))
    clock.add(start, end, [(requested, came)])
    clock.add(clock.mark(), clock.mark(), [])

    assert clock.take() == 0
    Event.now = 6.5
    assert clock.take() == pytest.approx(2.0)                  # from 1 to 6, of which 3 in waiting
    Event.now = 9.0
    assert clock.take() == pytest.approx(3.0)
    assert clock.take() == 0


def test_a_cpu_has_done_its_work_at_once():
    clock, before_s = Clock(torch.device("cpu")), time.perf_counter()
    start, after_s = clock.mark(), time.perf_counter()
    time.sleep(0.02)
    until_s = time.perf_counter()
    clock.add(start, clock.mark(), [])

    assert until_s - after_s <= clock.take() <= time.perf_counter() - before_s and clock.take() == 0
