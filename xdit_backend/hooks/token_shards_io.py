"""Streams where they enter and leave blocks: cut to this rank's shards, joined to whole tensors, sent from stage to
stage.

A region is a run of block lists between which the model's forward neither joins nor separates streams. Called by the
hooks. `streams` is a tuple of names: what one tensor holds, one after the other.

# B batch, T tokens, C channels
"""

import math

import torch

from ..distributed.collectives import all_gather


def cut(tensor, streams, tokens, needs_text):
    """This rank's shard of whole streams. (B, T of all, C) -> (B, T here, C)."""
    shard = tokens.take(tensor, 1, streams)
    return _placeholder(shard.contiguous() if tokens.num_shards > 1 else shard, streams, tokens, needs_text)


def join(shard, streams, tokens, mesh, traffic, wanted):
    """Whole streams again, as the model's forward expects them. Every sequence rank calls it.

    wanted: the streams whose content is needed. What is not, and tokens that were left out, is zeros.
    (B, T here, C) -> (B, T that the forward holds, C).
    """
    whole = dict(zip(streams, shard[:, :tokens.own(streams)].split([tokens.own((name,)) for name in streams], 1)))
    wanted = [name for name in streams if name in wanted]
    if mesh.sequence_degree > 1 and wanted:
        local = torch.cat([whole[name] for name in wanted], 1) if len(wanted) > 1 else whole[wanted[0]]
        gathered = all_gather(local, tokens.sizes(wanted), 1, mesh.sequence_group, traffic)
        pieces = tokens.gathered_order(wanted)
        parts = list(zip(pieces, gathered.split([size for _, _, size in pieces], 1)))
        whole |= {name: torch.cat([part for (stream, _, _), part in parts if stream == name], 1) for name in wanted}
    there = [name for name in streams if tokens.held(name)] or streams[:1]
    if len(there) == 1 and tokens.counts[there[0]] == tokens.held(there[0]):
        return whole[there[0]]
    return torch.cat([whole[name] if name in wanted and tokens.counts[name] == tokens.held(name)
                      else shard.new_zeros(shard.shape[0], tokens.held(name), shard.shape[2]) for name in streams], 1)


def add_to_image(shard, streams, added, tokens):
    """Add to this rank's image tokens, in place. added: (B or 1, T of them, C), any type."""
    before, size = sum(tokens.own((name,)) for name in streams[:streams.index("image")]), tokens.own(("image",))
    shard[:, before:before + size] += added


def pack(shards, units, tokens):
    """Shards as one flat tensor, the message for the next stage. units: which streams each of them holds."""
    pieces = [shard[:, :tokens.own(streams)] for shard, streams in zip(shards, units)]
    if len(pieces) == 1:
        return pieces[0].reshape(-1)
    message = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    # right into place: where tokens are not in one piece each, a concatenation would flatten copies of them first
    torch._foreach_copy_([part.view(piece.shape) for part, piece in
                          zip(message.split([piece.numel() for piece in pieces]), pieces)], pieces)
    return message


def unpack(message, units, batch, widths, tokens, needs_text):
    """The shards of a message from the stage before. widths: C of each unit."""
    sizes = [tokens.own(streams) for streams in units]
    pieces = message.split([batch * size * width for size, width in zip(sizes, widths)])
    return [_placeholder(piece.view(batch, size, width), streams, tokens, needs_text)
            for piece, size, width, streams in zip(pieces, sizes, widths, units)]


def message_size(units, batch, widths, tokens):
    """Elements of a message."""
    return batch * sum(width * tokens.own(streams) for streams, width in zip(units, widths))


def has_placeholder(streams, tokens, needs_text):
    """Does this rank hold a placeholder, since it has no token of these streams and blocks need one? No attention sees
    it."""
    return needs_text and tokens.own(streams) == 0


def _placeholder(shard, streams, tokens, needs_text):
    if not has_placeholder(streams, tokens, needs_text):
        return shard
    # so that it shows where one is used, and that it counts nowhere among numbers of which the largest is asked for
    return shard.new_full((shard.shape[0], 1, shard.shape[2]), math.nan)
