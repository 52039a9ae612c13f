"""Each function that works on rows gives the rows of what torch gives for the whole image."""

from itertools import accumulate, product

import pytest
import torch
import torch.nn.functional as F

from tests.support.ranks import run_ranks
from tests.support.row_splits import WORLD_SIZES, apply_mutant, of_this_rank, sizes_of, split_of
from tests.support.tolerances import within
from xdit_backend.distributed import group_norm, spatial_ops
from xdit_backend.parallel.vae_memory import ActivationBytes
from xdit_backend.partition import shard_sizes

# Planning


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_input_rows_are_the_receptive_field(kernel, stride):
    for before, after, num_rows in product(range(4), range(3), range(1, 10)):
        padding = spatial_ops.Padding(before, after)
        num_outputs = spatial_ops.num_outputs(num_rows, kernel, stride, padding)
        for first, end in product(range(num_outputs + 1), repeat=2):
            read = {row * stride - before + tap for row in range(first, end) for tap in range(kernel)}
            if read:  # everything between the outermost rows is fetched, read or not
                read = set(range(min(read), max(read) + 1))

            above, low, high, below = spatial_ops.input_rows(first, end, num_rows, kernel, stride, padding)

            assert set(range(low, high)) == {row for row in read if 0 <= row < num_rows}
            assert above == sum(row < 0 for row in read)
            assert below == sum(row >= num_rows for row in read)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_output_row_belongs_to_the_rank_of_its_input_row(world_size):
    for sizes, kernel, stride, before, after in product(sizes_of(world_size), (1, 3, 5), (1, 2, 3), (0, 1, 2),
                                                        (0, 1, 2)):
        starts = list(accumulate(sizes, initial=0))
        num_outputs = (starts[-1] + before + after - kernel) // stride + 1
        if num_outputs < 1:
            continue

        out_starts = spatial_ops.output_starts(starts, kernel, stride, spatial_ops.Padding(before, after))

        assert out_starts[0] == 0 and out_starts[-1] == num_outputs and out_starts == sorted(out_starts)
        for rank in range(world_size):
            for row in range(out_starts[rank], out_starts[rank + 1]):
                assert starts[rank] <= row * stride
                assert row * stride < starts[rank + 1] or starts[rank + 1] == starts[-1]


# Convolution

# Padding along the split: as a convolution says it, as the downsampler of an encoder has it, and torch's other modes
PADDINGS = [(1, 1, "constant"), (0, 0, "constant"), (0, 1, "constant"), (2, 0, "constant"), (2, 2, "constant"),
            (1, 1, "replicate"), (2, 1, "replicate"), (1, 1, "reflect")]
BLOCK_SIZES = [None, 1, 4, 100, (1, 1), (2, 3), (4, 100), (100, 100)]


def conv_cases(world_size):
    for sizes, kernel, stride, (before, after, mode) in product(sizes_of(world_size), (1, 3, 5), (1, 2), PADDINGS):
        if (sum(sizes) + before + after >= kernel and (mode == "constant" or kernel == 3)
                and (mode != "reflect" or sum(sizes) > 1)):
            yield sizes, kernel, stride, spatial_ops.Padding(before, after, mode)


def conv_inputs(sizes, kernel, dim=-2, num_dims=2):
    generator = torch.Generator().manual_seed(sum(sizes) + kernel)
    frames = () if num_dims == 2 else (4,)
    size = (sum(sizes), 7) if dim == -2 else (7, sum(sizes))
    x = torch.randn(2, 4, *frames, *size, generator=generator, dtype=torch.float64)
    reach = (kernel, 3) if dim == -2 else (3, kernel)
    weight = torch.randn(6, 2, *(() if num_dims == 2 else (3,)), *reach, generator=generator, dtype=torch.float64)
    return x, weight, torch.randn(6, generator=generator, dtype=torch.float64)


def conv_arguments(stride, dim, num_dims, before=0):
    """stride and padding of a Convolution; `before` is along the split."""
    frames = () if num_dims == 2 else (1,)
    return ((*frames, stride, 1), (*frames, before, 1)) if dim == -2 else ((*frames, 1, stride), (*frames, 1, before))


