"""Masks over the keys of self-attention: read where a model hands them to its blocks, cut and gathered as the keys are.

Every rank's forward makes the whole mask, so nothing is sent. Called by the hooks and by the methods.

# B batch, T tokens
"""

import torch

from ..protocol.errors import UnsupportedError


def read_mask(mask, streams, tokens):
    """{stream: (B, T) bool} of the streams whose tokens may be masked.

    The values are not looked at, since that would wait for the device; ComfyUI gives no mask where nothing is masked.
    mask: (B, T) or (B, 1, 1, T) over all tokens that the forward holds; True or 1 where a token may be attended to.
    """
    if mask.is_floating_point() or mask.shape[1:-1].numel() != 1:
        raise UnsupportedError("Use cfg_degree instead: this model masks its self-attention by a tensor of shape "
                               f"{tuple(mask.shape)} and dtype {mask.dtype}, which sequence parallelism and "
                               "PipeFusion cannot split.")
    parts = mask.flatten(1).bool().split([tokens.held(stream) for stream in streams], 1)
    return {stream: part for stream, part in zip(streams, parts) if part.shape[1]}


def gathered_mask(masks, pieces, like):
    """The mask of keys gathered from all ranks, (B, 1, 1, T); None where nothing is masked.

    masks: of read_mask. pieces: of Tokens.pieces. like: a tensor of the batch and device.
    """
    if not any(stream in masks for stream, _, _ in pieces):
        return None
    return torch.cat([masks[stream][:, start:start + size] if stream in masks
                      else torch.ones(like.shape[0], size, dtype=torch.bool, device=like.device)
                      for stream, start, size in pieces], 1)[:, None, None]


def as_bias(mask, dtype):
    """A mask to add to logits: finite, so that a row whose keys are all masked is no NaN."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min / 2)
