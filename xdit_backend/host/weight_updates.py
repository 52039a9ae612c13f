"""Bookkeeping of weight updates (LoRA and similar): requested ones, ones in effect, and cached earlier versions."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..protocol import specs

BATCH_BYTES = 2 ** 28                      # of weights that workers update at a time


@dataclass(frozen=True)
class Change:
    """An update of one tensor of a model's file. Changes with equal `of` are equal."""

    of: tuple                              # identity of its inputs
    num_bytes: int = field(compare=False)  # of the tensor
    make: Callable = field(compare=False)  # (share) -> specs.Change; share(tensor) -> its segment
    rank: int = field(default=0, compare=False)                # of the low-rank factors sent; 0: the full tensor


class Changes:
    """Updates of each model's weights: model name -> {tensor in its file: Change}. Other tensors are as in the file."""

    def __init__(self):
        self._requested, self._in_effect = {}, {}
        # model name -> {version number: changes that a run has replaced}, which workers may have cached
        self._left, self._num_versions = {}, 0

    def request(self, model, changes):
        self._requested[model] = changes

    def requested(self, model):
        return self._requested.get(model, {})

    def forget(self, model):
        """Remove the request."""
        self._requested.pop(model, None)

    def are_in_effect(self, model):
        return self._in_effect.get(model, {}) == self.requested(model)

    def take_effect(self, model, changes):
        """Record that the workers have applied these changes."""
        self._in_effect[model] = changes

    def loaded(self, model):
        """Record that the workers have loaded the model unchanged."""
        self._in_effect.pop(model, None)

    def pending(self, model):
        """Changes that turn the weights in effect into the requested ones."""
        before, wanted = self._in_effect.get(model, {}), self.requested(model)
        back = {name: Change((), change.num_bytes, _as_in_the_file) for name, change in before.items()
                if name not in wanted}
        return back | {name: change for name, change in wanted.items() if before.get(name) != change}

    def leave(self, model):
        """Return the unique number of the version in effect, which a run is about to replace."""
        before = self._in_effect.get(model, {})
        number = _number_of(before, self._left.setdefault(model, {}))
        if number is None:
            self._num_versions += 1
            self._left[model][self._num_versions] = before
        return number or self._num_versions

    def left(self, model):
        """Number of the requested version if a run has replaced it before; else None."""
        return _number_of(self.requested(model), self._left.get(model, {}))

    def end_runs(self):
        """Forget earlier versions: no run is left that could return to one."""
        self._left.clear()


def batches(changes):
    """Split changes into batches of BATCH_BYTES, since all weights may not fit into memory twice."""
    batch, num_bytes = {}, 0
    for name, change in changes.items():
        if batch and num_bytes + change.num_bytes > BATCH_BYTES:
            yield batch
            batch, num_bytes = {}, 0
        batch[name] = change
        num_bytes += change.num_bytes
    if batch:
        yield batch


def _as_in_the_file(share):
    return specs.Change(None, ())


def _number_of(changes, versions):
    return next((number for number, others in versions.items() if others == changes), None)