def convolve(rank, world_size, dim=-2, num_dims=2, block_size=None, mutant=None):
    apply_mutant(mutant)
    results = []
    for sizes, kernel, stride, padding in conv_cases(world_size):
        x, weight, bias = conv_inputs(sizes, kernel, dim, num_dims)
        results.append(spatial_ops.conv_rows(
            of_this_rank(x, sizes, rank, dim),
            spatial_ops.Convolution(weight, bias, *conv_arguments(stride, dim, num_dims), groups=2),
            split_of(sizes, dim), padding, block_size))
    return results


def conv_errors(world_size, dim=-2, num_dims=2, block_size=None, mutant=None):
    """Largest difference to the convolution of the whole image, for each case."""
    by_rank = run_ranks(convolve, world_size, dim, num_dims, block_size, mutant)
    convolution = {2: F.conv2d, 3: F.conv3d}[num_dims]
    for pieces, (sizes, kernel, stride, padding) in zip(zip(*by_rank), conv_cases(world_size)):
        x, weight, bias = conv_inputs(sizes, kernel, dim, num_dims)
        pairs = {dim: (padding.before, padding.after)}
        padded = F.pad(x, [size for each in (-1, -2, -3)[:num_dims] for size in pairs.get(each, (0, 0))], padding.mode)
        whole = convolution(padded, weight, bias, *conv_arguments(stride, dim, num_dims), groups=2)
        assert sum(piece.shape[dim] for piece in pieces) == whole.shape[dim]
        yield (sizes, kernel, stride, padding), (torch.cat(pieces, dim) - whole).abs().max().item()


@pytest.mark.parametrize("dim, num_dims, world_size", [
    *((dim, 2, world_size) for dim in (-2, -1) for world_size in WORLD_SIZES), (-2, 3, 3), (-1, 3, 3)])
def test_convolution_by_rows_equals_convolution(world_size, dim, num_dims):
    for case, error in conv_errors(world_size, dim, num_dims):
        within(error, 1e-12, case)


@pytest.mark.parametrize("dim, block_size", [
    *((-2, size) for size in BLOCK_SIZES[1:4]),
    *(pytest.param(-2, size, marks=pytest.mark.slow) for size in BLOCK_SIZES[4:]), (-1, 4),
    (-1, (2, 3))], ids=str)
def test_convolution_in_blocks_equals_convolution(dim, block_size):
    for case, error in conv_errors(3, dim, block_size=block_size):
        within(error, 1e-12, case)


