"""Networks that nodes put inside a model, and that a group's workers hold for a run. Used by client.py."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..protocol import messages, specs
from .workers import Loaded


@dataclass(frozen=True, eq=False)
class Network:
    """One that workers are to hold, as specs.NetworkSpec."""

    name: str
    weights: Callable[[], dict]            # gives its tensors; called only where the group does not hold it
    settings: dict = field(default_factory=dict)


class Networks:
    """Of the group of these Workers."""

    def __init__(self, workers):
        self.loaded = Loaded(workers)

    def load(self, network):
        """Make sure that every worker holds the Network."""
        self.loaded.load(network, lambda segments: specs.NetworkSpec(network.name, segments, network.settings),
                         messages.LoadNetwork)

    def forget_all(self):
        """No run is left that they are for. Waits for nothing."""
        for name in self.loaded.names:
            self.loaded.forget(name)
