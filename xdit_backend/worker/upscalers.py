"""Upscale models loaded on this rank, and upscaling of tiles with them."""

import torch

from ..checkpoints.build_upscaler import NODE, load_upscaler
from ..protocol.errors import UnsupportedError
from ..protocol.shared_memory import map_segment
from .busy_time import Clock


class Upscalers:
    """The upscale models loaded on this rank, by spec name. Ranks do not wait for each other."""

    def __init__(self, rank, device, staging, report_phase, timeline):
        self._rank, self._device, self._staging, self._report_phase = rank, device, staging, report_phase
        self._timeline, self._clock, self._loaded = timeline, Clock(device), {}

    def load(self, spec):
        if spec.name not in self._loaded:
            tensors = {name: map_segment(segment) for name, segment in spec.weights.items()}
            self._loaded[spec.name] = load_upscaler(tensors, spec.facts).to(self._device)

    def drop(self, name):
        self._loaded.pop(name, None)

    @property
    def weight_bytes(self):
        """Bytes on the device."""
        return sum(tensor.nbytes for descriptor in self._loaded.values()
                   for tensor in (*descriptor.model.parameters(), *descriptor.model.buffers()))

    def upscale(self, command, traffic, check):
        """Upscale this rank's tiles of messages.Upscale. check() is called before each and may raise to abort.

        Raises UnsupportedError for a model whose output has another shape than spandrel says.
        """
        descriptor, start = self._loaded[command.upscaler], self._clock.mark()
        for number, tile in enumerate(command.tiles, command.first + 1):
            if tile.rank != self._rank:
                continue
            check()
            target = map_segment(tile.upscaled)
            upscaled = descriptor(self._staging.to_device(map_segment(tile.image)))
            if upscaled.shape != target.shape:
                raise UnsupportedError(f"Use {NODE} for this upscale model: it returns a tile of the shape "
                                       f"{tuple(upscaled.shape)}, and spandrel says {tuple(target.shape)}.")
            self._staging.to_host(upscaled.to(torch.float32), target)
            self._report_phase("upscaling", number, command.total)
        self._timeline.add("upscale", start, self._clock.mark())
