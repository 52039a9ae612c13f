"""Token shards where streams enter and leave blocks: cut to this rank's shards, joined to full streams, and packed into
messages between stages.

`streams` is a tuple of names: the streams that one tensor holds, one after the other.

# B batch, T tokens, C channels
"""

import math

import torch

from ..distributed.collectives import all_gather


def cut(tensor, streams, tokens, needs_text):
    """This rank's shard of full streams. (B, all T, C) -> (B, own T, C)."""
    shard = tokens.take(tensor, 1, streams)
    return _placeholder(shard.contiguous() if tokens.num_shards > 1 else shard, streams, tokens, needs_text)


def join(shard, streams, tokens, mesh, traffic, wanted):
    """Join shards to full streams, as the model's forward expects them. Every sequence rank calls it.

    wanted: the streams whose content is needed. Others, and tokens that were left out, are zeros.
    (B, own T, C) -> (B, T of the forward, C).
    """
    full = dict(zip(streams, shard[:, :tokens.own(streams)].split([tokens.own((name,)) for name in streams], 1)))
    wanted = [name for name in streams if name in wanted]
    if mesh.sequence_degree > 1 and wanted:
        local = torch.cat([full[name] for name in wanted], 1) if len(wanted) > 1 else full[wanted[0]]
        gathered = all_gather(local, tokens.sizes(wanted), 1, mesh.sequence_group, traffic)
        order = tokens.gathered_order(wanted)
        shards = list(zip(order, gathered.split([size for _, _, size in order], 1)))
        full |= {name: torch.cat([each for (stream, _, _), each in shards if stream == name], 1) for name in wanted}
    present = [name for name in streams if tokens.held(name)] or streams[:1]
    if len(present) == 1 and tokens.counts[present[0]] == tokens.held(present[0]):
        return full[present[0]]
    return torch.cat([full[name] if name in wanted and tokens.counts[name] == tokens.held(name)
                      else shard.new_zeros(shard.shape[0], tokens.held(name), shard.shape[2]) for name in streams], 1)


def add_to_image(shard, streams, added, tokens):
    """Add to this rank's image tokens, in place. added: (B or 1, own image tokens, C), of any dtype."""
    before, size = sum(tokens.own((name,)) for name in streams[:streams.index("image")]), tokens.own(("image",))
    shard[:, before:before + size] += added


def pack(shards, units, tokens):
    """Pack shards into one flat tensor, the message for the next stage. units: the streams of each."""
    own = [shard[:, :tokens.own(streams)] for shard, streams in zip(shards, units)]
    if len(own) == 1:
        return own[0].reshape(-1)
    message = own[0].new_empty(sum(shard.numel() for shard in own))
    # copied directly: torch.cat would first flatten a copy of each shard that is not contiguous
    torch._foreach_copy_([target.view(shard.shape) for target, shard in
                          zip(message.split([shard.numel() for shard in own]), own)], own)
    return message


def unpack(message, units, batch, widths, tokens, needs_text):
    """Unpack the shards of the previous stage's message. widths: C of each unit."""
    sizes = [tokens.own(streams) for streams in units]
    shards = message.split([batch * size * width for size, width in zip(sizes, widths)])
    return [_placeholder(shard.view(batch, size, width), streams, tokens, needs_text)
            for shard, size, width, streams in zip(shards, sizes, widths, units)]


def message_size(units, batch, widths, tokens):
    """Number of elements of a message."""
    return batch * sum(width * tokens.own(streams) for streams, width in zip(units, widths))


def has_placeholder(streams, tokens, needs_text):
    """True if this rank has a placeholder token for these streams, since it has none of their tokens and blocks need
    one. Attention does not include it."""
    return needs_text and tokens.own(streams) == 0


def _placeholder(shard, streams, tokens, needs_text):
    if not has_placeholder(streams, tokens, needs_text):
        return shard
    # NaN, so that any use shows in the result, and an amax ignores it
    return shard.new_full((shard.shape[0], 1, shard.shape[2]), math.nan)
