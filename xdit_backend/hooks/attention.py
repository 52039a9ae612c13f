"""Where all parallel methods meet: attention of one forward on one rank, by the method of its layout. Called by
transformer.py."""

from collections.abc import Callable
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
    key_streams: tuple[str, ...]           # of keys and values; mostly the same
    sdpa: Callable                         # torch's scaled_dot_product_attention


def attend(query, key, value, context, layer, scale):
    """Attention by the method of this forward, where all methods meet. layer: an AttentionLayer."""
    streams, key_streams = layer.streams, layer.key_streams
    sizes = context.tokens.sizes(streams)
    key_sizes = None if key_streams == streams else context.tokens.sizes(key_streams)
    # what no later patch brings anew, the first attends to alone
    if context.key_values is not None and "image" in (*streams, *key_streams):
        attention = Attention(sizes, key_sizes, None, scale, layer.sdpa)
        return patch_attention(query, key, value, attention, context, layer)
    mask = gathered_mask(context.masks, context.tokens.pieces(key_streams), query)
    attention = Attention(sizes, key_sizes, mask, scale, layer.sdpa)
    if context.exchange is not None:
        return displaced_attention(query, key, value, attention, context, layer.key)
    return usp_attention(query, key, value, attention, context.mesh, context.traffic)
