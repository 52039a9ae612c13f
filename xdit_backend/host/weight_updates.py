"""Changes of models' weights, as LoRA nodes and the like ask for them: requested, in effect, or kept as an earlier
version of a run.

The client keeps one Changes, and has the workers do what it says.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..protocol import specs

BATCH_BYTES = 2 ** 28                      # of weights that workers change at a time


@dataclass(frozen=True)
class Change:
    """What becomes of one tensor of a model's file. Two are the same where `of` is equal."""

    of: tuple                              # what it is made of
    num_bytes: int = field(compare=False)  # of the tensor
    make: Callable = field(compare=False)  # (share) -> specs.Change; share(tensor) -> its segment
    rank: int = field(default=0, compare=False)                # of the factors that are sent; 0: the tensor is


class Changes:
    """Changes of each model's weights, by the name of the model: {tensor of its file: Change}. All other tensors are as
    in the file."""

    def __init__(self):
        self._requested, self._in_effect = {}, {}
        # name of a model -> {number: those that a run has left}, which may be kept
        self._left, self._num_versions = {}, 0

    def request(self, model, changes):
        self._requested[model] = changes

    def requested(self, model):
        return self._requested.get(model, {})

    def forget(self, model):
        """No changes are requested any more."""
        self._requested.pop(model, None)

    def are_in_effect(self, model):
        return self._in_effect.get(model, {}) == self.requested(model)

    def take_effect(self, model, changes):
        """The workers have made these changes."""
        self._in_effect[model] = changes

    def loaded(self, model):
        """The workers hold the model as its file has it."""
        self._in_effect.pop(model, None)

    def pending(self, model):
        """What turns the weights in effect into those requested."""
        before, wanted = self._in_effect.get(model, {}), self.requested(model)
        back = {name: Change((), change.num_bytes, _as_in_the_file) for name, change in before.items()
                if name not in wanted}
        return back | {name: change for name, change in wanted.items() if before.get(name) != change}

    def leave(self, model):
        """The number of the version that is in effect, which a run leaves now or has left before. No other version ever
        has it."""
        before = self._in_effect.get(model, {})
        number = _number_of(before, self._left.setdefault(model, {}))
        if number is None:
            self._num_versions += 1
            self._left[model][self._num_versions] = before
        return number or self._num_versions

    def left(self, model):
        """The number of the requested version, where a run has left it before; else None."""
        return _number_of(self.requested(model), self._left.get(model, {}))

    def end_runs(self):
        """No run is under way that could go back to an earlier version."""
        self._left.clear()


def batches(changes):
    """The changes, a few at a time, since there may be no room for all weights twice."""
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
