"""Decode by rows is the decode of the whole picture, and so is each function that works on rows."""

from itertools import accumulate, product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import AutoencoderKL, AutoencoderTiny
from diffusers.models.attention_processor import AttnProcessor

from tests.ranks import run_ranks
from xdit_backend.parallel import vae as rows
from xdit_backend.parallel.collectives import Traffic
from xdit_backend.planner import shard_sizes
from xdit_backend.protocol.errors import UnsupportedError

WORLD_SIZES = (1, 2, 3, 4)
FUNCTIONS = ("conv2d", "group_norm", "pad", "interpolate", "scaled_dot_product_attention")


def split_of(sizes):
    return rows.RowSplit.of_sizes(sizes, dist.group.WORLD, Traffic())


def sizes_of(world_size):
    """Rows of each rank: even, uneven, thinner than a halo, and none at the start, in the middle or at the end."""
    yield shard_sizes(9, world_size)
    yield [1] * world_size
    yield [5, 1, 2, 3][:world_size]
    if world_size > 1:
        yield [0, 4, 3, 2][:world_size]
        yield [6, 0, 1, 0][:world_size]
        yield shard_sizes(world_size - 1, world_size)


def of_this_rank(whole, sizes, rank):
    return whole.narrow(-2, sum(sizes[:rank]), sizes[rank])


# What the exactness tests must notice: each takes the place of the function named first.

def zeros_for_borrowed_rows(x_BCHW, wanted, split, borrow_rows=rows.borrow_rows):
    return [torch.zeros_like(piece) for piece in borrow_rows(x_BCHW, wanted, split)]


def own_moments(mean_BG, variance_BG, split):
    return mean_BG, variance_BG


def mean_of_variances(mean_BG, variance_BG, split, global_moments=rows.global_moments):
    """DistVAE's published formula: it has no term for the spread of the means."""
    mean, _ = global_moments(mean_BG, variance_BG, split)
    variance, _ = global_moments(variance_BG, variance_BG, split)
    return mean, variance


def own_tokens(tensor, sizes, split):
    return tensor


MUTANTS = {
    "zeros for borrowed rows": ("borrow_rows", zeros_for_borrowed_rows),
    "own moments": ("global_moments", own_moments),
    "mean of variances": ("global_moments", mean_of_variances),
    "own tokens": ("all_tokens", own_tokens),
}


def apply_mutant(name):
    if name:
        setattr(rows, *MUTANTS[name])


# Planning


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_input_rows_are_the_receptive_field(kernel, stride):
    for padding, num_rows in product(range(4), range(1, 10)):
        num_outputs = (num_rows + 2 * padding - kernel) // stride + 1
        for first, end in product(range(num_outputs + 1), repeat=2):
            read = {row * stride - padding + tap for row in range(first, end) for tap in range(kernel)}
            if read:  # everything between the outermost rows is fetched, read or not
                read = set(range(min(read), max(read) + 1))

            above, low, high, below = rows.input_rows(first, end, num_rows, kernel, stride, padding)

            assert set(range(low, high)) == {row for row in read if 0 <= row < num_rows}
            assert above == sum(row < 0 for row in read)
            assert below == sum(row >= num_rows for row in read)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_output_row_belongs_to_the_rank_of_its_input_row(world_size):
    for sizes, kernel, stride, padding in product(sizes_of(world_size), (1, 3, 5), (1, 2, 3), (0, 1, 2)):
        starts = list(accumulate(sizes, initial=0))
        num_outputs = (starts[-1] + 2 * padding - kernel) // stride + 1
        if num_outputs < 1:
            continue

        out_starts = rows.output_starts(starts, kernel, stride, padding)

        assert out_starts[0] == 0 and out_starts[-1] == num_outputs and out_starts == sorted(out_starts)
        for rank in range(world_size):
            for row in range(out_starts[rank], out_starts[rank + 1]):
                assert starts[rank] <= row * stride
                assert row * stride < starts[rank + 1] or starts[rank + 1] == starts[-1]


