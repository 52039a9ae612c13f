"""Decode and encode by tiles that ranks share are the VAE's own to the bit, and what is forecast of them is so."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tests.support.vae_zoo import minimax
from xdit_backend.comfyui.install_location import find_comfyui
from xdit_backend.distributed.spatial_ops import all_sums
from xdit_backend.parallel import vae_tiles
from xdit_backend.parallel.vae_memory import MARGIN, ActivationBytes
from xdit_backend.parallel.vae_rows import Ranks, SplitOptions, decode_rows, encode_rows
from xdit_backend.parallel.vae_tile_memory import TilePlanner, planner_of
from xdit_backend.parallel.vae_tiles import num_rounds, tile_order
from xdit_backend.protocol.errors import ConfigError

pytestmark = pytest.mark.skipif(find_comfyui() is None, reason="there is no ComfyUI; set XDIT_COMFYUI to its folder")

# shape of a latent, tiles: one alone, a picture, three pieces of a row each, a batch
LATENTS = {(1, 24, 2, 3, 4): 1, (1, 24, 1, 7, 6): 4, (1, 24, 12, 4, 6): 4, (2, 24, 3, 5, 1): 2}
# shape of a picture, and the same; 18 frames are two pieces
PICTURES = {(1, 3, 1, 96, 80): 4, (1, 3, 18, 32, 80): 4, (1, 3, 4, 64, 32): 1}


def given(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-2]))


@functools.cache
def own(shape):
    """What the VAE gives by itself."""
    vae = minimax()
    with torch.inference_mode():
        return vae.decode(given(shape)) if shape[1] == 24 else vae.encode(given(shape))


def transformed(vae, shape, ranks, options=None):
    options = options or SplitOptions()
    if shape[1] == 24:
        return decode_rows(vae, given(shape), ranks, options=options)
    return encode_rows(vae, given(shape), 16, ranks, options=options)


def by_tiles(rank, world_size, shapes, speeds=(), mutant=None):
    """[(the Share, how many tiles this rank computed)] of each shape."""
    vae, ranks, told = minimax(), Ranks(dist.group.WORLD), []
    if mutant == "not blended":
        vae.blend = lambda before, tile, extent, dim: tile
    if mutant == "another order":
        vae_tiles._send = two_by_two(vae_tiles._send)
    decode_pixels, encode_moments, computed = vae._decode_pixels, vae._encode_moments, []
    vae._decode_pixels = lambda tile: computed.append(tile) or decode_pixels(tile)
    vae._encode_moments = lambda tile: computed.append(tile) or encode_moments(tile)
    for shape in shapes:
        computed.clear()
        told.append((transformed(vae, shape, ranks, SplitOptions(speeds=speeds)), len(computed)))
    return told


def two_by_two(send):
    """The later one first."""
    cached = []

    def later(made, *to):
        cached.append(made)
        if len(cached) == 2:
            for one in (cached.pop(), cached.pop()):
                send(one, *to)
    return later


@pytest.mark.parametrize("world_size, speeds", [(1, ()), (2, ()), (3, ()), (2, (26, 100)), (3, (100, 40, 90))], ids=str)
def test_tiles_of_ranks_are_the_vaes_own_result_to_the_bit(world_size, speeds):
    sizes = LATENTS | PICTURES

    by_rank = run_ranks(by_tiles, world_size, list(sizes), speeds)

    for (shape, num_tiles), shares in zip(sizes.items(), zip(*by_rank)):
        shares, computed = zip(*shares)
        (whole,) = (share for share in shares if share is not None)
        assert whole.start == 0 and torch.equal(whole.tensor, own(shape)), shape
        assert shares.index(whole) == (speeds.index(max(speeds)) if speeds else 0)
        assert sum(computed) == num_tiles
        assert speeds or max(computed) - min(computed) <= 1


@pytest.mark.parametrize("mutant", ["not blended", "another order"])
def test_the_comparison_notices(mutant):
    shapes = [shape for shape, num_tiles in (LATENTS | PICTURES).items() if num_tiles == 4]
    (first, _) = run_ranks(by_tiles, 2, shapes, (), mutant)

    for shape, (share, _) in zip(shapes, first):
        assert (share.tensor - own(shape)).abs().max() > 1e-3, shape


def by_some(rank, world_size, shape):
    ranks, vae = Ranks(dist.group.WORLD), minimax()
    some = ranks.only(2, 1)
    return transformed(vae, shape, some) if some.is_member else None


def test_some_of_the_ranks_share_tiles():
    """Of three, those after the first."""
    shape = (1, 24, 1, 7, 6)
    none, first, second = run_ranks(by_some, 3, shape)

    assert none is None and second is None
    assert torch.equal(first.tensor, own(shape))


class GivenUp(Exception):
    pass


def give_up(rank, world_size, shape):
    """(rounds before it was given up, the next result). Rank 1 alone wants it, at the second round."""
    requested, ranks, vae = [], Ranks(dist.group.WORLD), minimax()

    def step(split):
        requested.append(split)
        if all_sums(torch.tensor(float(rank == 1 and len(requested) == 2)), split):
            raise GivenUp
    with pytest.raises(GivenUp):
        transformed(vae, shape, ranks, SplitOptions(on_convolution=step))
    return len(requested), transformed(vae, shape, ranks)


def test_all_ranks_leave_at_one_tile_and_the_next_result_is_right():
    shape = (1, 24, 1, 7, 6)
    (first_asked, share), (second_asked, _) = run_ranks(give_up, 2, shape)

    assert first_asked == second_asked == 2
    assert torch.equal(share.tensor, own(shape))


# Turns


def taken(num_tiles, speeds):
    ranks = [rank for rank, _ in itertools.islice(tile_order(speeds), num_tiles)]
    return [ranks.count(rank) for rank in range(len(speeds))]


def test_ranks_take_turns_by_their_speed():
    assert [rank for rank, _ in itertools.islice(tile_order((1, 1, 1)), 6)] == [0, 1, 2, 0, 1, 2]
    assert taken(27, (1, 2)) == [9, 18]
    assert taken(5, (1, 10)) == [0, 5]                         # the slow one would be done last
    assert [rank for rank, _ in itertools.islice(tile_order((1, 2)), 3)] == [1, 1, 0]


def test_ranks_are_asked_when_the_slowest_has_taken_its_turn():
    """Not before it, when all others would wait for it to begin."""
    assert [begins for _, begins in itertools.islice(tile_order((2, 1)), 7)] == [
        True, False, False, True, False, False, True]
    assert num_rounds(7, (2, 1)) == 3 and num_rounds(7, (1,)) == 7


# Memory


class OnDevice(ActivationBytes):
    """Without what ranks that do not blend have in the place of tiles."""

    def _count(self, tensor, args):
        if not tensor.is_meta:
            super()._count(tensor, args)


def measured(rank, world_size, shapes):
    vae, ranks, told = minimax(), Ranks(dist.group.WORLD), []
    for shape in shapes:
        with OnDevice() as footprint:
            transformed(vae, shape, ranks)
        told.append(footprint.peak_bytes)
    return told


def test_no_rank_needs_more_than_was_forecast():
    """A tile itself is forecast with room for what its operators take beside their results."""
    shapes = [(1, 24, 12, 4, 6), (1, 3, 18, 32, 80)]
    planner = planner_of(minimax())

    for shape, peaks in zip(shapes, zip(*run_ranks(measured, 2, shapes))):
        needed = planner.least_bytes(shape, 1 if shape[1] == 24 else 16, 2)
        assert max(peaks) == peaks[0] and 0.5 * needed < peaks[0] < needed, shape


def plan(rank, world_size, shape, free):
    try:
        return TilePlanner(minimax()).plan(shape, 1, Ranks(dist.group.WORLD), free[rank])
    except ConfigError as error:
        return str(error)


def test_every_rank_refuses_what_does_not_fit_on_one():
    shape = (1, 24, 12, 4, 6)
    needed = planner_of(minimax()).least_bytes(shape, 1, 2)

    assert run_ranks(plan, 2, shape, [2 ** 62, 2 * needed + 4]) == [(None, 2, ())] * 2     # the two share a machine
    first, second = run_ranks(plan, 2, shape, [2 ** 62, 2 * needed - 4])
    assert first == second and first.startswith("Use a smaller image or fewer frames: decoding a latent of 6 x 4 and "
                                                "12 frames needs 0.0 GB on each device")


def test_what_there_is_to_do_is_that_of_all_tiles():
    planner = planner_of(minimax())
    one, two = (planner.work((3, 24, 1, 4, columns), 1) for columns in (4, 7))

    assert two == {name: 2 * value for name, value in one.items()} and one["flops"] > 1e6
    assert [planner.num_working((3, 24, 1, 4, 7), 1, count) for count in (1, 2, 3)] == [1, 2, 2]
    assert planner.unblocked_bytes((3, 24, 1, 4, 7), 1, 2) == planner.least_bytes((1, 24, 1, 4, 7), 1, 2) > MARGIN
