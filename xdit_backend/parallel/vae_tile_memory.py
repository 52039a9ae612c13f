"""Memory and work of a decode or encode by tiles, determined on the meta device: one tile of each shape is computed, in
addition to the VAE's work around the tiles.
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
    """The planner of this VAE's decodes and encodes: a RowPlanner or a TilePlanner."""
    return TilePlanner(vae) if family_of(vae).tiles else RowPlanner(vae)


@dataclass(frozen=True)
class Tiles:
    """Tiles of one item of a batch. peak_bytes: on the blending rank, without the weights. work: see work_of."""

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
        meta_input = torch.empty(shape, dtype=meta_vae.dtype, device="meta")
        if scale == 1:
            decode_rows(meta_vae, meta_input)
        else:
            encode_rows(meta_vae, meta_input, scale)
    return Tiles(footprint.peak_bytes, num_tiles, work)


def _one_tile(compute, tile):
    """(peak bytes, {field of planner.vae_cost.Work: number}). Half of the tiles are sent, as between two ranks."""
    with ActivationBytes() as footprint, FlopCounterMode(display=False) as flops, MemoryTraffic() as moved:
        result = compute(tile)
    return int(HEADROOM * footprint.peak_bytes), {
        "flops": float(flops.get_total_flops()), "moved_bytes": float(moved.moved_bytes), "exchanges": 1.0,
        "halo_bytes": result.nbytes / 2}


class TilePlanner:
    """RowPlanner's counterpart for tiles: every rank needs the same memory, and nothing is computed in blocks."""

    def __init__(self, vae):
        self._meta_vae, self._device, self._found = meta_copy(vae), vae.device, {}

    def plan(self, shape, scale, ranks, free_bytes, speeds=(), traffic=None):
        """(None, number of rounds of tiles, speeds that determine the tiles of each rank), like RowPlanner.plan."""
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
    return (f"Use a smaller image or fewer frames: {what} needs {needed_bytes / 2**30:.1f} GB on each device, and "
            f"{free_bytes / 2**30:.1f} GB are free.")
