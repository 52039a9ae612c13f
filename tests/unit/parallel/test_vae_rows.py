"""Decode and encode by rows are the decode and encode of the whole picture, for every VAE that can be split."""

import functools
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import AutoencoderOobleck
from diffusers.models.attention_processor import Attention, AttnProcessor

from tests.support.ranks import run_ranks
from tests.support.row_splits import apply_mutant
from tests.support.tiers import by_default
from tests.support.tolerances import within
from tests.support.vae_zoo import KINDS, decoded, encoded, image, latent, tiny_vae
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.spatial_ops import all_sums
from xdit_backend.parallel.vae_rows import Ranks, SplitOptions, decode_rows, encode_rows, split_dim
from xdit_backend.protocol.errors import UnsupportedError

FUNCTIONS = ("conv2d", "conv3d", "group_norm", "pad", "interpolate", "scaled_dot_product_attention")
# batch, height, width of the latent: even, odd, wide, thinner than the halo, fewer rows than ranks
SIZES = [(1, 8, 8), (2, 7, 5), (1, 5, 9), (2, 2, 3), (1, 1, 4), (1, 3, 1)]


def sizes_of(kind):
    sizes = [size for size in SIZES if min(size[1:]) >= KINDS[kind].least_rows]
    return sizes * 2 if kind == "sd" else sizes                # again, with the groups that are there


def put_together(shares):
    shares = [share for share in shares if share is not None]
    (dim,) = {share.dim for share in shares}
    assert [share.start for share in shares] == list(
        accumulate((share.tensor.shape[dim] for share in shares[:-1]), initial=0))
    return torch.cat([share.tensor for share in shares], dim)


@functools.cache
def decoded_size(kind, size):
    return decoded(kind, latent(kind, *size))


@functools.cache
def encoded_size(kind, size):
    return encoded(kind, image(kind, *size))


class GivenUp(Exception):
    pass


def give_up(rank, world_size):
    """{kind: [(convolutions before it was given up, frames kept for others, the next result)] of decode and encode}.

    Rank 0 alone wants it, at the sixth convolution. Meanwhile torch's functions are what they were for everyone else.
    """
    requested, ranks, functions = [], Ranks(dist.group.WORLD), [getattr(F, name) for name in FUNCTIONS]

    def step(split):
        requested.append(split)
        assert functions == [getattr(F, name) for name in FUNCTIONS]
        if all_sums(torch.tensor(float(rank == 0 and len(requested) == 6)), split):
            raise GivenUp

    def twice(way, vae, *args):
        requested.clear()
        with pytest.raises(GivenUp):
            way(vae, *args, ranks, options=SplitOptions(on_convolution=step))
        cached = sum(isinstance(each, torch.Tensor) for value in vars(vae).values() if isinstance(value, list)
                   for each in value)
        return len(requested), cached, way(vae, *args, ranks)

    told = {}
    for kind, one in KINDS.items():
        vae = tiny_vae(kind)
        told[kind] = [twice(decode_rows, vae, latent(kind, 1, 5, 4)),
                      twice(encode_rows, vae, image(kind, 1, 5, 4), one.scale)]
    return told


@pytest.mark.parametrize("world_size", by_default([2], [1, 2]))
def test_all_ranks_leave_a_image_at_one_convolution_and_the_next_is_right(world_size):
    by_rank = run_ranks(give_up, world_size)

    for kind, one in KINDS.items():
        for wanted, shares in zip((decoded_size(kind, (1, 5, 4)), encoded_size(kind, (1, 5, 4))),
                                  zip(*(told[kind] for told in by_rank))):
            assert [numbers for *numbers, _ in shares] == [[6, 0]] * world_size, kind
            within((put_together([share for *_, share in shares]) - wanted).abs().max(), one.tolerance, kind)


# Decode


def decode(rank, world_size, kind, latent, mutant=None, block_size=None):
    apply_mutant(mutant)
    return decode_rows(tiny_vae(kind, latent.dtype), latent, Ranks(dist.group.WORLD),
                       options=SplitOptions(block_size=block_size))


def decode_sizes(rank, world_size, kind, speeds=()):
    ranks, vae = Ranks(dist.group.WORLD), tiny_vae(kind)
    return [decode_rows(vae, latent(kind, *size), ranks, options=SplitOptions(speeds=speeds))
            for size in sizes_of(kind)]


