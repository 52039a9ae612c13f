"""How much memory a decode or encode by tiles takes, and what there is to do, found on the meta device before it
starts: one tile of each shape is computed there, and the rest is what the autoencoder does around them.

planner_of is called by the worker.
"""

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..autoencoders import family_of
from ..protocol.errors import ConfigError
from .vae_memory import HEADROOM, MARGIN, ActivationBytes, MemoryTraffic, RowPlanner, least_free, meta_copy
from .vae_rows import decode_rows, encode_rows
from .vae_tiles import num_rounds, with_tiles


def planner_of(vae):
    """What says how a decode or encode with this autoencoder is gone about: a RowPlanner or a TilePlanner."""
    return TilePlanner(vae) if family_of(vae).tiles else RowPlanner(vae)


@dataclass(frozen=True)
class Tiles:
    """Of one item of a batch. peak_bytes: beside the weights, of the rank that blends. work: see work_of."""

    peak_bytes: int
    num_tiles: int
    work: dict


def tiles_of(meta_vae, shape, scale):
    """The Tiles of decoding (scale 1) or encoding a tensor of this shape."""
    of_shapes, num_tiles, work = {}, 0, dict.fromkeys(("flops", "moved_bytes", "exchanges", "halo_bytes"), 0.0)

    def one(compute, shape_of, tile):
        nonlocal num_tiles, work
        if tile.shape not in of_shapes:
            of_shapes[tile.shape] = _one_tile(compute, tile)
        peak_bytes, own_work = of_shapes[tile.shape]
        num_tiles += 1
        work = {name: value + own_work[name] for name, value in work.items()}
        footprint.peak_bytes = max(footprint.peak_bytes, footprint.activation_bytes + peak_bytes)
        return tile.new_empty(shape_of(tile.shape))

    with ActivationBytes() as footprint, with_tiles(meta_vae, family_of(meta_vae).tiles, one):
        given = torch.empty(shape, dtype=meta_vae.dtype, device="meta")
        if scale == 1:
            decode_rows(meta_vae, given)
        else:
            encode_rows(meta_vae, given, scale)
    return Tiles(footprint.peak_bytes, num_tiles, work)


def _one_tile(compute, tile):
    """(bytes, {field of planner.vae_cost.Work: number}). Half of the tiles travel between two ranks."""
    with ActivationBytes() as footprint, FlopCounterMode(display=False) as flops, MemoryTraffic() as moved:
        made = compute(tile)
    return int(HEADROOM * footprint.peak_bytes), {
        "flops": float(flops.get_total_flops()), "moved_bytes": float(moved.moved_bytes), "exchanges": 1.0,
        "halo_bytes": made.nbytes / 2}


class TilePlanner:
    """What RowPlanner says of rows, of tiles: every rank needs the same, and nothing is computed in blocks."""

    def __init__(self, vae):
        self._meta_vae, self._device, self._found = meta_copy(vae), vae.device, {}

    def plan(self, shape, scale, ranks, free_bytes, speeds=(), traffic=None):
        """(None, the rounds of tiles to come, the speeds by which tiles are shared out), as RowPlanner's."""
        free_bytes, tiles, speeds = (least_free(free_bytes, ranks, self._device, traffic), self._tiles(shape, scale),
                                     speeds[:ranks.count])
        if tiles.peak_bytes * MARGIN > free_bytes:
            raise ConfigError(_does_not_fit(shape, scale, tiles.peak_bytes * MARGIN, free_bytes))
        return None, num_rounds(tiles.num_tiles, speeds or (1,) * ranks.count), speeds

    def least_bytes(self, shape, scale, num_ranks):
        return int(self._tiles(shape, scale).peak_bytes * MARGIN)

    unblocked_bytes = least_bytes

    def work(self, shape, scale):
        return self._tiles(shape, scale).work

    def num_working(self, shape, scale, num_ranks):
        return min(num_ranks, self._tiles(shape, scale).num_tiles)

    def _tiles(self, shape, scale):
        shape = (1, *shape[1:])
        if (shape, scale) not in self._found:
            self._found[shape, scale] = tiles_of(self._meta_vae, shape, scale)
        return self._found[shape, scale]


def _does_not_fit(shape, scale, needed_bytes, free_bytes):
    what = (f"decoding a latent of {shape[-1]} x {shape[-2]} and {shape[-3]} frames" if scale == 1
            else f"encoding {shape[-1]} x {shape[-2]} pixels and {shape[-3]} frames")
    return (f"Use a smaller picture or fewer frames: {what} needs {needed_bytes / 2**30:.1f} GB on each device, and "
            f"{free_bytes / 2**30:.1f} GB are free.")
