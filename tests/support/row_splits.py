"""Ways to split rows over ranks, and mutants of the code that works on rows, for the tests of both."""

import torch
import torch.distributed as dist

from xdit_backend.distributed import group_norm, spatial_ops
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.partition import shard_sizes

WORLD_SIZES = (1, 2, 3, 4)


def split_of(sizes, dim=-2):
    return spatial_ops.RowSplit.of_sizes(sizes, dist.group.WORLD, Traffic(), dim)


def sizes_of(world_size):
    """Rows of each rank: even, uneven, thinner than a halo, and none at the start, in the middle or at the end."""
    yield shard_sizes(9, world_size)
    yield [1] * world_size
    yield [5, 1, 2, 3][:world_size]
    if world_size > 1:
        yield [0, 4, 3, 2][:world_size]
        yield [6, 0, 1, 0][:world_size]
        yield shard_sizes(world_size - 1, world_size)


def of_this_rank(whole, sizes, rank, dim=-2):
    return whole.narrow(dim, sum(sizes[:rank]), sizes[rank])


# What the exactness tests must notice: each takes the place of the function named first.

def zeros_for_borrowed_rows(x, wanted, split, start_borrowing=spatial_ops.start_borrowing):
    arrive = start_borrowing(x, wanted, split)
    return lambda: [torch.zeros_like(piece) for piece in arrive()]


def own_moments(mean_BG, variance_BG, split):
    return mean_BG, variance_BG


def mean_of_variances(mean_BG, variance_BG, split, global_moments=group_norm.global_moments):
    """DistVAE's published formula: it has no term for the spread of the means."""
    mean, _ = global_moments(mean_BG, variance_BG, split)
    variance, _ = global_moments(variance_BG, variance_BG, split)
    return mean, variance


def own_tokens(tensor, sizes, split):
    return tensor


def own_sums(tensor, split):
    return tensor


def padded_alike(first, end, num_rows, kernel, stride, padding, input_rows=spatial_ops.input_rows):
    """As if the encoder's downsampler padded both edges, and not the end alone."""
    return input_rows(first, end, num_rows, kernel, stride, spatial_ops.Padding(padding.after, padding.after))


MUTANTS = {
    "padded alike": ("input_rows", padded_alike),
    "zeros for borrowed rows": ("start_borrowing", zeros_for_borrowed_rows),
    "own moments": ("global_moments", own_moments),
    "mean of variances": ("global_moments", mean_of_variances),
    "own sums": ("all_sums", own_sums),
    "own tokens": ("all_tokens", own_tokens),
}


def apply_mutant(name):
    if name:
        setattr(spatial_ops, *MUTANTS[name])
