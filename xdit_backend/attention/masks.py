"""Key masks of self-attention: read from a model's forward, split into streams and gathered like the keys.

Every rank's forward computes the full mask, so none is communicated.

# B batch, T tokens
"""

import torch

from ..protocol.errors import UnsupportedError


def read_mask(mask, streams, tokens):
    """Split a mask into {stream: (B, T) bool}, for the streams that have tokens.

    The values are not inspected, since that would synchronise with the device; ComfyUI passes no mask if nothing is
    masked.
    mask: (B, T) or (B, 1, 1, T) over all tokens of the forward; True or 1 for tokens to attend to. Raises
    UnsupportedError for other masks.
    """
    if mask.is_floating_point() or mask.shape[1:-1].numel() != 1:
        raise UnsupportedError("Use cfg_degree instead: this model masks its self-attention by a tensor of shape "
                               f"{tuple(mask.shape)} and dtype {mask.dtype}, which sequence parallelism and "
                               "PipeFusion cannot split.")
    split = mask.flatten(1).bool().split([tokens.held(stream) for stream in streams], 1)
    return {stream: stream_mask for stream, stream_mask in zip(streams, split) if stream_mask.shape[1]}


def gathered_mask(masks, shards, like):
    """Mask of the keys gathered from all ranks, (B, 1, 1, T) bool; None if no stream is masked.

    masks: from read_mask. shards: (stream, start, size) in the order of the keys, from Tokens.gathered_order.
    like: a tensor with the batch size and device.
    """
    if not any(stream in masks for stream, _, _ in shards):
        return None
    return torch.cat([masks[stream][:, start:start + size] if stream in masks
                      else torch.ones(like.shape[0], size, dtype=torch.bool, device=like.device)
                      for stream, start, size in shards], 1)[:, None, None]


def as_bias(mask, dtype):
    """Convert a bool mask to an additive bias. Finite, so that a row whose keys are all masked is not NaN."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min / 2)