# Convolution


def conv_cases(world_size):
    for sizes, kernel, stride in product(sizes_of(world_size), (1, 3, 5), (1, 2)):
        for padding in {0, 1, kernel // 2}:
            if sum(sizes) + 2 * padding >= kernel:
                yield sizes, kernel, stride, padding


def conv_inputs(sizes, kernel):
    generator = torch.Generator().manual_seed(sum(sizes) + kernel)
    x_BCHW = torch.randn(2, 4, sum(sizes), 7, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 2, kernel, 3, generator=generator, dtype=torch.float64)
    return x_BCHW, weight, torch.randn(6, generator=generator, dtype=torch.float64)


def convolve(rank, world_size, mutant):
    apply_mutant(mutant)
    results = []
    for sizes, kernel, stride, padding in conv_cases(world_size):
        x_BCHW, weight, bias = conv_inputs(sizes, kernel)
        own_rows = of_this_rank(x_BCHW, sizes, rank)
        results.append(rows.conv2d_rows(
            own_rows, weight, bias, (stride, 1), (padding, 1), (1, 1), groups=2, split=split_of(sizes)))
    return results


def conv_errors(world_size, mutant=None):
    """Largest difference to the convolution of the whole image, for each case that reaches beyond a rank's rows."""
    by_rank = run_ranks(convolve, world_size, mutant)
    for pieces, (sizes, kernel, stride, padding) in zip(zip(*by_rank), conv_cases(world_size)):
        x_BCHW, weight, bias = conv_inputs(sizes, kernel)
        whole = F.conv2d(x_BCHW, weight, bias, (stride, 1), (padding, 1), groups=2)
        assert sum(piece.shape[-2] for piece in pieces) == whole.shape[-2]
        yield (sizes, kernel, stride, padding), (torch.cat(pieces, -2) - whole).abs().max().item()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_convolution_by_rows_equals_convolution(world_size):
    for case, error in conv_errors(world_size):
        assert error < 1e-10, case


def test_convolution_test_notices_zeros_for_borrowed_rows():
    errors = [error for (sizes, kernel, stride, padding), error in conv_errors(3, "zeros for borrowed rows")
              if kernel > 1 and padding == kernel // 2 and sizes == [3, 3, 3]]

    assert len(errors) == 4 and all(error > 1e-2 for error in errors)


def convolve_many_times(rank, world_size, num_layers, num_repeats):
    x_BCHW, _, _ = conv_inputs([11], 3)
    weight = torch.eye(4, dtype=torch.float64)[:, :, None, None] * torch.full((3, 3), 1 / 9)
    results = []
    for _ in range(num_repeats):
        h = of_this_rank(x_BCHW, shard_sizes(11, world_size), rank)
        for _ in range(num_layers):
            h = rows.conv2d_rows(h, weight, None, (1, 1), (1, 1), (1, 1), 1, split_of(shard_sizes(11, world_size)))
        results.append(h)
    return results


def test_100_convolutions_on_8_ranks_neither_block_nor_mix_messages():
    x_BCHW, _, _ = conv_inputs([11], 3)
    weight = torch.eye(4, dtype=torch.float64)[:, :, None, None] * torch.full((3, 3), 1 / 9)
    whole = x_BCHW
    for _ in range(100):
        whole = F.conv2d(whole, weight, None, padding=1)

    for pieces in zip(*run_ranks(convolve_many_times, 8, 100, 3)):
        assert (torch.cat(pieces, -2) - whole).abs().max() < 1e-10 * whole.abs().max()


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
        results.append(rows.group_norm_rows(of_this_rank(x_BCHW, sizes, rank), 3, weight, bias, 1e-6, split_of(sizes)))
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
    allowed = {torch.float64: 1e-10, torch.float32: 5e-6, torch.bfloat16: 8 * 2 ** -8}
    for case, error, plain_error in norm_errors(world_size):
        assert error < max(allowed[case[-1]], 1.5 * plain_error), case


@pytest.mark.parametrize("mutant", ["own moments", "mean of variances"])
def test_group_norm_test_notices(mutant):
    errors = {shift: error for (sizes, shift, dtype), error, _ in norm_errors(3, mutant)
              if sizes == [3, 3, 3] and dtype is torch.float64}

    assert all(errors[shift] > 0.3 for shift in (1, 3, 100))


def normalise_tokens(rank, world_size):
    """As in the middle of the decoder, where the norm of the attention gets (B, C, T)."""
    sizes = [3, 0, 2]
    x_BCHW, weight, bias = norm_inputs(sizes, 3, torch.float64)
    tokens = of_this_rank(x_BCHW, sizes, rank).flatten(2).transpose(1, 2).contiguous().transpose(1, 2)
    return rows.group_norm_rows(tokens, 3, weight, bias, 1e-6, split_of(sizes))


def test_group_norm_takes_tokens_that_are_not_contiguous():
    x_BCHW, weight, bias = norm_inputs([3, 0, 2], 3, torch.float64)

    tokens = torch.cat(run_ranks(normalise_tokens, 3), -1)

    assert (tokens - F.group_norm(x_BCHW, 3, weight, bias, 1e-6).flatten(2)).abs().max() < 1e-10


# Decode


def tiny_vae(kind, dtype=torch.float64):
    """An AutoencoderKL in the manner of SD (4 channels, post_quant_conv) or Flux (16 channels, none)."""
    torch.manual_seed(0)
    sd = kind == "sd"
    vae = AutoencoderKL(
        block_out_channels=(16, 32, 32), layers_per_block=1, norm_num_groups=8, latent_channels=4 if sd else 16,
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        use_quant_conv=sd, use_post_quant_conv=sd)
    for name, parameter in vae.named_parameters():  # else the attention and the biases are too faint to be missed
        if name.endswith(("bias", "to_out.0.weight")):
            torch.nn.init.normal_(parameter)
    for parameter in vae.parameters():
        parameter.data = parameter.data.to(dtype)
    return vae.eval()


def latent(kind, batch, height, width, dtype=torch.float64):
    shape = (batch, 4 if kind == "sd" else 16, height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(height), dtype=torch.float64).to(dtype)


@torch.no_grad()
def decoded(kind, latent_BCHW):
    return tiny_vae(kind, latent_BCHW.dtype).decode(latent_BCHW).sample


def decode(rank, world_size, kind, latent_BCHW, mutant=None):
    apply_mutant(mutant)
    return rows.decode_rows(tiny_vae(kind, latent_BCHW.dtype), latent_BCHW, dist.group.WORLD)


def put_together(pieces):
    first_rows, pictures = zip(*pieces)
    assert list(first_rows) == list(accumulate((picture.shape[-2] for picture in pictures[:-1]), initial=0))
    return torch.cat(pictures, -2)


SIZES = [(1, 8, 8), (2, 7, 5), (1, 5, 9), (2, 2, 3), (1, 1, 4)]  # batch, height, width


def decode_sizes(rank, world_size, kind):
    return [decode(rank, world_size, kind, latent(kind, *size)) for size in SIZES]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("kind", ["sd", "flux"])
def test_decode_by_rows_equals_decode(kind, world_size):
    by_rank = run_ranks(decode_sizes, world_size, kind)

    for size, pieces in zip(SIZES, zip(*by_rank)):
        picture, whole = put_together(pieces), decoded(kind, latent(kind, *size))
        assert picture.shape == whole.shape, size
        assert (picture - whole).abs().max() < 1e-10, size


def test_decode_in_float32_equals_decode():
    latent_BCHW = latent("sd", 1, 7, 8, torch.float32)

    picture = put_together(run_ranks(decode, 3, "sd", latent_BCHW))

    assert (picture - decoded("sd", latent_BCHW)).abs().max() < 1e-4


def test_decode_in_bfloat16_is_as_near_to_the_truth_as_plain_decode_is():
    latent_BCHW = latent("sd", 1, 7, 8, torch.bfloat16)
    truth = tiny_vae("sd", torch.bfloat16).double().decode(latent_BCHW.double()).sample

    picture = put_together(run_ranks(decode, 3, "sd", latent_BCHW))

    assert picture.dtype == torch.bfloat16
    assert (picture - truth).abs().mean() < 1.5 * (decoded("sd", latent_BCHW) - truth).abs().mean()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_decode_test_notices(mutant):
    latent_BCHW = latent("sd", 1, 7, 8)

    picture = put_together(run_ranks(decode, 2, "sd", latent_BCHW, mutant))

    assert (picture - decoded("sd", latent_BCHW)).abs().max() > 1e-3


def test_decode_without_a_group_is_the_vaes_own():
    latent_BCHW = latent("sd", 1, 4, 4)

    first_row, picture = rows.decode_rows(tiny_vae("sd"), latent_BCHW)

    assert first_row == 0 and torch.equal(picture, decoded("sd", latent_BCHW))


def decode_in_subgroup(rank, world_size, latent_BCHW):
    group = dist.new_group([1, 2])
    return rows.decode_rows(tiny_vae("sd"), latent_BCHW, group) if rank else None


def test_decodes_in_a_group_without_rank_0():
    latent_BCHW = latent("sd", 1, 5, 4)

    _, *pieces = run_ranks(decode_in_subgroup, 3, latent_BCHW)

    assert (put_together(pieces) - decoded("sd", latent_BCHW)).abs().max() < 1e-10


def rows_held(rank, world_size, latent_BCHW):
    """The most rows of a tensor that any module gives out, as a share of the rows the picture has at that scale."""
    vae, shares = tiny_vae("sd"), []

    def note(module, inputs, output):
        if output.dim() == 4:
            shares.append(output.shape[-2] / (output.shape[-1] // latent_BCHW.shape[-1] * latent_BCHW.shape[-2]))

    for module in vae.decoder.modules():
        module.register_forward_hook(note)
    rows.decode_rows(vae, latent_BCHW, dist.group.WORLD)
    return max(shares)


def test_no_rank_holds_more_than_its_share_of_rows():
    assert max(run_ranks(rows_held, 3, latent("sd", 1, 8, 4))) == 3 / 8


# Refusals


def refusals(rank, world_size, latent_BCHW):
    def message_of(vae):
        try:
            rows.decode_rows(vae, latent_BCHW, dist.group.WORLD)
        except UnsupportedError as error:
            return str(error)

    def with_conv_in(**options):
        vae = tiny_vae("sd")
        vae.decoder.conv_in = torch.nn.Conv2d(4, 32, 3, dtype=torch.float64, **options)
        return vae

    tiled, split_attention, enlarged = (tiny_vae("sd") for _ in range(3))
    tiled.enable_tiling()
    split_attention.set_attn_processor(AttnProcessor())
    enlarged.decoder.up_blocks[0].upsamplers[0] = torch.nn.Upsample(scale_factor=2, mode="bilinear")
    functions = [getattr(F, name) for name in FUNCTIONS]
    messages = {
        "dilation": message_of(with_conv_in(padding=2, dilation=2)),
        "reflect": message_of(with_conv_in(padding=1, padding_mode="reflect")),
        "same": message_of(with_conv_in(padding="same")),
        "bilinear": message_of(enlarged),
        "tiling": message_of(tiled),
        "AttnProcessor": message_of(split_attention),
        "AutoencoderTiny": message_of(AutoencoderTiny()),
    }
    return messages, functions == [getattr(F, name) for name in FUNCTIONS]


def test_rejects_what_cannot_be_split_and_leaves_torch_as_it_was():
    for messages, restored in run_ranks(refusals, 2, latent("sd", 1, 4, 4)):
        for word, message in messages.items():
            assert word in message
        assert restored
