"""Who works with whom: the groups of every axis, for layouts of up to 16 ranks."""

import datetime
import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from xdit_backend.distributed import mesh
from xdit_backend.distributed.mesh import AXES, backend_for, build_mesh, group_options, group_timeout, make_group
from xdit_backend.host import preflight, torchrun
from xdit_backend.protocol.errors import ConfigError, WorkerStartError
from xdit_backend.protocol.specs import Layout


@contextmanager
def pretended_world(rank, world_size):
    """torch.distributed as it is on one rank, without processes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def groups_of(layout, world_size):
    """{axis: set of groups}, from what every rank would build; no process is started."""
    groups = {name: set() for name in ("ring", "ulysses", "sequence", "tensor", "before", "after")}
    places = []
    for rank in range(world_size):
        with pretended_world(rank, world_size):
            mesh = build_mesh(layout, world_size)
            places.append(tuple(mesh.ranks[axis] for axis in AXES))
            for name in groups:
                group = getattr(mesh, f"{name}_group")
                groups[name].add(tuple(dist.get_process_group_ranks(group)) if group is not None else (rank,))
    return groups, places


def groups_made(monkeypatch, layout, world_size, rank=0):
    """Arguments of each dist.new_group that a rank calls for a layout."""
    made, new_group = [], dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append((tuple(ranks), options))
                        or new_group(ranks, **options))
    with pretended_world(rank, world_size):
        build_mesh(layout, world_size)
    return made


def test_groups_of_sixteen_ranks():
    """data 2, cfg 2, ring 2, ulysses 2: Ulysses ranks are neighbours, ring ranks are strided by the Ulysses degree."""
    groups, places = groups_of(Layout(cfg_degree=2, data_degree=2, ring_degree=2, ulysses_degree=2), 16)

    assert groups["ulysses"] == {(rank, rank + 1) for rank in range(0, 16, 2)}
    assert groups["ring"] == {(rank, rank + 2) for rank in range(16) if rank % 4 < 2}
    assert groups["sequence"] == {tuple(range(rank, rank + 4)) for rank in range(0, 16, 4)}
    assert places[5] == (0, 1, 0, 0, 0, 1, 0) and places[14] == (1, 1, 0, 0, 1, 0, 0)        # in the order of AXES


def test_tensor_ranks_are_neighbours():
    """Ring 2 x Ulysses 2 x tensor 2: an Ulysses group is contiguous in the sequence group's ranks,
    ring groups are strided."""
    groups, _ = groups_of(Layout(ring_degree=2, ulysses_degree=2, tensor_degree=2), 8)

    assert groups["tensor"] == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert groups["sequence"] == {(0, 2, 4, 6), (1, 3, 5, 7)}
    assert groups["ulysses"] == {(0, 2), (4, 6), (1, 3), (5, 7)} and groups["ring"] == {(0, 4), (2, 6), (1, 5), (3, 7)}


def test_stages_are_groups_of_equal_place_in_the_sequence():
    """The 16 ranks of xDiT's example, cfg 2, pipefusion 2, ulysses 2, data 2:
    a stage sends to the same shard of the next."""
    groups, _ = groups_of(Layout(cfg_degree=2, data_degree=2, pipefusion_degree=2, ulysses_degree=2), 16)

    assert groups["before"] == {*((rank, rank + 2) for rank in range(16) if rank % 4 < 2),
                                *((r,) for r in range(16) if r % 4 < 2)}
    assert groups["after"] == {*((rank, rank + 2) for rank in range(16) if rank % 4 < 2),
                               *((r,) for r in range(16) if r % 4 >= 2)}
    assert groups["sequence"] == {(rank, rank + 1) for rank in range(0, 16, 2)}


@pytest.mark.parametrize("degrees",
                         [(1, 1, 1, 3, 2), (2, 1, 1, 1, 4), (1, 2, 1, 4, 1), (3, 2, 1, 2, 1), (1, 1, 1, 1, 8),
                          (1, 2, 2, 1, 2), (2, 1, 3, 2, 1), (1, 2, 1, 2, 1, 3), (1, 2, 1, 2, 2, 1, 2)], ids=str)
def test_groups_partition_the_world_and_meet_in_one_rank(degrees):
    names = ("data_degree", "cfg_degree", "pipefusion_degree", "ring_degree", "ulysses_degree", "displaced_degree",
             "tensor_degree")
    world_size = math.prod(degrees)

    groups, places = groups_of(Layout(**dict(zip(names, degrees))), world_size)

    assert len(set(places)) == world_size
    for name, found in ((name, groups[name]) for name in ("ring", "ulysses", "sequence", "tensor")):
        assert sorted(rank for group in found for rank in group) == list(range(world_size)), name
    assert all(len(set(a) & set(b)) <= 1 for a in groups["ring"] for b in groups["ulysses"])


@pytest.mark.parametrize("layout, world_size, members", [
    (Layout(ulysses_degree=2), 2, []), (Layout(data_degree=4), 4, []), (Layout(pipefusion_degree=2), 2, [(0, 1)]),
    (Layout(cfg_degree=2, ulysses_degree=2), 4, [(0, 1), (2, 3)]),
    (Layout(ring_degree=2, ulysses_degree=2), 4, [(0, 2), (1, 3), (0, 1), (2, 3)])], ids=str)
def test_no_group_is_of_one_rank_or_made_twice(monkeypatch, layout, world_size, members):
    """With NCCL each is a communicator: 0.3 s, threads and memory of the device."""
    assert sorted(ranks for ranks, _ in groups_made(monkeypatch, layout, world_size)) == sorted(members)


def test_every_rank_makes_every_group_in_one_order(monkeypatch):
    """With NCCL a group splits the world's communicator, in which all ranks take part."""
    layout = Layout(cfg_degree=2, pipefusion_degree=2, ring_degree=2, ulysses_degree=2)

    orders = [[ranks for ranks, _ in groups_made(monkeypatch, layout, 16, rank)] for rank in (0, 7, 15)]

    assert orders[0] == orders[1] == orders[2] and len(orders[0]) == 8 + 8 + 4 + 8


