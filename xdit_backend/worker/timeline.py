"""What this rank has done lately, and when: spans between marks that are taken anyway.
Used by the engine; sent when it is asked for."""

import collections
import time

import torch

from ..protocol.messages import Span

NUM_SPANS = 8192                           # that are kept: the last ones


class Timeline:
    """The last spans of this rank. A mark is the Clock's: seconds of time.perf_counter, or a CUDA event.

    Adding one keeps the marks and no more; times are read from events when somebody asks for them.
    """

    def __init__(self, device):
        self._device = device
        self._spans = collections.deque(maxlen=NUM_SPANS)

    def add(self, kind, start, end, time=-1.0, first_row=0):
        """The device did this from mark to mark. kind, time, first_row: see messages.Span."""
        self._spans.append((kind, start, end, time, first_row))

    def since(self, since_s):
        """The spans that began at since_s or later, all of which are over:
        their times on the clock that all processes share."""
        anchor_s, anchor = self._anchor() if self._device.type == "cuda" else (0.0, None)
        found = []
        for kind, start, end, step_time, first_row in list(self._spans):
            start_s, end_s = (mark if isinstance(mark, float) else anchor_s - mark.elapsed_time(anchor) / 1000
                              for mark in (start, end))
            if start_s >= since_s:
                found.append(Span(kind, start_s, max(start_s, end_s), step_time, first_row))
        return found

    def _anchor(self):
        """A moment by both clocks: perf_counter's seconds, and an event of the device, when all before is done."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        return time.perf_counter(), event
