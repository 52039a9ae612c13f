"""Measurement of the time that this rank's device works on commands."""

import collections
import time

import torch


class Clock:
    """Busy seconds of a device, without the time in which it waited for other ranks.

    On a CPU, work is done when the call returns. On CUDA it is asynchronous, so marks are events in the stream, and a
    span is counted when its end event has passed.
    """

    def __init__(self, device):
        self._on_cuda = device.type == "cuda"
        self._spans = collections.deque()

    def mark(self):
        """Mark the current position in the device's work."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, start, end, waits):
        """Add a span from mark to mark, without the pairs of marks in `waits`."""
        self._spans.append((start, end, waits))

    def take(self):
        """Seconds of the completed spans that were not returned before."""
        seconds = 0.0
        while self._spans and (not self._on_cuda or self._spans[0][1].query()):
            start, end, waits = self._spans.popleft()
            seconds += self._between(start, end) - sum(self._between(*wait) for wait in waits)
        return seconds

    def _between(self, start, end):
        return start.elapsed_time(end) / 1000 if self._on_cuda else end - start
