"""Upscale models loaded on a group's workers, and upscaling of tiles with them."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..protocol import messages, specs
from .workers import Loaded

AHEAD = 2                                  # commands that workers have while the host takes the tiles of another one


@dataclass(frozen=True)
class Upscaler:
    """An upscale model for the workers to load."""

    name: str
    weights: Callable[[], dict]            # returns its tensors; called only if the group has not loaded it
    facts: dict                            # see UpscalerSpec


class Upscalers:
    """The upscale models of a worker group. workers: its Workers."""

    def __init__(self, workers):
        self._workers, self.loaded = workers, Loaded(workers)

    @property
    def names(self):
        """Names of the upscale models loaded by the running group."""
        return self.loaded.names

    def load(self, upscaler):
        """Load the Upscaler, or an object with its fields, on every worker unless it is loaded."""
        self.loaded.load(upscaler, lambda segments: specs.UpscalerSpec(upscaler.name, segments, upscaler.facts),
                         messages.LoadUpscaler)

    def upscale(self, name, tiles, ranks, scale, num_channels):
        """Yield the tiles upscaled by a loaded model, in their order.

        tiles: [function without arguments that returns a float32 tensor (1, C, H, W) in [0, 1]]. ranks: for each the
        rank that upscales it. num_channels: of a result (1, num_channels, H * scale, W * scale), a view of the shared
        memory that the worker wrote. Only a few tiles per device are in shared memory at a time. Raises like
        WorkerGroup.wait; if the caller closes the generator, the workers abort.
        """
        group, pending = self._workers.holding, deque()
        num_together = len(self._workers.devices)
        try:
            for first in range(0, len(tiles), num_together):
                pending.append(_post(group, name, tiles, ranks, range(first, min(len(tiles), first + num_together)),
                                     scale, num_channels))
                if len(pending) > AHEAD:
                    yield from self._take(group, pending)
            while pending:
                yield from self._take(group, pending)
        except BaseException:
            group.abandon([number for number, _ in pending])
            raise

    def _take(self, group, pending):
        """Wait for the first of [(request number, views of its results)]; yields its results."""
        group.wait([number for number, _ in pending][:1], self._workers.on_phase, self._workers.check)
        yield from pending.popleft()[1]


def _post(group, name, tiles, ranks, numbers, scale, num_channels):
    """Send the tiles of these numbers; returns (request number, views of their results)."""
    entries, views = [], []
    with group.segments.removed_on_failure() as segments:
        for number in numbers:
            tile = tiles[number]()
            image = group.segments.share(tile)
            segments.append(image)
            rows, columns = tile.shape[-2:]
            upscaled, view = group.segments.create((1, num_channels, rows * scale, columns * scale), torch.float32)
            segments.append(upscaled)
            entries.append(specs.Tile(ranks[number], image, upscaled))
            views.append(view)
    return group.post(lambda request: messages.Upscale(request, name, entries, numbers[0], len(tiles)), segments), views
