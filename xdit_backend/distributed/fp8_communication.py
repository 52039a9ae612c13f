"""The form in which attention's tensors travel between ranks: whole, or in 8 bits. Called by
parallel/sequence_parallel.py.

A small tensor is float8_e4m3fn and a float32 scale for each head and block of BLOCK tokens: one byte a number, and 4
for BLOCK times the head size. What a rank keeps for itself is not rounded.

# N heads, T tokens, H head size
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .collectives import all_gather, all_to_all

BLOCK = 64                                 # tokens of a head that share a scale
FP8 = torch.float8_e4m3fn
ALIGNED = 16                               # bytes that each part of a message begins at a multiple of


def pack(tensors, is_small):
    """Tensors (..., T, H) as one row of bytes: those that are small in 8 bits. is_small: of each."""
    parts = [part for tensor, small in zip(tensors, is_small) for part in (to_fp8(tensor) if small else (tensor,))]
    rows = []
    for part in parts:
        row = part.reshape(-1).view(torch.uint8)
        rows += [row] if len(row) % ALIGNED == 0 else [row, row.new_zeros(-len(row) % ALIGNED)]
    return torch.cat(rows)


def unpack(row, shapes, is_small, dtype):
    """The tensors of a row of bytes that `pack` made of tensors of these shapes and this dtype."""
    tensors, start = [], 0

    def take(shape, of):
        nonlocal start
        size = math.prod(shape) * of.itemsize
        part = row[start:start + size].view(of).view(shape)
        start += size + -size % ALIGNED
        return part

    for shape, small in zip(shapes, is_small):
        tensors.append(from_fp8(take(shape, FP8), take(_scales(shape), torch.float32), dtype)
                       if small else take(shape, dtype))
    return tensors


def num_bytes(shapes, is_small, dtype):
    """Bytes of a row of tensors of these shapes."""
    sizes = [size for shape, small in zip(shapes, is_small)
             for size in ((math.prod(shape), 4 * math.prod(_scales(shape))) if small
                          else (math.prod(shape) * dtype.itemsize,))]
    return sum(size + -size % ALIGNED for size in sizes)


def to_fp8(tensor):
    """(values, scales) of a tensor (..., T, H): float8 like it, and float32 (..., blocks)."""
    num_tokens = tensor.shape[-2]
    blocks = F.pad(tensor, (0, 0, 0, -num_tokens % BLOCK)).unflatten(-2, (-(-num_tokens // BLOCK), BLOCK))
    largest = torch.linalg.vector_norm(blocks, torch.inf, (-2, -1)).float()
    scales = (largest / torch.finfo(FP8).max).clamp_min(torch.finfo(torch.float32).tiny)
    values = (blocks / scales[..., None, None]).to(FP8)        # in float32, whose error float8 does not see
    return values.flatten(-3, -2).narrow(-2, 0, num_tokens), scales


def from_fp8(values, scales, dtype):
    """The tensor of these values (..., T, H) and scales (..., blocks)."""
    every = scales.repeat_interleave(BLOCK, -1)[..., :values.shape[-2], None]
    return values.to(dtype).mul_(every)                        # rounded once: a float8 is a number of each other type


def _scales(shape):
    return (*shape[:-2], -(-shape[-2] // BLOCK))


def all_to_all_small(pieces, shapes, is_small, group, traffic):
    """all_to_all of several tensors (..., T, H) for each rank, some small. pieces: [[tensor]] by rank; shapes: of what
    each rank sends here, [[shape]]. Returns [[tensor]] by rank."""
    dtype, rank = pieces[0][0].dtype, dist.get_rank(group)
    rows = [pack(tensors, is_small) if index != rank else tensors[0].new_empty(0, dtype=torch.uint8)
            for index, tensors in enumerate(pieces)]
    sizes = [(num_bytes(of, is_small, dtype) if index != rank else 0,) for index, of in enumerate(shapes)]
    arrived = all_to_all(rows, sizes, group, traffic)
    return [pieces[rank] if index == rank else unpack(row, of, is_small, dtype)
            for index, (row, of) in enumerate(zip(arrived, shapes))]


def all_gather_small(local, sizes, group, traffic):
    """Every rank's tensor (..., T, H) after one another along T, the others' in 8 bits. sizes: T of each rank."""
    shapes = [(*local.shape[:-2], size, local.shape[-1]) for size in sizes]
    counts = [num_bytes([shape], [True], local.dtype) for shape in shapes]
    rows = all_gather(pack([local], [True]), counts, 0, group, traffic).split(counts)
    rank = dist.get_rank(group)
    return torch.cat([local if index == rank else unpack(row, [shape], [True], local.dtype)[0]
                      for index, (row, shape) in enumerate(zip(rows, shapes))], -2)
