"""Autoencoders that go over a picture or video by tiles of their own: ranks take turns at the tiles, and the fastest
gets all of them, which it blends. Every tile is computed as it would be by one device, so that nothing differs.

Used by vae_rows.py, and by vae_tile_memory.py for how often it asks who takes part.
"""

from contextlib import contextmanager
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist

from ..autoencoders.vae_family import replaced
from ..distributed.collectives import on_wire

MAX_SENT = 4                   # tiles on their way from a rank, which is that far ahead of the fastest at the most


def with_tiles(vae, tiles, one):
    """While active, a VAE's methods of one tile are `one(compute, shape_of, tile)`: its own method, and what gives the
    shape of its result. tiles: the family's."""
    return replaced(vae, **{name: partial(one, getattr(vae, name), partial(shape_of, vae))
                            for name, shape_of in tiles.items()})


@contextmanager
def shared_tiles(vae, tiles, split, speeds=(), before_round=None):
    """While active, each rank of a RowSplit computes its tiles alone. All of them run the same decode or encode.

    Yields whether this rank gets every tile. The others' results have no bytes: they are on the meta device, where
    blending is not computed. speeds: of the ranks, relative; (): alike. before_round(split): called by every rank at
    the same tiles, about once for one of the slowest rank's; it may raise on all of them to give up.
    """
    speeds, sent = speeds or (1,) * len(split.sizes), []
    turns, blender = turns_of(speeds), speeds.index(max(speeds))

    def one(compute, shape_of, tile):
        rank, begins_round = next(turns)
        if begins_round and before_round is not None:
            before_round(split)
        if rank == split.rank:
            made = compute(tile)
            if rank == blender:
                return made
            _send(made, blender, sent, split)
        elif split.rank == blender:
            return _receive(shape_of(tile.shape), rank, tile, split)
        return torch.empty(shape_of(tile.shape), dtype=tile.dtype, device="meta")

    with with_tiles(vae, tiles, one), replaced(vae, has_every_tile=lambda: split.rank == blender):
        yield split.rank == blender
    for work, _ in sent:
        work.wait()


def turns_of(speeds):
    """For each tile, without end: (the rank that would be done with it first, of two the faster; is it the first tile,
    or that after one of the slowest rank's?)."""
    given, begins_round = [0] * len(speeds), True
    slowest = min(range(len(speeds)), key=lambda rank: (speeds[rank], -rank))
    while True:
        rank = min(range(len(speeds)), key=lambda rank: ((given[rank] + 1) / speeds[rank], -speeds[rank]))
        yield rank, begins_round
        given[rank] += 1
        begins_round = rank == slowest


def num_rounds(num_tiles, speeds):
    """How often shared_tiles calls before_round."""
    return sum(begins_round for _, begins_round in islice(turns_of(speeds), num_tiles))


def _send(made, rank, sent, split):
    """To a rank, in the background. sent: [(work, tensor)] of what was sent before, the tensors of which gloo needs
    until they have arrived."""
    message = on_wire(made.contiguous(), split.group)
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
