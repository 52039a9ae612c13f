"""Attention that also returns its log-sum-exp, so that results over different keys can be merged exactly.

# B batch, N heads, T tokens, H head size
"""

import torch
import torch.nn.functional as F

from .masks import as_bias

aten = torch.ops.aten


def attention_with_lse(q_BNTH, k_BNTH, v_BNTH, scale=None, mask=None):
    """Softmax attention; returns (out, lse). mask: (B, 1, 1, T) bool, which keys may be attended to.

    out: like q. lse: (B, N, T, 1), float32, or float64 where the backend gives it. CPU: the flash operator, which knows
    float64 as well. CUDA: flash attention for half precision without a mask, else the memory-efficient kernel. Where all keys
    are masked, out is a mean of values and lse so low that a merge leaves it out.
    """
    bias = None if mask is None else as_bias(mask, q_BNTH.dtype)
    if q_BNTH.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q_BNTH, k_BNTH, v_BNTH, attn_mask=bias, scale=scale)
    elif bias is None and q_BNTH.dtype in (torch.float16, torch.bfloat16) and q_BNTH.shape[-1] % 8 == 0 and q_BNTH.shape[-1] <= 256:
        out, lse = aten._scaled_dot_product_flash_attention(q_BNTH, k_BNTH, v_BNTH, scale=scale)[:2]
    else:
        out, lse = aten._scaled_dot_product_efficient_attention(
            q_BNTH, k_BNTH, v_BNTH, _aligned(bias, q_BNTH), compute_log_sumexp=True, scale=scale)[:2]
    return out, lse[..., :q_BNTH.shape[2]].unsqueeze(-1)      # the efficient kernel pads lse to a multiple of 32


def _aligned(bias, q_BNTH):
    """The bias for all heads and queries, in a row of memory whose length the kernel takes: a multiple of 16."""
    if bias is None:
        return None
    row = F.pad(bias, (0, -bias.shape[-1] % 16))[..., :bias.shape[-1]]
    return row.expand(-1, q_BNTH.shape[1], q_BNTH.shape[2], -1)


def merge_attention(out, lse, block_out, block_lse):
    """Combine attention over two disjoint sets of keys, as if computed over their union.

    Ring Attention (Liu et al. 2023, arXiv 2310.01889), section 3; in log-sum-exp form, so that nothing overflows.
    out, block_out: (B, N, T, H). lse, block_lse: (B, N, T, 1). Accumulate in float32 or better.
    """
    out = out - torch.sigmoid(block_lse - lse) * (out - block_out)
    return out, lse - F.logsigmoid(lse - block_lse)
