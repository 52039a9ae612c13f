"""How long this rank's device has worked on commands. Used by predictions and autoencoders."""

import collections
import time

import torch


class Clock:
    """Seconds that a device has worked, without those in which it waited for other ranks.

    A CPU has done what it was asked for when the call returns. CUDA does it later, so its marks are events in the order
    of its work, and a span is counted when its end has passed.
    """

    def __init__(self, device):
        self._on_cuda = device.type == "cuda"
        self._spans = collections.deque()

    def mark(self):
        """Now, in the order of the device's work."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, start, end, waits):
        """The device works from mark to mark, but for the pairs of marks in `waits`."""
        self._spans.append((start, end, waits))

    def take(self):
        """Seconds of the spans that are over and were not returned before."""
        seconds = 0.0
        while self._spans and (not self._on_cuda or self._spans[0][1].query()):
            start, end, waits = self._spans.popleft()
            seconds += self._between(start, end) - sum(self._between(*wait) for wait in waits)
        return seconds

    def _between(self, start, end):
        return start.elapsed_time(end) / 1000 if self._on_cuda else end - start
