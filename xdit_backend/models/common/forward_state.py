"""A value that a model's forward sets for its blocks. Created in Family.adapt_model."""

from contextlib import contextmanager
from contextvars import ContextVar

import torch


class ForwardValue:
    """A value of the running forward; forwards can be interleaved.

    Inside a graph of a compiled block, which cannot read a ContextVar, get() returns the value of the last `capture`.
    """

    def __init__(self, model, default=None):
        self._now = ContextVar("forward_value", default=default)
        self._known = default
        model.__dict__.setdefault("forward_values", []).append(self)

    def set(self, value):
        self._now.set(value)

    @contextmanager
    def holding(self, value):
        """Context manager that sets the value during a forward."""
        before = self._now.set(value)
        try:
            yield
        finally:
            self._now.reset(before)

    def get(self):
        return self._known if torch.compiler.is_compiling() else self._now.get()

    def capture(self):
        """Make the running forward's value visible to compiled graphs. Called before each of its blocks."""
        self._known = self._now.get()

    def __bool__(self):
        return bool(self.get())