# any number: test_spatial_ops.py; on two workers: vae/test_vae_decode.py
@pytest.mark.parametrize("kind, world_size", [*((kind, 3) for kind in KINDS), ("sd", 2)])
def test_decode_by_rows_equals_decode(kind, world_size):
    by_rank = run_ranks(decode_sizes, world_size, kind)

    for size, shares in zip(sizes_of(kind), zip(*by_rank)):
        result, whole = put_together(shares), decoded_size(kind, size)
        assert result.shape == whole.shape, size
        within((result - whole).abs().max(), KINDS[kind].tolerance, size)
        assert sum(share is not None for share in shares) == min(world_size, max(size[1:])), size


def decode_by_some(rank, world_size):
    """By one after the other of SOME."""
    ranks, vae, given = Ranks(dist.group.WORLD), tiny_vae("sd"), latent("sd", 1, 5, 4)
    some = [ranks.only(*each) for each in SOME]
    return [decode_rows(vae, given, each) if each.is_member else None for each in some]


SOME = [(2, 0), (3, 0), (1, 0), (1, 2), (2, 1)]                # how many of three ranks, and the first of them


def test_decode_by_some_of_the_ranks_equals_decode():
    whole = decoded("sd", latent("sd", 1, 5, 4))
    for shares, (count, first) in zip(zip(*run_ranks(decode_by_some, 3)), SOME):
        assert [share is not None for share in shares] == [first <= rank < first + count for rank in range(3)]
        within((put_together(shares) - whole).abs().max(), KINDS["sd"].tolerance)


