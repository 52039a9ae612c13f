"""Normalized Attention Guidance (Chen et al. 2025, arXiv 2505.21179): what self-attention gives for a positive and a
negative prompt, of which the first is pushed away from the second in every block. Both are in one batch. Called by the
hooks.

# B batch, N heads, T tokens, H head size, C channels
"""

import torch

from ..distributed.collectives import all_reduce

MIN_NORM = 1e-6                            # as ComfyUI's node has it


def apply_nag(out, nag, dims, tokens=slice(None), also_negative=False, mesh=None, traffic=None):
    """Attention's output with the positive part guided, in `out` itself. Every rank of the tensor axis calls it.

    out: (B, T, C), or (B, N, T, H). nag: a specs.Nag. dims: of out, those that hold a token's numbers. tokens: which
    are guided, along the second to last dim. also_negative: the negative part gets the result too. mesh: where ranks
    have some of the heads only.
    """
    size = len(out) // nag.num_parts
    positive, negative = (out[part * size:][:size, ..., tokens, :] for part in (nag.positive, nag.negative))
    guided = positive * nag.scale - negative * (nag.scale - 1)
    norms = [part.abs().sum(dims, keepdim=True, dtype=torch.promote_types(out.dtype, torch.float32))
             for part in (positive, guided)]
    if mesh is not None and mesh.degrees["tensor"] > 1:
        norms = all_reduce(norms, mesh.tensor_group, traffic)
    of_positive, of_guided = (norm.to(out.dtype).clamp_min(MIN_NORM) for norm in norms)
    ratio = of_guided / of_positive
    final = guided * (ratio.clamp_max(nag.tau) / ratio) * nag.alpha + positive * (1 - nag.alpha)
    if also_negative:
        negative.copy_(final)
    positive.copy_(final)