@pytest.mark.parametrize("seconds, timeout_s", [("2400", 2400), (None, 1800), ("3", 60)])
def test_every_group_waits_as_long_as_a_stage_does(monkeypatch, seconds, timeout_s):
    """torch's own time-out for NCCL is ten minutes, for each group that is not told."""
    monkeypatch.delenv("XDIT_STAGE_TIMEOUT_S", raising=False)
    if seconds:
        monkeypatch.setenv("XDIT_STAGE_TIMEOUT_S", seconds)

    made = groups_made(monkeypatch, Layout(pipefusion_degree=2, ring_degree=2, ulysses_degree=2), 8)

    assert {options["timeout"] for _, options in made} == {datetime.timedelta(seconds=timeout_s)} and len(made) == 14


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_exchanges_over_nccl_come_first_on_a_full_device(monkeypatch):
    """Every group's; a receive posted ahead, which waits for long, may hold few thread blocks."""
    made, new_group = [], dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda ranks, pg_options, **others: made.append(pg_options)
                        or new_group(ranks, **others))
    monkeypatch.setattr(mesh, "can_split", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    with pretended_world(0, 8):
        monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
        build_mesh(Layout(pipefusion_degree=2, ring_degree=2, tensor_degree=2), 8)

    unlimited = dist.ProcessGroupNCCL.Options().config.max_ctas
    assert len(made) == 12 and all(options.is_high_priority_stream for options in made)
    assert [options.config.max_ctas for options in made] == [2] * 4 + [unlimited] * 8
    assert all(options._timeout == group_timeout() for options in (*made, group_options("nccl")))
    assert group_options("gloo") is None and group_options("nccl").is_high_priority_stream


def splits_made(monkeypatch, layout, world_size, rank):
    """What a rank of a group over NCCL asks of torch and of its device for a layout, in order."""
    requested = []

    def split_group(split_ranks, timeout, pg_options):
        requested.append(split_ranks)
        return dist.new_group(next(ranks for ranks in split_ranks if rank in ranks))
    with pretended_world(rank, world_size), monkeypatch.context() as patched:
        patched.setattr(mesh, "group_options", lambda *_: None)
        patched.setattr(torch.cuda, "synchronize", lambda device=None: requested.append("synchronize"))
        patched.setattr(torch, "__version__", "2.11.0+cu130")
        patched.setattr(dist, "get_backend", lambda group=None: "nccl")
        patched.setattr(dist, "split_group", split_group)
        made = build_mesh(layout, world_size)
    return requested, made


def test_the_groups_of_an_axis_are_one_split_of_a_communicator_that_is_idle(monkeypatch):
    """ncclCommSplit requires the latter. Every rank is in one group of each split: torch names groups by their number
    on a rank."""
    layout = Layout(pipefusion_degree=2, ring_degree=2, ulysses_degree=2)
    requested = [splits_made(monkeypatch, layout, 8, rank)[0] for rank in range(8)]
    pipeline, _ = splits_made(monkeypatch, Layout(pipefusion_degree=4), 4, 0)

    assert requested == [requested[0]] * 8
    assert requested[0][::2] == ["synchronize"] * 4
    assert requested[0][1::2] == [[[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 2], [1, 3], [4, 6], [5, 7]],
                              [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert pipeline == ["synchronize", [[0, 1], [2, 3]], "synchronize", [[1, 2], [0, 3]]]


def test_a_stage_in_the_middle_has_a_group_with_either_neighbour(monkeypatch):
    found = [splits_made(monkeypatch, Layout(pipefusion_degree=4), 4, rank)[1] for rank in range(4)]

    assert [one.before_group is None for one in found] == [True, False, False, False]
    assert [one.after_group is None for one in found] == [False, False, False, True]


@pytest.mark.parametrize("version, is_split", [("2.6.0+cu124", False), ("2.10.1", False), ("2.11.0+cu130", True),
                                               ("2.14.1", True)])
def test_groups_are_split_together_where_torch_names_them_apart(monkeypatch, version, is_split):
    """Earlier releases give disjoint groups one name, and with it one part of the store."""
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")

    assert mesh.can_split() == is_split


def test_a_rank_in_none_of_the_groups_has_none():
    with pretended_world(3, 4):
        assert make_group([[0, 1]]) is None and dist.get_process_group_ranks(make_group([[0, 1], [2, 3]])) == [2, 3]


@pytest.mark.parametrize("devices, has_nccl, backend", [
    (("cuda:0", "cuda:1"), True, "nccl"), (("cuda:0", "cuda:1"), False, "gloo"), (("cuda:0", "cuda:0"), True, "gloo"),
    (("cuda:1",), True, "gloo"), (("cpu", "cpu"), True, "gloo"), (("cpu",), True, "gloo")])
def test_nccl_joins_cuda_devices_apart_where_torch_has_it(devices, has_nccl, backend):
    assert backend_for(devices, has_nccl) == backend


@pytest.mark.parametrize("devices, backend", [
    (("cuda:0", "cuda:0"), "nccl"), (("cuda:0", "cuda:0", "cuda:1"), "nccl"), (("cuda:0", "cuda:1"), "nccl"),
    (("cuda:0",), "gloo"), (("cpu", "cpu"), "gloo"), (("cuda:0", "cpu", "cuda:0"), "gloo"),
    (("cuda:0", "cuda:0", "other-pc/cuda:0"), "gloo")])
def test_a_switch_has_nccl_join_ranks_that_share_a_gpu(monkeypatch, devices, backend):
    """The worker, the host's attempts without peer-to-peer copies, and the environment follow it."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setenv("LD_PRELOAD", "libnccl.so.2")
    for value in ("1", "0"):
        monkeypatch.setenv("XDIT_NCCL_ON_ONE_GPU", value)
        usual = "gloo" if len(set(devices)) < len(devices) else backend
        expected, environment = backend if value == "1" else usual, torchrun.environment_of(devices)
        is_shared = expected == "nccl" and len(set(devices)) < len(devices)
        assert backend_for(devices, True) == expected and backend_for(devices, False) == "gloo"
        assert len(preflight.fallbacks(devices, {})) == (3 if expected == "nccl" else 1)
        assert (environment.get("NCCL_MULTI_RANK_GPU_ENABLE"), environment.get("LD_PRELOAD")) == (
            ("1", "libnccl.so.2") if is_shared else (None, None))
        if usual == "gloo" and expected == "gloo" and devices[0] == "cuda:0" and len(devices) > 1:
            with pytest.raises(WorkerStartError, match="which workers on"):
                backend_for(devices, True, "nccl")


@pytest.mark.parametrize("devices, requested, usable", [
    (("cpu", "cpu"), "gloo", True), (("cuda:0", "cuda:1"), "shared_memory", True), (("cpu", "cpu"), "nccl", False),
    (("cpu", "other-pc/cpu"), "shared_memory", False), (("cpu",), "shared_memory", False),
    (("cpu", "cpu"), "mpi", False)])
def test_a_transport_that_is_requested_is_used_or_rejected(devices, requested, usable):
    if usable:
        assert backend_for(devices, True, requested) == requested
        return
    with pytest.raises(WorkerStartError, match=f'^Remove the environment variable XDIT_TRANSPORT, or set it to one of '
                                               f'gloo.*: it is "{requested}", which workers on {", ".join(devices)}'):
        backend_for(devices, True, requested)


def test_a_layout_for_another_number_of_ranks_is_refused_and_a_new_world_takes_it():
    with pretended_world(0, 4):
        build_mesh(Layout(ulysses_degree=4), 4)
        with pytest.raises(ConfigError, match=r"^Use degrees .* is 4, .* \(ring 2\) is for 2 workers, and this group"):
            build_mesh(Layout(ring_degree=2), 4)
    with pretended_world(1, 2):
        assert build_mesh(Layout(ring_degree=2), 2).ranks["ring"] == 1


def sums(rank, world_size):
    """Two layouts one after the other in one process; each adds up inside its own groups only."""
    results = []
    for layout in (Layout(ulysses_degree=2, ring_degree=2), Layout(cfg_degree=2, ulysses_degree=2),
                   Layout(ring_degree=4)):
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
