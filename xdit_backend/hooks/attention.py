"""Where all methods meet: attention of one forward on one rank, by the method of its layout.
Called by transformer.py."""

from dataclasses import dataclass

from ..distributed.masks import gathered_mask
from ..parallel.displaced import displaced_attention
from ..parallel.pipefusion import patch_attention
from ..parallel.usp import Attention, usp_attention


@dataclass(frozen=True)
class AttentionLayer:
    """One attention of the model: which it is, and whose tokens attend to whose."""

    key: tuple                             # (block, name and number of the attention)
    streams: tuple[str, ...]               # of the queries
    read: tuple[str, ...]                  # of keys and values; mostly the same


def attend(query, key, value, now, layer, plain, scale):
    """Attention by the method of this forward, where all methods meet. plain: torch's attention."""
    streams, read = layer.streams, layer.read
    sizes, key_sizes = now.tokens.sizes(streams), None if read == streams else now.tokens.sizes(read)
    # what no later patch brings anew, the first attends to alone
    if now.key_values is not None and "image" in (*streams, *read):
        attention = Attention(sizes, key_sizes, None, scale, plain)
        return patch_attention(query, key, value, attention, now, layer.key, read)
    mask = gathered_mask(now.masks, now.tokens.pieces(read), query)
    attention = Attention(sizes, key_sizes, mask, scale, plain)
    if now.exchange is not None:
        return displaced_attention(query, key, value, attention, now, layer.key)
    return usp_attention(query, key, value, attention, now.mesh, now.traffic)
