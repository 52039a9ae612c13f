"""Who works with whom: the groups of every axis, for layouts of up to 16 ranks."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from xdit_backend.parallel.mesh import AXES, build_mesh
from xdit_backend.protocol.messages import Layout


def groups_of(layout, world_size):
    """{axis: set of groups}, from what every rank would build; no process is started."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    groups = {"pipefusion": set(), "ring": set(), "ulysses": set(), "sequence": set()}
    places = []
    for rank in range(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            mesh = build_mesh(layout, world_size)
            places.append(tuple(mesh.ranks[axis] for axis in AXES))
            for name in groups:
                group = getattr(mesh, f"{name}_group")
                groups[name].add(tuple(dist.get_process_group_ranks(group)) if group is not None else (rank,))
        finally:
            dist.destroy_process_group()
    return groups, places


def test_groups_of_sixteen_ranks():
    """data 2, cfg 2, ring 2, ulysses 2: Ulysses ranks are neighbours, ring ranks are strided by the Ulysses degree."""
    groups, places = groups_of(Layout(cfg_degree=2, data_degree=2, ring_degree=2, ulysses_degree=2), 16)

    assert groups["ulysses"] == {(rank, rank + 1) for rank in range(0, 16, 2)}
    assert groups["ring"] == {(rank, rank + 2) for rank in range(16) if rank % 4 < 2}
    assert groups["sequence"] == {tuple(range(rank, rank + 4)) for rank in range(0, 16, 4)}
    assert places[5] == (0, 1, 0, 0, 1) and places[14] == (1, 1, 0, 1, 0)          # (data, cfg, pipefusion, ring, ulysses)


def test_stages_are_groups_of_equal_place_in_the_sequence():
    """The 16 ranks of xDiT's example, cfg 2, pipefusion 2, ulysses 2, data 2: a stage sends to the same shard of the next."""
    groups, _ = groups_of(Layout(cfg_degree=2, data_degree=2, pipefusion_degree=2, ulysses_degree=2), 16)

    assert groups["pipefusion"] == {(rank, rank + 2) for rank in range(16) if rank % 4 < 2}
    assert groups["sequence"] == {(rank, rank + 1) for rank in range(0, 16, 2)}


@pytest.mark.parametrize("degrees", [(1, 1, 1, 3, 2), (2, 1, 1, 1, 4), (1, 2, 1, 4, 1), (3, 2, 1, 2, 1), (1, 1, 1, 1, 8),
                                     (1, 2, 2, 1, 2), (2, 1, 3, 2, 1)], ids=str)
def test_groups_partition_the_world_and_meet_in_one_rank(degrees):
    names = ("data_degree", "cfg_degree", "pipefusion_degree", "ring_degree", "ulysses_degree")
    world_size = math.prod(degrees)

    groups, places = groups_of(Layout(**dict(zip(names, degrees))), world_size)

    assert len(set(places)) == world_size
    for name, found in groups.items():
        assert sorted(rank for group in found for rank in group) == list(range(world_size)), name
    assert all(len(set(a) & set(b)) <= 1 for a in groups["ring"] for b in groups["ulysses"])


def sums(rank, world_size):
    """Two layouts one after the other in one process; each adds up inside its own groups only."""
    results = []
    for layout in (Layout(ulysses_degree=2, ring_degree=2), Layout(cfg_degree=2, ulysses_degree=2), Layout(ring_degree=4)):
        mesh = build_mesh(layout, world_size)
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=mesh.ulysses_group or mesh.ring_group)
        results.append((total.item(), mesh.sequence_rank))
    return results


def test_layouts_follow_one_another_in_one_process():
    results = run_ranks(sums, 4)

    assert [result[0] for result in results] == [(1.0, 0), (1.0, 1), (5.0, 2), (5.0, 3)]
    assert [result[1] for result in results] == [(1.0, 0), (1.0, 1), (5.0, 0), (5.0, 1)]
    assert [result[2] for result in results] == [(6.0, 0), (6.0, 1), (6.0, 2), (6.0, 3)]
