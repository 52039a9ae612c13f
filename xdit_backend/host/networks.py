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
        self._workers, self.loaded = workers, Loaded(workers)

    def load(self, network):
        """Make sure that every worker holds the Network."""
        if network.name in self.loaded:
            return
        group = self._workers.group
        segments = group.segments.share_all(network.weights())
        spec = specs.NetworkSpec(network.name, segments, network.settings)
        self.loaded.by_name[network.name] = spec
        try:
            self._workers.request(lambda request: messages.LoadNetwork(request, spec), segments.values(), group)
        except BaseException:                                  # some ranks may hold it
            self.loaded.forget(network.name)
            raise

    def forget_all(self):
        """No run is left that they are for. Waits for nothing."""
        for name in self.loaded.names:
            self.loaded.forget(name)
