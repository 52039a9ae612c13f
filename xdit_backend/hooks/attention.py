"""Where all methods meet: attention of one forward on one rank, by the method of its layout.
Called by transformer.py."""

import functools

from ..distributed.masks import gathered_mask
from ..parallel.displaced import displaced_attention
from ..parallel.pipefusion import patch_attention
from ..parallel.usp import usp_attention


def attend(query, key, value, now, which, streams, read, plain, scale):
    """Attention by the method of this forward, where all methods meet.
    which: (block, name and number of the attention)."""
    local, sizes = functools.partial(plain, scale=scale), now.tokens.sizes(streams)
    # what no later patch brings anew, the first attends to alone
    if now.key_values is not None and "image" in (*streams, *read):
        return patch_attention(query, key, value, now, which, streams, read, local)
    read_sizes, mask = None if read == streams else now.tokens.sizes(read), gathered_mask(
        now.masks, now.tokens.pieces(read), query)
    if now.exchange is not None:
        return displaced_attention(query, key, value, sizes, now, which, local, mask, read_sizes)
    return usp_attention(query, key, value, sizes, now.mesh, plain, scale, now.traffic, mask, read_sizes)
