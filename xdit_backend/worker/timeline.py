"""Timeline of this rank's recent work, as spans between marks of the busy-time clock."""

import collections
import time

from ..protocol.messages import Span
from ..system import accelerator

NUM_SPANS = 8192                           # most recent spans to keep


class Timeline:
    """The most recent spans of this rank. Marks are those of Clock: seconds of time.perf_counter, or CUDA events.

    Adding a span only stores its marks; times are read from events on request.
    """

    def __init__(self, device):
        self._device = device
        self._spans = collections.deque(maxlen=NUM_SPANS)

    def add(self, kind, start, end, time=-1.0, first_row=0):
        """Add a span from mark to mark. kind, time, first_row: see messages.Span."""
        self._spans.append((kind, start, end, time, first_row))

    def since(self, since_s):
        """Spans that began at since_s or later, with times of the clock that all processes share. All must have
        ended."""
        anchor_s, anchor = self._anchor() if self._device.type != "cpu" else (0.0, None)
        found = []
        for kind, start, end, step_time, first_row in list(self._spans):
            start_s, end_s = (mark if isinstance(mark, float) else anchor_s - mark.elapsed_time(anchor) / 1000
                              for mark in (start, end))
            if start_s >= since_s:
                found.append(Span(kind, start_s, max(start_s, end_s), step_time, first_row))
        return found

    def _anchor(self):
        """One point in time by both clocks: perf_counter's seconds, and an event of the device, after synchronising."""
        event = accelerator.module(self._device).Event(enable_timing=True)
        event.record()
        event.synchronize()
        return time.perf_counter(), event
