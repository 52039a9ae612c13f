"""Attention that also returns its log-sum-exp, so that results over different keys can be merged exactly.

# B batch, N heads, T tokens, H head size
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..protocol.errors import UnsupportedError
from .masks import as_bias

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
# compute capabilities on which torch's own attention prefers cuDNN: Hopper and Blackwell for servers
CUDNN_MAJORS = (9, 10)


@dataclass(frozen=True)
class Kernel:
    """One of torch's attention operators, and what it has to be given."""

    name: str                      # a key of OPERATORS
    dtype: torch.dtype
    head_multiple: int = 1         # it takes head sizes that are a multiple of this


def choose_backend(dtype, head_size, num_keys, capability=None, has_cudnn=False, masked=False):
    """The fastest operator that returns a log-sum-exp for these tensors. capability: of the CUDA device; None: it is a
    CPU.

    Masks are for the memory-efficient kernel. The limits are those that torch 2.11 states: flash attention from compute
    capability 8 on and for heads up to 256, cuDNN for heads up to 128 and more than one key, the memory-efficient
    kernel without bfloat16 before
    8. All want 16-byte rows.
    Raises UnsupportedError where there is none.
    """
    if capability is None:
        return Kernel("cpu", dtype)
    if dtype in HALF and capability >= (8, 0) and not masked:
        padded = -(-head_size // 8) * 8
        if has_cudnn and capability[0] in CUDNN_MAJORS and padded <= 128 and num_keys > 1:
            return Kernel("cudnn", dtype, 8)
        return Kernel("flash" if padded <= 256 else "efficient", dtype, 8)
    if dtype == torch.float16 or (dtype == torch.bfloat16 and capability >= (8, 0)):
        return Kernel("efficient", dtype, 8)
    if dtype in (torch.float32, torch.bfloat16):
        return Kernel("efficient", torch.float32, 4)
    raise UnsupportedError("Use ulysses_degree instead of ring_degree, or another weight_dtype: Ring attention on "
                           f"CUDA takes float16, bfloat16 and float32, and this model computes in {dtype}.")


# (q, k, v, bias or None, scale) -> output, log-sum-exp
OPERATORS = {
    "cpu": lambda q, k, v, bias, scale:
    aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale),
    "cudnn": lambda q, k, v, bias, scale:
    aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, scale=scale)[:2],
    "flash": lambda q, k, v, bias, scale: aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[:2],
    "efficient": lambda q, k, v, bias, scale: aten._scaled_dot_product_efficient_attention(
        q, k, v, aligned(bias, q), True, scale=scale)[:2],
}


def attention_with_lse(q_BNTH, k_BNTH, v_BNTH, scale=None, mask=None):
    """Softmax attention; returns (out, lse). mask: (B, 1, 1, T) bool, which keys may be attended to.

    out: like q. lse: (B, N, T, 1), float32, or float64 where the operator gives it, which is on CPUs. Where all keys
    are masked, out is a mean of values and lse so low that a merge leaves it out.
    """
    capability = torch.cuda.get_device_capability(q_BNTH.device) if q_BNTH.is_cuda else None
    has_cudnn = capability is not None and torch.version.hip is None and torch.backends.cudnn.is_available()
    kernel = choose_backend(q_BNTH.dtype, q_BNTH.shape[-1], k_BNTH.shape[2], capability, has_cudnn, mask is not None)
    return run_backend(kernel, q_BNTH, k_BNTH, v_BNTH, scale, mask)


def run_backend(kernel, q_BNTH, k_BNTH, v_BNTH, scale=None, mask=None):
    """attention_with_lse by this kernel. Heads are padded to what it takes, with zeros, which change no product."""
    head_size, num_queries, dtype = q_BNTH.shape[-1], q_BNTH.shape[2], q_BNTH.dtype
    scale = head_size ** -0.5 if scale is None else scale
    missing = -head_size % kernel.head_multiple
    if missing or dtype != kernel.dtype:
        q_BNTH, k_BNTH, v_BNTH = (F.pad(tensor.to(kernel.dtype), (0, missing)) for tensor in (q_BNTH, k_BNTH, v_BNTH))
    bias = None if mask is None else as_bias(mask, kernel.dtype)
    out, lse = OPERATORS[kernel.name](q_BNTH, k_BNTH, v_BNTH, bias, scale)
    # The efficient kernel pads lse to a multiple of 32, cuDNN's has a last dim of 1.
    return out[..., :head_size].to(dtype), lse.flatten(2)[..., :num_queries, None]


def aligned(bias, q_BNTH):
    """The bias for all heads and queries, in a row of memory whose length the kernel takes: a multiple of 16."""
    if bias is None:
        return None
    row = F.pad(bias, (0, -bias.shape[-1] % 16))[..., :bias.shape[-1]]
    return row.expand(-1, q_BNTH.shape[1], q_BNTH.shape[2], -1)


def merge_attention(out, lse, block_out, block_lse):
    """Combine attention over two disjoint sets of keys, as if computed over their union.

    Ring Attention (Liu et al. 2023, arXiv 2310.01889), section 3; in log-sum-exp form, so that nothing overflows.
    out, block_out: (B, N, T, H). lse, block_lse: (B, N, T, 1). Accumulate in float32 or better: block_out may have
    fewer bits.
    """
    out = torch.lerp(out, block_out.to(out.dtype), torch.sigmoid(block_lse - lse))
    return out, lse - F.logsigmoid(lse - block_lse)
