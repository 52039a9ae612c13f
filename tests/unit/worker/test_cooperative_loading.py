"""Which ranks bring weights together, and in which commands. What they then predict:
tests/integration/test_offloaded_bits.py and tests/unit/host/test_shared_copies.py."""

import types

import pytest

from xdit_backend.protocol.specs import Stages
from xdit_backend.worker.cooperative_loading import can_cooperate, is_identical

AXES = "data", "cfg"


def spec(stages=None, tensor_degree=1):
    return types.SimpleNamespace(stages=stages, tensor_degree=tensor_degree)


@pytest.mark.parametrize("world_size, of, expected", [
    (2, spec(), True), (4, spec(Stages(2, 2)), True), (1, spec(), False), (2, spec(Stages(2)), False),
    (2, spec(tensor_degree=2), False), (4, spec(tensor_degree=2), False),
    (4, spec(Stages(2, 2, every_block=True)), False)])
def test_ranks_share_what_they_both_hold_and_run(world_size, of, expected):
    assert can_cooperate(of, world_size) is expected


def branch(conditioning, images=2, **operations):
    return types.SimpleNamespace(latent=types.SimpleNamespace(shape=(images, 4, 8, 8)), conditioning=conditioning,
                                 operations=operations)


def mesh(speeds=(), **degrees):
    return types.SimpleNamespace(degrees=dict.fromkeys(AXES, 1) | degrees, data_speeds=speeds)


BOTH = [branch("a"), branch("b")]


@pytest.mark.parametrize("branches, of, by_image, expected", [
    (BOTH, mesh(), False, True), (BOTH, mesh(cfg=2), False, True), (BOTH, mesh(data=2), False, True),
    (BOTH[:1], mesh(cfg=2), False, False),                     # a rank has no branch
    ([branch("a", 1)], mesh(data=2), False, False),            # a rank has no image
    (BOTH, mesh(data=2, speeds=(99, 1)), False, False),
    (BOTH, mesh(), True, False),                               # images go one after the other, some ranks have fewer
    ([BOTH[0], branch("a")], mesh(), False, False),            # of one conditioning, one after the other
    ([BOTH[0], branch("b", block="skip")], mesh(cfg=2), False, False)])
def test_ranks_share_where_each_runs_all_blocks_as_often(branches, of, by_image, expected):
    command = types.SimpleNamespace(branches=branches, by_image=by_image)
    assert is_identical(command, of) is expected
