"""Merge of attention over disjoint sets of keys by their log-sum-exp, which is exact.

# B batch, N heads, T tokens, H head size
"""

import torch


def merge_attention(out, lse, block_out, block_lse):
    """Combine attention over two disjoint sets of keys, as if computed over their union.

    Ring Attention (Liu et al. 2023, arXiv 2310.01889), section 3; in log-sum-exp form, so that nothing overflows.
    out, block_out: (B, N, T, H). lse, block_lse: (B, N, T, 1). Accumulate in float32 or better: block_out may have
    fewer bits.
    """
    out = torch.lerp(out, block_out.to(out.dtype), torch.sigmoid(block_lse - lse))
    return out, torch.logaddexp(lse, block_lse)
