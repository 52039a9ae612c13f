"""The networks on this rank that nodes put inside a model. Used by predictions.py."""

import dataclasses

from ..hooks.injected_networks import Network
from ..protocol.errors import XDiTError
from ..protocol.shared_memory import map_segment


class Networks:
    """By the names of their specs, for the run at hand."""

    def __init__(self, device):
        self._device, self._held = device, {}

    def load(self, spec):
        if spec.name not in self._held:
            weights = {name: map_segment(segment) for name, segment in spec.weights.items()}
            self._held[spec.name] = Network(spec, weights, self._device)

    def drop(self, name):
        self._held.pop(name, None)

    def of(self, uses, images):
        """((specs.NetworkUse, Network), ...) of a call, for a slice of its images. Raises XDiTError for one that is not
        here."""
        for use in uses:
            if use.network not in self._held:
                raise XDiTError(f"A model patch ({use.network}) is not loaded. Queue the prompt again.")
        return tuple((dataclasses.replace(use, rows=use.rows[images]), self._held[use.network]) for use in uses)

    @property
    def num_bytes(self):
        """Of weights on the device."""
        return sum(network.num_bytes for network in self._held.values())
