"""Enhance-A-Video (Luo et al. 2025, arXiv 2502.07508): the output of a self-attention is multiplied by a factor, which
grows with the attention weights between tokens of different frames.

# B batch, N heads, T tokens, H head size, F frames, S tokens of a frame
"""

import torch
import torch.nn.functional as F

from ..distributed.collectives import all_gather, all_reduce


def enhance_factor(query_BNTH, key_BNTH, enhance, sizes, mesh, traffic):
    """The factor (a tensor without dims): frames plus weight, times the mean attention weight between tokens at the
    same position in two different frames, and at least 1. Every rank of the sequence and tensor axes calls it.

    Each token attends to those at its position in all frames. The mean is over images, heads and positions. query, key:
    of this rank's tokens. enhance: a specs.Enhance. sizes: tokens of every sequence rank; all of them are the image's,
    in order.
    """
    frames, start = enhance.frames, sum(sizes[:mesh.sequence_rank])
    if mesh.sequence_degree > 1:
        key_BNTH = all_gather(key_BNTH, sizes, 2, mesh.sequence_group, traffic)
    weights = _between_frames(query_BNTH, key_BNTH, start, frames)
    total = torch.stack([weights, weights.new_tensor(query_BNTH.shape[0] * query_BNTH.shape[1] * query_BNTH.shape[2])])
    for degree, group in ((mesh.sequence_degree, mesh.sequence_group), (mesh.degrees["tensor"], mesh.tensor_group)):
        if degree > 1:
            total = all_reduce([total], group, traffic)[0]
    mean = total[0] / (total[1] * (frames - 1))
    return (mean * (frames + enhance.weight)).clamp_min(1)


def _between_frames(query_BNTH, key_BNTH, start, num_frames):
    """Sum of the attention weights between frames for queries of consecutive tokens, the first of index `start`."""
    num_tokens, size = query_BNTH.shape[2], key_BNTH.shape[2] // num_frames
    first = start // size
    before, frames = start - first * size, -(-(start + num_tokens) // size) - first
    padded = F.pad(query_BNTH * query_BNTH.shape[3] ** -0.5, (0, 0, before, frames * size - before - num_tokens))
    query_BNSFH, key_BNSFH = (each.unflatten(2, (count, size)).transpose(2, 3)
                              for each, count in ((padded, frames), (key_BNTH, num_frames)))
    weights = (query_BNSFH @ key_BNSFH.transpose(3, 4)).softmax(-1, dtype=torch.float32)
    own = torch.arange(num_frames, device=query_BNTH.device) == first + torch.arange(
        frames, device=query_BNTH.device)[:, None]
    between_BNT = weights.masked_fill(own, 0).sum(-1).transpose(2, 3).flatten(2)
    return between_BNT[:, :, before:before + num_tokens].sum()
