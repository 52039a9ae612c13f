"""The plan of an upscaling: tiles cover every image with the overlap that ComfyUI blends, and each has the rank that
finishes it first."""

import itertools

import pytest

from xdit_backend.host.upscale_tiles import Tile, assign_tiles, tiles_of

SIZES = [1, 7, 8, 9, 15, 16, 17, 20, 21, 22, 40, 83]
SPEEDS = [(1,), (1, 1), (1, 1, 1), (3, 1), (1, 3), (5, 2, 1), (1,) * 8]


def starts_by_definition(size, tile, overlap):
    """Where tiles of one dim begin: each `tile - overlap` pixels, until the next one would have no pixel beyond the
    overlap. One tile if all fits in it."""
    starts, start = [0], tile - overlap
    while size > tile and start + overlap < size:
        starts.append(start)
        start += tile - overlap
    return starts


@pytest.mark.parametrize("tile, overlap", [(8, 2), (8, 0), (16, 5)])
def test_tiles_are_those_of_the_definition(tile, overlap):
    for rows, columns in itertools.product(SIZES, SIZES):
        want = [Tile(image, top, left, min(tile, rows - top), min(tile, columns - left)) for image in range(2)
                for top in starts_by_definition(rows, tile, overlap)
                for left in starts_by_definition(columns, tile, overlap)]

        assert tiles_of(2, rows, columns, tile, overlap) == want


@pytest.mark.parametrize("size", SIZES)
def test_tiles_cover_every_pixel_and_neighbours_share_the_overlap(size):
    tiles = tiles_of(1, size, 5, tile=8, overlap=3)
    spans = [set(range(tile.top, tile.top + tile.rows)) for tile in tiles]

    assert set().union(*spans) == set(range(size))
    assert all(len(one & other) == 3 for one, other in itertools.pairwise(spans))


def test_no_pixels_have_no_tiles():
    assert tiles_of(0, 5, 5) == tiles_of(2, 0, 5) == tiles_of(2, 5, 0) == []


def slowest_s(tiles, ranks, speeds):
    return max(sum(tile.rows * tile.columns for tile, other in zip(tiles, ranks) if other == rank) / speed
               for rank, speed in enumerate(speeds))


@pytest.mark.parametrize("speeds", SPEEDS, ids=str)
def test_ranks_are_nearly_as_fast_as_the_best_assignment(speeds):
    """List scheduling (Graham 1969): at most one tile more than a perfectly even split."""
    for tiles in (tiles_of(5, 20, 20, 8, 2), tiles_of(3, 7, 5, 8, 2), tiles_of(1, 83, 40, 16, 5)):
        ranks = assign_tiles(tiles, speeds)
        pixels = [tile.rows * tile.columns for tile in tiles]

        assert len(ranks) == len(tiles) and set(ranks) <= set(range(len(speeds)))
        assert slowest_s(tiles, ranks, speeds) <= sum(pixels) / sum(speeds) + max(pixels) / min(speeds)


def test_small_assignments_are_the_best_ones():
    """Against every assignment to two ranks: at most 4/3 of the best. Graham's bound for two machines is 3/2."""
    tiles = tiles_of(2, 20, 12, 8, 2)
    best = min(slowest_s(tiles, ranks, (1, 1)) for ranks in itertools.product((0, 1), repeat=len(tiles)))

    assert slowest_s(tiles, assign_tiles(tiles, (1, 1)), (1, 1)) <= 4 / 3 * best


def test_a_faster_rank_gets_more_and_the_first_tile():
    ranks = assign_tiles(tiles_of(8, 4, 4), (1, 3))

    assert ranks[0] == 1 and ranks.count(1) == 6


def test_one_tile_is_on_the_fastest_rank():
    assert assign_tiles(tiles_of(1, 4, 4), (1, 2, 2)) == [1]
