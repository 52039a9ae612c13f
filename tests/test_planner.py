"""The automatic choice, and how tokens are shared out."""

import pytest

from xdit_backend.config import ParallelConfig
from xdit_backend.planner import check_shards, choose_layout, shard_sizes, shard_start
from xdit_backend.protocol.errors import ConfigError
from xdit_backend.protocol.messages import Layout


@pytest.mark.parametrize("num_devices, num_branches, num_heads, expected", [
    (1, 1, 24, Layout()),
    (1, 2, 24, Layout()),
    (2, 2, 24, Layout(cfg_degree=2)),
    (2, 1, 24, Layout(ulysses_degree=2)),
    (2, 1, 7, Layout(ring_degree=2)),
    (3, 2, 24, Layout(ulysses_degree=3)),
    (4, 2, 24, Layout(cfg_degree=2, ulysses_degree=2)),
    (4, 1, 6, Layout(ulysses_degree=2, ring_degree=2)),
    (8, 2, 38, Layout(cfg_degree=2, ulysses_degree=2, ring_degree=2)),
    (5, 1, 24, Layout(ring_degree=5))], ids=str)
def test_auto_prefers_cfg_then_ulysses_then_ring(num_devices, num_branches, num_heads, expected):
    assert choose_layout(ParallelConfig(), num_devices, num_branches, num_heads, "this model") == expected


def test_manual_takes_the_degrees_given():
    config = ParallelConfig(mode="manual", ring_degree=2)

    assert choose_layout(config, 2, 2, 24, "this model") == Layout(ring_degree=2)


def test_manual_refuses_degrees_that_do_not_fit_the_model():
    with pytest.raises(ConfigError, match="ulysses_degree=2 does not divide this model's 7 attention heads"):
        choose_layout(ParallelConfig(mode="manual", ulysses_degree=2), 2, 1, 7, "this model")


@pytest.mark.parametrize("num_tokens", range(0, 40))
@pytest.mark.parametrize("num_shards", range(1, 9))
def test_shards_cover_all_tokens_once(num_tokens, num_shards):
    sizes = shard_sizes(num_tokens, num_shards)

    assert sum(sizes) == num_tokens and max(sizes) - min(sizes) <= 1
    assert [shard_start(num_tokens, num_shards, index) for index in range(num_shards)] == \
        [sum(sizes[:index]) for index in range(num_shards)]


def test_fewer_tokens_than_shards_are_refused():
    check_shards(4, 4)
    with pytest.raises(ConfigError, match="has 3 tokens, too few for ulysses_degree x ring_degree = 4"):
        check_shards(3, 4)
