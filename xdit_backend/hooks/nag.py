"""Normalized Attention Guidance (Chen et al. 2025, arXiv 2505.21179): in every self-attention the output for the
positive prompt is pushed away from that for the negative prompt. Both are in one batch.

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
    guided = positive * nag.scale - negative * (nag.scale - 1)
    norms = [rows.abs().sum(dims, keepdim=True, dtype=torch.promote_types(out.dtype, torch.float32))
             for rows in (positive, guided)]
    if mesh is not None and mesh.degrees["tensor"] > 1:
        norms = all_reduce(norms, mesh.tensor_group, traffic)
    of_positive, of_guided = (norm.to(out.dtype).clamp_min(MIN_NORM) for norm in norms)
    ratio = of_guided / of_positive
    final = guided * (ratio.clamp_max(nag.tau) / ratio) * nag.alpha + positive * (1 - nag.alpha)
    if also_negative:
        negative.copy_(final)
    positive.copy_(final)
