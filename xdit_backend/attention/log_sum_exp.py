"""Attention that returns its log-sum-exp, so that results over disjoint keys can be merged exactly.

# B batch, N heads, T tokens, H head size
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..protocol.errors import UnsupportedError
from .masks import as_bias

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
# compute capabilities on which torch SDPA prefers cuDNN: Hopper and data-centre Blackwell
CUDNN_MAJORS = (9, 10)


@dataclass(frozen=True)
class Kernel:
    """One of torch's attention operators, with the dtype and head size that it requires."""

    name: str                      # a key of OPERATORS
    dtype: torch.dtype
    head_multiple: int = 1         # the head size is padded to a multiple of this


def choose_backend(dtype, head_size, num_keys, capability=None, has_cudnn=False, masked=False):
    """Choose the fastest operator that returns a log-sum-exp for these tensors.

    capability: of the CUDA device; None: CPU. masked: the memory-efficient kernel is the only one with masks.
    Limits of torch 2.11: flash attention from compute capability 8.0 and head size at most 256; cuDNN with head size
    at most 128 and more than one key; the memory-efficient kernel without bfloat16 below 8.0. All need rows of a
    multiple of 16 bytes. Raises UnsupportedError if no operator fits.
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
    """Softmax attention; returns (out, lse).

    mask: (B, 1, 1, T) bool, True for keys to attend to. out: like q. lse: (B, N, T, 1), float32, or float64 on CPUs
    for float64 inputs. If all keys are masked, out is a mean of the values and lse so low that a merge ignores it.
    """
    capability = torch.cuda.get_device_capability(q_BNTH.device) if q_BNTH.is_cuda else None
    has_cudnn = capability is not None and torch.version.hip is None and torch.backends.cudnn.is_available()
    kernel = choose_backend(q_BNTH.dtype, q_BNTH.shape[-1], k_BNTH.shape[2], capability, has_cudnn, mask is not None)
    return run_backend(kernel, q_BNTH, k_BNTH, v_BNTH, scale, mask)


def run_backend(kernel, q_BNTH, k_BNTH, v_BNTH, scale=None, mask=None):
    """Compute attention_with_lse with this operator. Heads are zero-padded to its head_multiple, which is exact."""
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
    """Expand a bias to all heads and queries, with rows padded in memory to a multiple of 16 elements as the kernels
    require."""
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
