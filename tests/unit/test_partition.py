"""Who has which part: shards, stages and patches cover the whole once, and evenly."""

from dataclasses import replace

import pytest

from xdit_backend.partition import (
    check_shards,
    cut_patches,
    last_stage_ranks,
    ranks_by_part,
    shard_sizes,
    shard_start,
    split_stages,
    stage_of,
)
from xdit_backend.planner.planner import choose_num_patches
from xdit_backend.protocol.errors import ConfigError
from xdit_backend.protocol.specs import Layout, ModelSpec, Patch, Stages


@pytest.mark.parametrize("num_tokens", range(0, 40))
@pytest.mark.parametrize("num_shards", range(1, 9))
def test_shards_cover_all_tokens_once(num_tokens, num_shards):
    sizes = shard_sizes(num_tokens, num_shards)

    assert sum(sizes) == num_tokens and max(sizes) - min(sizes) <= 1
    assert [shard_start(num_tokens, num_shards, index) for index in range(num_shards)] == \
        [sum(sizes[:index]) for index in range(num_shards)]


@pytest.mark.parametrize("num_tokens", [1, 3, 17, 1024])
@pytest.mark.parametrize("speeds", [(100, 100), (100, 26), (26, 100, 50), (1, 100, 1, 1), (7, 7, 7, 3)], ids=str)
def test_shards_by_speed_take_as_long_as_each_other(num_tokens, speeds):
    """No way to share them out is done sooner: with one token more on any other,
    the slowest now would not be the slowest."""
    sizes, some = (shard_sizes(num_tokens, len(speeds), speeds, least) for least in (0, 1))

    assert sum(sizes) == sum(some) == num_tokens and min(sizes) >= 0 and (min(some) > 0 or num_tokens < len(speeds))
    slowest = max(size / speed for size, speed in zip(sizes, speeds))
    assert all((size + 1) / speed >= slowest for size, speed in zip(sizes, speeds))
    assert [shard_start(num_tokens, len(speeds), index, speeds) for index in range(len(speeds))] == \
        [sum(sizes[:index]) for index in range(len(speeds))]
    assert shard_sizes(num_tokens, 3, (5, 5, 5)) == shard_sizes(num_tokens, 3)


def test_fewer_tokens_than_shards_are_refused():
    check_shards(4, 4)
    with pytest.raises(ConfigError, match="has 3 tokens, too few for ulysses_degree x ring_degree = 4"):
        check_shards(3, 4)


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("num_blocks", [*range(1, 13), 28, 57])
def test_stages_of_equal_blocks_are_contiguous_full_and_even(num_blocks, num_stages):
    if num_stages > num_blocks:
        with pytest.raises(ConfigError, match=f"more than the model's {num_blocks} blocks"):
            split_stages([1] * num_blocks, num_stages)
        return
    counts = split_stages([1] * num_blocks, num_stages)

    assert len(counts) == num_stages and sum(counts) == num_blocks
    assert min(counts) >= 1 and max(counts) - min(counts) <= 1


def test_stages_are_balanced_by_cost():
    """FLUX.1: 19 double blocks, of which an image token meets 170 M parameters each, and 38 single ones of 142 M."""
    costs = [170] * 19 + [142] * 38

    assert split_stages(costs, 2) == [27, 30]
    assert split_stages([3, 1, 1, 1], 2) == [1, 3]
    assert split_stages([1] * 9, 2, speeds=[2, 1]) == [6, 3]


def test_stages_respect_what_a_device_can_hold():
    """A split that is slower but fits; where none fits, the fastest,
    since the device says so itself when it is loaded."""
    sizes = [340] * 19 + [142] * 38

    assert split_stages([170] * 19 + [142] * 38, 2, sizes=sizes, limits=[6200, 6200]) == [18, 39]
    assert split_stages([1] * 4, 2, sizes=[10] * 4, limits=[5, 5]) == [2, 2]
    # nothing fits: what lacks least, though its stages take unlike long
    assert split_stages([1] * 4, 2, sizes=[30, 10, 10, 10], limits=[25, 25]) == [1, 3]
    assert split_stages([1] * 4, 2, sizes=[10] * 4, limits=[30, 9]) == [3, 1]


@pytest.mark.parametrize("shape, patch_size",
                         [((1, 16, 80, 64), (2, 2)), ((2, 4, 15, 9), (2, 2)), ((1, 16, 1, 12, 8), (1, 2, 2)),
                          ((1, 16, 21, 12, 8), (1, 2, 2))], ids=str)
@pytest.mark.parametrize("requested", range(1, 12))
def test_patches_tile_the_latent_in_whole_token_rows(shape, patch_size, requested):
    patches = cut_patches(shape, patch_size, choose_num_patches(requested, 2, shape, patch_size))
    dim = patches[0][0].dim
    unit = patch_size[dim - 2]

    assert dim == (3 if len(shape) == 5 and shape[2] == 1 else 2)          # frames, where there are several
    assert [patch.start for patch, _ in patches] == [sum(rows for _, rows in patches[:index])
                                                     for index in range(len(patches))]
    assert sum(rows for _, rows in patches) == shape[dim] == patches[0][0].whole
    assert all(patch.start % unit == 0 and rows > 0 for patch, rows in patches)
    assert max(rows for _, rows in patches) - min(rows for _, rows in patches) < 2 * unit


def test_the_last_patch_may_be_smaller():
    assert cut_patches((1, 4, 15, 8), (2, 2), 3) == [(Patch(2, 0, 15), 6), (Patch(2, 6, 15), 6), (Patch(2, 12, 15), 3)]


def test_ranks_of_stages():
    """PipeFusion 2 x Ulysses 2 x CFG 2: a stage's ranks are neighbours, and the last stages answer."""
    layout, stages = Layout(cfg_degree=2, pipefusion_degree=2, ulysses_degree=2), Stages(2, 2)

    assert [stage_of(rank, stages) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert last_stage_ranks(layout, 8) == [2, 3, 6, 7]
    assert last_stage_ranks(Layout(pipefusion_degree=2, ulysses_degree=2, tensor_degree=2), 8) == [4, 5, 6, 7]


def test_ranks_that_hold_the_same_weights():
    """PipeFusion 2 x Ulysses 2 x tensor 2: of a stage, the tensor ranks have parts of their own."""
    spec = ModelSpec("model", "SD3", "file", "float32", "float32", Stages(2, 4), tensor_degree=2)

    assert ranks_by_part(8, spec) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert ranks_by_part(8, replace(spec, stages=Stages(2, 4, every_block=True))) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert ranks_by_part(4, replace(spec, stages=None, tensor_degree=1)) == [[0, 1, 2, 3]]
