"""fp8 communication of attention's tensors.

A tensor is sent as float8_e4m3fn with one float32 scale per head and block of BLOCK tokens: 1 byte an element plus 4
bytes per BLOCK * head size elements. A rank's own data is not rounded.

# N heads, T tokens, H head size
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .collectives import all_gather, all_to_all

BLOCK = 64                                 # tokens of a head that share a scale
FP8 = torch.float8_e4m3fn
ALIGNED = 16                               # bytes; alignment of each tensor in a message


def pack(tensors, is_fp8):
    """Pack tensors (..., T, H) into one row of bytes. is_fp8: whether each is sent in fp8."""
    stored = [each for tensor, small in zip(tensors, is_fp8) for each in (to_fp8(tensor) if small else (tensor,))]
    rows = []
    for each in stored:
        row = each.reshape(-1).view(torch.uint8)
        rows += [row] if len(row) % ALIGNED == 0 else [row, row.new_zeros(-len(row) % ALIGNED)]
    return torch.cat(rows)


def unpack(row, shapes, is_fp8, dtype):
    """Unpack the tensors of a row of bytes made by `pack`. shapes, is_fp8: of each tensor."""
    tensors, start = [], 0

    def take(shape, stored_dtype):
        nonlocal start
        size = math.prod(shape) * stored_dtype.itemsize
        part = row[start:start + size].view(stored_dtype).view(shape)
        start += size + -size % ALIGNED
        return part

    for shape, small in zip(shapes, is_fp8):
        tensors.append(from_fp8(take(shape, FP8), take(_scales(shape), torch.float32), dtype)
                       if small else take(shape, dtype))
    return tensors


def num_bytes(shapes, is_fp8, dtype):
    """Size in bytes of a packed row of tensors with these shapes."""
    sizes = [size for shape, small in zip(shapes, is_fp8)
             for size in ((math.prod(shape), 4 * math.prod(_scales(shape))) if small
                          else (math.prod(shape) * dtype.itemsize,))]
    return sum(size + -size % ALIGNED for size in sizes)


def to_fp8(tensor):
    """Quantise a tensor (..., T, H) to (values, scales): float8 (..., T, H), and float32 (..., blocks)."""
    num_tokens = tensor.shape[-2]
    blocks = F.pad(tensor, (0, 0, 0, -num_tokens % BLOCK)).unflatten(-2, (-(-num_tokens // BLOCK), BLOCK))
    largest = torch.linalg.vector_norm(blocks, torch.inf, (-2, -1)).float()
    scales = (largest / torch.finfo(FP8).max).clamp_min(torch.finfo(torch.float32).tiny)
    values = (blocks / scales[..., None, None]).to(FP8)        # divided in float32, whose error is below float8's
    return values.flatten(-3, -2).narrow(-2, 0, num_tokens), scales


def from_fp8(values, scales, dtype):
    """Dequantise values (..., T, H) with scales (..., blocks)."""
    every = scales.repeat_interleave(BLOCK, -1)[..., :values.shape[-2], None]
    return values.to(dtype).mul_(every)                        # rounded once: every dtype represents float8 exactly


def _scales(shape):
    return (*shape[:-2], -(-shape[-2] // BLOCK))


def all_to_all_fp8(chunks, shapes, is_fp8, group, traffic):
    """all_to_all of several tensors (..., T, H) per rank, some of them in fp8. Every rank of the group calls it.

    chunks: [[tensor]] by receiving rank. shapes: [[shape]] of what each rank sends here. is_fp8: whether each tensor
    is sent in fp8. Returns [[tensor]] by sending rank.
    """
    dtype, rank = chunks[0][0].dtype, dist.get_rank(group)
    rows = [pack(tensors, is_fp8) if index != rank else tensors[0].new_empty(0, dtype=torch.uint8)
            for index, tensors in enumerate(chunks)]
    sizes = [(num_bytes(of, is_fp8, dtype) if index != rank else 0,) for index, of in enumerate(shapes)]
    arrived = all_to_all(rows, sizes, group, traffic)
    return [chunks[rank] if index == rank else unpack(row, of, is_fp8, dtype)
            for index, (row, of) in enumerate(zip(arrived, shapes))]


def all_gather_fp8(local, sizes, group, traffic):
    """Concatenate every rank's tensor (..., T, H) along T, others' being sent in fp8. sizes: T of each rank. Every rank
    of the group calls it."""
    shapes = [(*local.shape[:-2], size, local.shape[-1]) for size in sizes]
    counts = [num_bytes([shape], [True], local.dtype) for shape in shapes]
    rows = all_gather(pack([local], [True]), counts, 0, group, traffic).split(counts)
    rank = dist.get_rank(group)
    return torch.cat([local if index == rank else unpack(row, [shape], [True], local.dtype)[0]
                      for index, (row, shape) in enumerate(zip(rows, shapes))], -2)
