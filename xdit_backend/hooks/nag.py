"""Normalized Attention Guidance (Chen et al. 2025, arXiv 2505.21179): the output of attention for the positive prompt
is pushed away from that for the negative prompt; in self-attention both are in one batch, in attention to the text the
output for a second text is computed too.

# B batch, N heads, T tokens, H head size, C channels
"""

import torch

from ..distributed.collectives import all_reduce

MIN_NORM = 1e-6                            # of ComfyUI's node


def apply_nag(out, nag, dims, tokens=slice(None), also_negative=False, mesh=None, traffic=None):
    """Guide the positive rows of attention's output in place. Every rank of the tensor axis calls it.

    out: (B, T, C), or (B, N, T, H). nag: a specs.Nag. dims: of out, over which a token's norm is taken. tokens: slice
    of guided tokens along the second to last dim. also_negative: write the result to the negative rows too. mesh: for
    tensor parallelism, where a rank has some of the heads.
    """
    size = len(out) // nag.num_parts
    positive, negative = (out[index * size:][:size, ..., tokens, :] for index in (nag.positive, nag.negative))
    final = guided(positive, negative, (nag.scale, nag.alpha, nag.tau), dims, mesh, traffic)
    if also_negative:
        negative.copy_(final)
    positive.copy_(final)


def guided(positive, negative, strengths, dims, mesh=None, traffic=None):
    """Attention's output for the positive prompt, pushed away from that for the negative one. Every rank of the tensor
    axis calls it. strengths: scale, alpha and tau. Others: see apply_nag."""
    scale, alpha, tau = strengths
    far = positive * scale - negative * (scale - 1)
    norms = [rows.abs().sum(dims, keepdim=True, dtype=torch.promote_types(positive.dtype, torch.float32))
             for rows in (positive, far)]
    if mesh is not None and mesh.degrees["tensor"] > 1:
        norms = all_reduce(norms, mesh.tensor_group, traffic)
    of_positive, of_far = (norm.to(positive.dtype).clamp_min(MIN_NORM) for norm in norms)
    ratio = of_far / of_positive
    return far * (ratio.clamp_max(tau) / ratio) * alpha + positive * (1 - alpha)
