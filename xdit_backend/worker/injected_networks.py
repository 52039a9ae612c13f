"""Injected networks loaded on this rank."""

import dataclasses

from ..hooks.injected_networks import Network
from ..protocol.errors import XDiTError
from ..protocol.shared_memory import map_segment


class Networks:
    """The injected networks of the current run, by spec name."""

    def __init__(self, device):
        self._device, self._loaded = device, {}

    def load(self, spec):
        if spec.name not in self._loaded:
            weights = {name: map_segment(segment) for name, segment in spec.weights.items()}
            self._loaded[spec.name] = Network(spec, weights, self._device)

    def drop(self, name):
        self._loaded.pop(name, None)

    def of(self, uses, images):
        """((specs.NetworkUse, Network), ...) of a call, for a slice of its images. Raises XDiTError if one is not
        loaded."""
        for use in uses:
            if use.network not in self._loaded:
                raise XDiTError(f"Queue the prompt again: the model patch {use.network} is not loaded.")
        return tuple((dataclasses.replace(use, rows=use.rows[images]), self._loaded[use.network]) for use in uses)

    @property
    def num_bytes(self):
        """Bytes of weights on the device."""
        return sum(network.num_bytes for network in self._loaded.values())