@pytest.mark.parametrize("kind, speeds", [("sd", (100, 26)), pytest.param("sd", (1, 9, 3), marks=pytest.mark.slow)])
def test_decode_by_rows_of_unlike_ranks_equals_decode(kind, speeds):
    by_rank = run_ranks(decode_sizes, len(speeds), kind, speeds)

    for size, shares in zip(sizes_of(kind), zip(*by_rank)):
        result = put_together(shares)
        within((result - decoded(kind, latent(kind, *size))).abs().max(), KINDS[kind].tolerance, size)
        rows = [0 if share is None else share.tensor.shape[share.dim] for share in shares]
        assert rows.index(max(rows)) == speeds.index(max(speeds)) or max(size[1:]) <= len(speeds), size


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("block_size", by_default([3], [3, (5, 4)]), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_decode_in_blocks_equals_decode(kind, block_size, world_size):
    size = 1, 5, 4

    result = put_together(run_ranks(decode, world_size, kind, latent(kind, *size), None, block_size))

    assert (result - decoded_size(kind, size)).abs().max() < KINDS[kind].tolerance


def test_decode_in_float32_equals_decode():
    latent_BCHW = latent("sd", 1, 7, 8, torch.float32)

    result = put_together(run_ranks(decode, 3, "sd", latent_BCHW))

    within((result - decoded("sd", latent_BCHW)).abs().max(), 2e-5)


def test_decode_in_bfloat16_is_as_near_to_the_truth_as_plain_decode_is():
    latent_BCHW = latent("sd", 1, 7, 8, torch.bfloat16)
    truth = tiny_vae("sd", torch.bfloat16).double().decode(latent_BCHW.double()).sample

    result = put_together(run_ranks(decode, 3, "sd", latent_BCHW))

    assert result.dtype == torch.bfloat16
    assert (result - truth).abs().mean() < 1.5 * (decoded("sd", latent_BCHW) - truth).abs().mean()


@pytest.mark.parametrize("kind, mutant", [(kind, mutant) for kind in KINDS for mutant in KINDS[kind].mutants])
def test_decode_test_notices(kind, mutant):
    size = 1, 7, 6

    result = put_together(run_ranks(decode, 2, kind, latent(kind, *size), mutant))

    assert (result - decoded_size(kind, size)).abs().max() > 1e-3


# frames, height, width of the latent: two to each rank, an odd number, one to a rank; fewer of them than ranks
VIDEOS = [(9, 2, 3), (6, 4, 2), (5, 2, 2), (4, 2, 2), (3, 2, 3)]


def frames(size):
    return torch.randn(1, 8, *size, generator=torch.Generator().manual_seed(sum(size)), dtype=torch.float64)


def decode_frames(rank, world_size, kind, sizes, mutant=None, block_size=None):
    apply_mutant(mutant)
    ranks, vae = Ranks(dist.group.WORLD), tiny_vae(kind)
    return [decode_rows(vae, frames(size), ranks, options=SplitOptions(-3, block_size=block_size)) for size in sizes]


@pytest.mark.parametrize("world_size, block_size", [(1, 2), (2, None), (2, 3), (3, None), (4, None)])
@pytest.mark.parametrize("kind", ["ltx", "ltx095"])
def test_decode_by_frames_equals_decode(kind, world_size, block_size):
    by_rank = run_ranks(decode_frames, world_size, kind, VIDEOS, None, block_size)

    for size, shares in zip(VIDEOS, zip(*by_rank)):
        result, whole = put_together(shares), decoded(kind, frames(size))
        assert shares[0].dim == -3 and result.shape == whole.shape, size
        within((result - whole).abs().max(), KINDS[kind].tolerance, size)
        assert sum(share is not None for share in shares) == min(world_size, size[0] - 1), size


@pytest.mark.parametrize("kind", ["ltx", "ltx095"])
def test_decode_by_frames_test_notices_zeros_for_borrowed_frames(kind):
    by_rank = run_ranks(decode_frames, 2, kind, VIDEOS[:1], "zeros for borrowed rows")
    result = put_together([shares[0] for shares in by_rank])

    assert (result - decoded(kind, frames(VIDEOS[0]))).abs().max() > 1e-3


def test_the_longest_dim_is_split():
    assert [split_dim(tiny_vae("ltx"), (1, 8, *size), 1)
            for size in [(9, 8, 7), (10, 7, 8), (10, 8, 8)]] == [-2, -3, -3]
    assert split_dim(tiny_vae("ltx"), (1, 3, 81, 32, 24), 8) == -2
    assert split_dim(tiny_vae("wan"), (1, 4, 10, 4, 5), 1) == -1
    assert split_dim(tiny_vae("sd"), (1, 4, 4, 4), 1) == -2


def test_decode_without_a_group_is_the_vaes_own():
    latent_BCHW = latent("sd", 1, 4, 4)

    share = decode_rows(tiny_vae("sd"), latent_BCHW)

    assert share.start == 0 and torch.equal(share.tensor, decoded("sd", latent_BCHW))


# Encode


def encode(rank, world_size, kind, image, mutant=None):
    apply_mutant(mutant)
    return encode_rows(tiny_vae(kind, image.dtype), image, KINDS[kind].scale, Ranks(dist.group.WORLD))


def encode_sizes(rank, world_size, kind):
    ranks, vae = Ranks(dist.group.WORLD), tiny_vae(kind)
    return [encode_rows(vae, image(kind, *size), KINDS[kind].scale, ranks) for size in sizes_of(kind)]


@pytest.mark.parametrize("kind, world_size", [*((kind, 3) for kind in KINDS), ("sd", 2)])
def test_encode_by_rows_equals_encode(kind, world_size):
    by_rank = run_ranks(encode_sizes, world_size, kind)

    for size, shares in zip(sizes_of(kind), zip(*by_rank)):
        result, whole = put_together(shares), encoded_size(kind, size)
        assert result.shape == whole.shape, size
        within((result - whole).abs().max(), KINDS[kind].tolerance, size)


@pytest.mark.parametrize("kind, mutant",
                         [(kind, mutant) for kind in KINDS
                          for mutant in KINDS[kind].mutants + KINDS[kind].encode_mutants])
def test_encode_test_notices(kind, mutant):
    size = 1, 5, 4

    result = put_together(run_ranks(encode, 2, kind, image(kind, *size), mutant))

    assert (result - encoded_size(kind, size)).abs().max() > 1e-3


def test_what_is_not_a_number_is_encoded_too():
    """Half precision overflows in some VAEs. CogVideoX's downsampler has its padded frames in another order."""
    latent = encode_rows(tiny_vae("cogvideox"), torch.full_like(image("cogvideox", 1, 2, 2), torch.nan), 8,
                         options=SplitOptions(block_size=4)).tensor

    assert latent.isnan().all()


# Groups and shares


def decode_in_subgroup(rank, world_size, latent_BCHW):
    group = dist.new_group([1, 2])
    return decode_rows(tiny_vae("sd"), latent_BCHW, Ranks(group)) if rank else None


def test_decodes_in_a_group_without_rank_0():
    latent_BCHW = latent("sd", 1, 5, 4)

    _, *pieces = run_ranks(decode_in_subgroup, 3, latent_BCHW)

    within((put_together(pieces) - decoded("sd", latent_BCHW)).abs().max(), 1e-12)


def exchanges(rank, world_size, latent_BCHW):
    """(exchanges of a decode, the layers that need one: norms, convolutions wider than a pixel, attentions)."""
    vae, traffic, layers = tiny_vae("sd"), Traffic(), []

    def note(module, args, output):
        if (isinstance(module, torch.nn.GroupNorm | Attention) or isinstance(module, torch.nn.Conv2d)
                and module.kernel_size != (1, 1)):
            layers.append(module)
    for module in vae.decoder.modules():
        module.register_forward_hook(note)
    decode_rows(vae, latent_BCHW, Ranks(dist.group.WORLD), traffic)
    return traffic.num_exchanges, len(layers)


def test_a_layer_is_one_exchange():
    for num_exchanges, num_layers in run_ranks(exchanges, 2, latent("sd", 1, 6, 4)):
        assert num_exchanges == num_layers > 20


def groups_made(rank, world_size, latent_BCHW):
    """The arguments of each group that this rank takes part in making, for two decodes."""
    made, new_group, ranks = [], dist.new_group, Ranks(dist.group.WORLD)
    dist.new_group = lambda members, **options: made.append(
        (members, options.get("use_local_synchronization", False))) \
        or new_group(members, **options)
    for _ in range(2):
        decode_rows(tiny_vae("sd"), latent_BCHW, ranks)
    return made


def test_every_rank_takes_part_in_making_a_group_of_the_first_ones():
    """NCCL splits it off the communicator of all: without the others the first ones would wait for ever."""
    assert run_ranks(groups_made, 3, latent("sd", 1, 2, 2)) == [[([0, 1], False)]] * 3


def rows_held(rank, world_size, latent_BCHW):
    """The most rows of a tensor that any module gives out, as a share of the rows the picture has at that scale."""
    vae, shares = tiny_vae("sd"), []

    def note(module, inputs, output):
        if output.dim() == 4:
            shares.append(output.shape[-2] / (output.shape[-1] // latent_BCHW.shape[-1] * latent_BCHW.shape[-2]))

    for module in vae.decoder.modules():
        module.register_forward_hook(note)
    decode_rows(vae, latent_BCHW, Ranks(dist.group.WORLD))
    return max(shares)


def test_no_rank_holds_more_than_its_share_of_rows():
    assert max(run_ranks(rows_held, 3, latent("sd", 1, 8, 4))) == 3 / 8


# Refusals


def refusals(rank, world_size, latent_BCHW):
    def message_of(vae):
        try:
            decode_rows(vae, latent_BCHW, Ranks(dist.group.WORLD))
        except UnsupportedError as error:
            return str(error)

    def with_conv_in(**options):
        vae = tiny_vae("sd")
        vae.decoder.conv_in = torch.nn.Conv2d(4, 32, 3, dtype=torch.float64, **options)
        return vae

    tiled, split_attention, enlarged, padded = (tiny_vae("sd") for _ in range(4))
    tiled.enable_tiling()
    split_attention.set_attn_processor(AttnProcessor())
    enlarged.decoder.up_blocks[0].upsamplers[0] = torch.nn.Upsample(scale_factor=2, mode="bilinear")
    padded.decoder.conv_in = torch.nn.Sequential(torch.nn.ZeroPad2d(1), torch.nn.SiLU(),
                                                 torch.nn.Conv2d(4, 32, 3).double())
    functions = [getattr(F, name) for name in FUNCTIONS]
    messages = {
        "dilation": message_of(with_conv_in(padding=2, dilation=2)),
        "same": message_of(with_conv_in(padding="same")),
        "bilinear": message_of(enlarged),
        "tiling": message_of(tiled),
        "AttnProcessor": message_of(split_attention),
        "AutoencoderOobleck": message_of(
            AutoencoderOobleck(encoder_hidden_size=8, decoder_channels=8, decoder_input_channels=8)),
        "is not followed": message_of(padded),
    }
    return messages, functions == [getattr(F, name) for name in FUNCTIONS]


def test_rejects_what_cannot_be_split_and_leaves_torch_as_it_was():
    for messages, restored in run_ranks(refusals, 2, latent("sd", 1, 4, 4)):
        for word, message in messages.items():
            assert word in message
        assert restored