@pytest.mark.parametrize("block_size", [None, (2, 3)], ids=str)
def test_convolution_test_notices_zeros_for_borrowed_rows(block_size):
    errors = [error for (sizes, kernel, stride, padding), error in conv_errors(3, block_size=block_size,
                                                                               mutant="zeros for borrowed rows")
              if kernel > 1 and padding.before == kernel // 2 and sizes == [3, 3, 3]]

    assert len(errors) > 4 and all(error > 1e-2 for error in errors)


def peak_bytes_of_a_convolution(rank, world_size, block_size):
    x, weight = torch.ones(1, 16, 512, 64), torch.ones(16, 16, 3, 3)
    with ActivationBytes() as live:
        spatial_ops.conv_rows(x, spatial_ops.Convolution(weight, padding=1), split_of([512] * world_size), None,
                              block_size)
    return live.peak_bytes


def test_a_convolution_needs_its_output_and_one_block_or_the_edges():
    """The copy of a rank's rows that halos are joined to is of a block, or of an edge, and not of the image."""
    row_bytes = 64 * 16 * 4
    image_bytes = 512 * row_bytes

    whole, *_ = run_ranks(peak_bytes_of_a_convolution, 2, None)
    blocks, *_ = run_ranks(peak_bytes_of_a_convolution, 2, 16)

    assert image_bytes < whole < image_bytes + 8 * row_bytes
    assert image_bytes < blocks < image_bytes + 3 * 16 * row_bytes


def convolve_many_times(rank, world_size, num_layers, num_repeats):
    x_BCHW, _, _ = conv_inputs([11], 3)
    weight = torch.eye(4, dtype=torch.float64)[:, :, None, None] * torch.full((3, 3), 1 / 9)
    results = []
    for _ in range(num_repeats):
        h = of_this_rank(x_BCHW, shard_sizes(11, world_size), rank)
        for _ in range(num_layers):
            h = spatial_ops.conv_rows(h, spatial_ops.Convolution(weight, padding=1),
                                      split_of(shard_sizes(11, world_size)))
        results.append(h)
    return results


@pytest.mark.parametrize("num_repeats", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_100_convolutions_on_8_ranks_neither_block_nor_mix_messages(num_repeats):
    x_BCHW, _, _ = conv_inputs([11], 3)
    weight = torch.eye(4, dtype=torch.float64)[:, :, None, None] * torch.full((3, 3), 1 / 9)
    whole = x_BCHW
    for _ in range(100):
        whole = F.conv2d(whole, weight, None, padding=1)

    for pieces in zip(*run_ranks(convolve_many_times, 8, 100, num_repeats)):
        within((torch.cat(pieces, -2) - whole).abs().max() / whole.abs().max(), 1e-12)


# Group norm


def norm_cases(world_size):
    return list(product(sizes_of(world_size), (0, 1, 3, 100), (torch.float64, torch.float32, torch.bfloat16)))


def norm_inputs(sizes, shift, dtype):
    """Rows whose mean differs from rank to rank by `shift`."""
    generator = torch.Generator().manual_seed(sum(sizes))
    ranks = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[:, None]
    x_BCHW = torch.randn(2, 6, sum(sizes), 5, generator=generator) + shift * ranks
    return x_BCHW.to(dtype), *torch.randn(2, 6, generator=generator).to(dtype)


def norm_arguments(sizes, shift, dtype, compute_dtype):
    x_BCHW, weight, bias = (tensor.to(compute_dtype) for tensor in norm_inputs(sizes, shift, dtype))
    return x_BCHW, 3, weight, bias, 1e-6


def normalise(rank, world_size, mutant):
    apply_mutant(mutant)
    results = []
    for sizes, shift, dtype in norm_cases(world_size):
        x_BCHW, weight, bias = norm_inputs(sizes, shift, dtype)
        results.append(group_norm.group_norm_rows(of_this_rank(x_BCHW, sizes, rank), 3, weight, bias, 1e-6,
                                                 split_of(sizes)))
    return results


def norm_errors(world_size, mutant=None):
    """Largest difference to the norm of the whole image in float64, for each case, and that of torch's norm."""
    by_rank = run_ranks(normalise, world_size, mutant)
    for pieces, (sizes, shift, dtype) in zip(zip(*by_rank), norm_cases(world_size)):
        assert all(piece.dtype == dtype for piece in pieces)
        whole = F.group_norm(*norm_arguments(sizes, shift, dtype, torch.float64))
        plain = F.group_norm(*norm_arguments(sizes, shift, dtype, dtype))
        error, plain_error = ((each - whole).abs().max().item() for each in (torch.cat(pieces, -2), plain))
        yield (sizes, shift, dtype), error, plain_error


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_group_norm_by_rows_equals_group_norm(world_size):
    """In float32 at mean 100 torch's own norm is off by 1e-5. bfloat16 may round a result, of up to 8, once."""
    allowed = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 8 * 2 ** -8}
    for case, error, plain_error in norm_errors(world_size):
        within(error, max(allowed[case[-1]], 1.5 * plain_error), case)


@pytest.mark.parametrize("mutant", ["own moments", "mean of variances"])
def test_group_norm_test_notices(mutant):
    errors = {shift: error for (sizes, shift, dtype), error, _ in norm_errors(3, mutant)
              if sizes == [3, 3, 3] and dtype is torch.float64}

    assert all(errors[shift] > 0.3 for shift in (1, 3, 100))


def exchanges_of_a_norm(rank, world_size):
    """Exchanges of a norm whose moments are found one group after the other;
    copies to the device of two more norms of the split."""
    group_norm.NORM_ELEMENTS, copies = 1, []
    x_BCHW, weight, bias = norm_inputs([3, 2, 4], 3, torch.float64)
    split = split_of([3, 2, 4])
    own = of_this_rank(x_BCHW, [3, 2, 4], rank)
    group_norm.group_norm_rows(own, 3, weight, bias, 1e-6, split)
    num_exchanges, new_tensor = split.traffic.num_exchanges, torch.Tensor.new_tensor
    torch.Tensor.new_tensor = lambda *args, **options: copies.append(1) or new_tensor(*args, **options)
    group_norm.group_norm_rows(own, 3, weight, bias, 1e-6, split)
    group_norm.group_norm_rows(own, 3, weight, bias, 1e-6, split)
    return num_exchanges, len(copies)


def test_a_norm_is_one_exchange_and_waits_for_no_copy():
    """Mean and variance of all groups travel together. A copy of numbers to a CUDA device would wait for all work
    before it."""
    assert run_ranks(exchanges_of_a_norm, 3) == [(1, 0)] * 3


@pytest.mark.parametrize("batch, channels, num_groups", [(1, 6, 3), (2, 8, 8), (3, 12, 1)])
def test_moments_of_channels_give_those_of_groups(batch, channels, num_groups):
    """As on CUDA, where those of the channels come from one kernel."""
    x = torch.randn(batch, channels, 5, 4, dtype=torch.float64) * 3 + torch.arange(channels)[:, None, None]
    flat = x.view(batch * channels, -1)

    moments = group_norm.moments_of_channels(flat.mean(1), flat.var(1, correction=0), batch, num_groups)

    for got, want in zip(moments, group_norm.own_moments(x, num_groups)):
        within((got - want).abs().max(), 1e-10)


@pytest.mark.parametrize("most, num_copies", [(2 ** 20, 1), (300, 2), (40, 12)])
def test_moments_of_a_large_group_are_found_by_channels(monkeypatch, most, num_copies):
    """Of 3 images, so that no wider copy is of more than `most` numbers, or of a channel of them all."""
    monkeypatch.setattr(group_norm, "NORM_ELEMENTS", most)
    monkeypatch.setattr(group_norm, "MAX_CHUNKS", 10 ** 6)
    sizes, moments = [], group_norm._moments
    monkeypatch.setattr(group_norm, "_moments", lambda x, channels: sizes.append(x.numel()) or moments(x, channels))
    x = torch.randn(3, 12, 5, 3, dtype=torch.float64) * 3 + torch.arange(12)[:, None, None]

    mean, variance = group_norm.own_moments(x, 2)

    flat = x.view(3, 2, -1)
    within((mean - flat.mean(2)).abs().max(), 1e-12)
    within((variance - flat.var(2, correction=0)).abs().max(), 1e-12)
    assert len(sizes) == num_copies and max(sizes) <= max(most, 3 * 15)


def normalise_tokens(rank, world_size):
    """As in the middle of the decoder, where the norm of the attention gets (B, C, T)."""
    sizes = [3, 0, 2]
    x_BCHW, weight, bias = norm_inputs(sizes, 3, torch.float64)
    tokens = of_this_rank(x_BCHW, sizes, rank).flatten(2).transpose(1, 2).contiguous().transpose(1, 2)
    return group_norm.group_norm_rows(tokens, 3, weight, bias, 1e-6, split_of(sizes))


def test_group_norm_takes_tokens_that_are_not_contiguous():
    x_BCHW, weight, bias = norm_inputs([3, 0, 2], 3, torch.float64)

    tokens = torch.cat(run_ranks(normalise_tokens, 3), -1)

    within((tokens - F.group_norm(x_BCHW, 3, weight, bias, 1e-6).flatten(2)).abs().max(), 1e-12)
