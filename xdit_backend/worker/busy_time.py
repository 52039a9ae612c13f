"""Measurement of the time that this rank's device works on commands."""

import collections
import time

from ..system import accelerator


class Clock:
    """Busy seconds of a device, without the time in which it waited for other ranks.

    On a CPU, work is done when the call returns. On a GPU it is asynchronous, so marks are events in the stream, and a
    span is counted when its end event has passed.
    """

    def __init__(self, device):
        self._module = accelerator.module(device) if device.type != "cpu" else None
        self._spans = collections.deque()

    def mark(self):
        """Mark the current position in the device's work."""
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def add(self, start, end, waits):
        """Add a span from mark to mark, without the pairs of marks in `waits`."""
        self._spans.append((start, end, waits))

    def take(self):
        """Seconds of the completed spans that were not returned before."""
        seconds = 0.0
        while self._spans and (self._module is None or self._spans[0][1].query()):
            start, end, waits = self._spans.popleft()
            seconds += self._between(start, end) - sum(self._between(*wait) for wait in waits)
        return seconds

    def _between(self, start, end):
        return end - start if self._module is None else start.elapsed_time(end) / 1000
