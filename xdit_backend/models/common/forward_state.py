"""A value that a model's forward leaves for its blocks. Families' files make them in `amend`."""

from contextlib import contextmanager
from contextvars import ContextVar

import torch


class ForwardValue:
    """Of the forward that runs: others may take turns with it.

    A graph of a compiled block finds what `foresee` has read, since the compiler knows no ContextVar.
    """

    def __init__(self, model, default=None):
        self._now = ContextVar("forward_value", default=default)
        self._known = default
        model.__dict__.setdefault("forward_values", []).append(self)

    def set(self, value):
        self._now.set(value)

    @contextmanager
    def holding(self, value):
        """Around a forward."""
        before = self._now.set(value)
        try:
            yield
        finally:
            self._now.reset(before)

    def get(self):
        return self._known if torch.compiler.is_compiling() else self._now.get()

    def foresee(self):
        """Have graphs find the value of the forward that runs. Called before each block of it."""
        self._known = self._now.get()

    def __bool__(self):
        return bool(self.get())
