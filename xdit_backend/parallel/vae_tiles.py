"""VAEs that decode or encode by tiles themselves: the tiles are distributed among the ranks and blended on the fastest
one. Every tile is computed as on a single device, so that the result is identical.
"""

from contextlib import contextmanager
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist

from ..autoencoders.vae_family import replaced
from ..distributed.collectives import on_wire

MAX_SENT = 4                   # unfinished sends of a rank: tiles by which it may be ahead of the blending rank


def with_tiles(vae, tiles, one):
    """Context in which a VAE's methods for one tile are replaced by one(compute, shape_of, tile): the method itself, a
    function that gives the shape of its result, and its argument. tiles: the family's."""
    return replaced(vae, **{name: partial(one, getattr(vae, name), partial(shape_of, vae))
                            for name, shape_of in tiles.items()})


@contextmanager
def shared_tiles(vae, tiles, split, speeds=(), before_round=None):
    """Context in which each rank of a RowSplit computes its own tiles. All of them run the same decode or encode.

    Yields whether this rank gets every tile. On the others, results are on the meta device, so that blending computes
    nothing. speeds: relative speeds of the ranks; (): identical. before_round(split): called by every rank before the
    same tiles, about once per tile of the slowest rank; it may raise on all ranks to abort.
    """
    speeds, sent = speeds or (1,) * len(split.sizes), []
    order, blender = tile_order(speeds), speeds.index(max(speeds))

    def one(compute, shape_of, tile):
        rank, begins_round = next(order)
        if begins_round and before_round is not None:
            before_round(split)
        if rank == split.rank:
            result = compute(tile)
            if rank == blender:
                return result
            _send(result, blender, sent, split)
        elif split.rank == blender:
            return _receive(shape_of(tile.shape), rank, tile, split)
        return torch.empty(shape_of(tile.shape), dtype=tile.dtype, device="meta")

    with with_tiles(vae, tiles, one), replaced(vae, has_every_tile=lambda: split.rank == blender):
        yield split.rank == blender
    for work, _ in sent:
        work.wait()


def tile_order(speeds):
    """Yield for each tile, endlessly: (the rank that would finish it first, on ties the fastest; whether a round
    begins, that is at the first tile and after each of the slowest rank's)."""
    num_assigned, begins_round = [0] * len(speeds), True
    slowest = min(range(len(speeds)), key=lambda rank: (speeds[rank], -rank))
    while True:
        rank = min(range(len(speeds)), key=lambda rank: ((num_assigned[rank] + 1) / speeds[rank], -speeds[rank]))
        yield rank, begins_round
        num_assigned[rank] += 1
        begins_round = rank == slowest


def num_rounds(num_tiles, speeds):
    """Number of times that shared_tiles calls before_round."""
    return sum(begins_round for _, begins_round in islice(tile_order(speeds), num_tiles))


def _send(result, rank, sent, split):
    """Begin to send to a rank. sent: [(work, tensor)] of earlier sends, whose tensors gloo requires to live until they
    have arrived."""
    message = on_wire(result.contiguous(), split.group)
    split.traffic.count(message.numel(), message)
    while len(sent) >= MAX_SENT:
        with split.traffic.waiting(message):
            sent.pop(0)[0].wait()
    receiver = dist.get_global_rank(split.group, rank)
    with split.traffic.entering((dist.get_rank(), receiver)):
        sent.append((dist.isend(message, receiver, group=split.group), message))


def _receive(shape, rank, tile, split):
    message = on_wire(tile.new_empty(shape), split.group)
    split.traffic.count(0, message)
    sender = dist.get_global_rank(split.group, rank)
    with split.traffic.entering((sender, dist.get_rank())), split.traffic.waiting(message):
        dist.recv(message, sender, group=split.group)
    return message.to(tile.device)
