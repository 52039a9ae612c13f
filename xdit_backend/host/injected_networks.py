"""Networks that nodes inject into a model, loaded on a group's workers for a run."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..protocol import messages, specs
from .workers import Loaded


@dataclass(frozen=True, eq=False)
class Network:
    """An injected network for the workers to load; see specs.NetworkSpec."""

    name: str
    weights: Callable[[], dict]            # returns its tensors; called only if the group has not loaded it
    settings: dict = field(default_factory=dict)


class Networks:
    """The injected networks of a worker group. workers: its Workers."""

    def __init__(self, workers):
        self.loaded = Loaded(workers)

    def load(self, network):
        """Load the Network on every worker unless it is loaded."""
        self.loaded.load(network, lambda segments: specs.NetworkSpec(network.name, segments, network.settings),
                         messages.LoadNetwork)

    def forget_all(self):
        """Unload all networks after the last run, without waiting."""
        for name in self.loaded.names:
            self.loaded.forget(name)
