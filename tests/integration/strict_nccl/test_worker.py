"""What a worker does between and beside steps, under the simulation."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.support.model_zoo import example
from tests.support.ranks import run_ranks
from tests.support.strict_nccl.alternating import CASES, Alternating
from tests.support.strict_nccl.client import StrictNcclError
from tests.support.strict_nccl.referee import QUEUES
from tests.support.strict_nccl.server import strict_world
from tests.support.tolerances import within
from tests.unit.parallel import test_stage_communication, test_vae_rows
from tests.unit.worker import test_device_probe, test_engine
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.distributed.mesh import make_group
from xdit_backend.partition import cut_patches
from xdit_backend.protocol import messages, specs
from xdit_backend.protocol.shared_memory import SegmentStore, map_segment
from xdit_backend.protocol.specs import Layout, Stages
from xdit_backend.worker import command_loop


@pytest.fixture
def store():
    store = SegmentStore()
    yield store
    store.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd3")
    example("SD3").model.save_pretrained(folder / "transformer")
    return folder


@pytest.fixture
def world(tmp_path, queues):
    with strict_world(tmp_path, queues) as world:
        yield world
        assert not world.failures and world.num_operations > 0


def groups_while_busy(rank, world_size, waits):
    """Groups are made while the world's communicator has an operation under way."""
    if not waits:
        torch.cuda.synchronize = lambda device=None: None
    work = dist.all_reduce(torch.ones(1), async_op=True)
    group = make_group([[0], [1, 2]])
    work.wait()
    return dist.get_process_group_ranks(group), make_group([[2]]) is not None


def test_groups_are_split_off_an_idle_communicator(tmp_path):
    with strict_world(tmp_path, "communicator") as world:
        assert world.run_ranks(groups_while_busy, 3, True) == [([0], False), ([1, 2], False), ([1, 2], True)]
        with pytest.raises(StrictNcclError, match=r"^SPLIT: rank \d splits the communicator of the world at "
                                                  r"xdit_backend/distributed/mesh.py:(.|\n)*all_reduce of world"):
            world.run_ranks(groups_while_busy, 3, False)


@pytest.mark.parametrize("queues", ["communicator"])
def test_a_send_does_not_wait_for_the_next_stage(world):
    assert world.run_ranks(test_stage_communication.send_long_before, 2) == [None, 1_000_000]


@pytest.mark.slow
@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_messages_pass_all_stages(world, world_size):
    results = world.run_ranks(test_stage_communication.pass_on, world_size, [5, 1, 400, 7, 3])

    assert [values for values, *_ in results] == [[index * 10 + rank for index in range(5)]
                                                  for rank in range(world_size)]


def another_layout(store, folder):
    """A step in which all ranks are a ring, with patches of stages queued before and behind it."""
    request, one = itertools.count(1), example("SD3", rows=12, columns=6)
    spec = open_checkpoint(folder).spec("float64", "float64", Stages(2, every_block=True), 1)
    commands = [messages.LoadModel(next(request), spec), messages.Conditioning(next(request), "a", {
        key: store.share(value) for key, value in one.conditioning.items()})]
    steps = [(Layout(pipefusion_degree=2), None, 0)]
    for layout in (Layout(ring_degree=2), Layout(pipefusion_degree=2)) * 2:
        steps += [(layout, patch, rows) for patch, rows in (
            [(None, 0)] if layout.ring_degree > 1 else cut_patches(one.latent.shape, (2, 2), 3))]
    for layout, patch, rows in steps:
        latent = one.latent if patch is None else one.latent.narrow(2, patch.start, rows)
        branch = specs.Branch(store.share(latent.contiguous()), store.share(one.timestep), "a",
                              store.create(tuple(latent.shape), torch.float64)[0])
        commands.append(messages.Predict(next(request), spec.name, layout, [branch], patch, keep=True))
    return [*commands, messages.ReportMemory(next(request))]


@pytest.mark.parametrize("queues", QUEUES)
def test_receives_that_are_posted_ahead_stop_at_a_step_of_all_ranks(world, store, folder):
    world.run_ranks(test_engine.execute, 2, another_layout(store, folder))


def without_a_stop(rank, world_size, commands):
    """As test_engine.execute, with receives posted past steps of another layout."""
    def ahead(engine, upcoming):
        for command in upcoming:
            if not engine.prefetch(command):
                break
    test_engine.prefetch_ahead = command_loop.prefetch_ahead = ahead
    return test_engine.execute(rank, world_size, commands)


def test_receives_that_are_posted_past_a_step_of_all_ranks_are_a_deadlock(tmp_path, store, folder):
    with strict_world(tmp_path, "rank") as world:
        with pytest.raises(StrictNcclError, match="^DEADLOCK"):
            world.run_ranks(without_a_stop, 2, another_layout(store, folder))


MIXTURES = [*test_engine.QUICK, *test_engine.TENSOR]


@pytest.mark.parametrize("layout, queues", [
    pytest.param(layout, queues, id=f"{test_engine.name_of(layout)}-{queues}",
                 marks=[] if (layout, queues) == (MIXTURES[0], "rank") else [pytest.mark.slow])
    for layout in MIXTURES for queues in QUEUES])
def test_mixtures_equal_the_oracle(world, monkeypatch, store, folder, layout):
    monkeypatch.setattr(test_engine, "run_ranks", world.run_ranks)
    results, _ = test_engine.play(store, folder, layout, test_engine.stages_of(layout))

    within(max((got - want).abs().max() for got, want in results), 1e-12)


@pytest.mark.slow
@pytest.mark.everyone
@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("kind", test_vae_rows.KINDS)
def test_decodes_by_rows_equal_decodes(world, monkeypatch, kind):
    monkeypatch.setattr(test_vae_rows, "run_ranks", world.run_ranks)

    test_vae_rows.test_decode_by_rows_equals_decode(kind, 3)


@pytest.mark.slow
@pytest.mark.parametrize("queues", QUEUES)
def test_workers_measure_their_links(world):
    numbers = [result[0] for result in world.run_ranks(test_device_probe.measured, 4, 2)]

    assert {"hop 2 small_s", "hop 4 large_s", "beside_both_s"} <= numbers[0].keys()


def degrees_of(layout):
    return "-".join(f"{name.removesuffix('_degree')}{degree}" for name, degree in vars(layout).items() if degree > 1)


@pytest.mark.parametrize("case, queues", [
    pytest.param(case, queues, id=f"{case[0]}-{degrees_of(case[1])}-{queues}",
                 marks=[] if (case, queues) == (CASES[0], "communicator") else [pytest.mark.slow])
    for case in CASES for queues in QUEUES])
def test_commands_in_turn_give_what_they_give_over_gloo(world, store, folder, case):
    strict, plain = (Alternating(store, folder, *case) for _ in range(2))
    world.run_ranks(test_engine.execute, strict.world_size, strict.commands)
    run_ranks(test_engine.execute, plain.world_size, plain.commands)

    within(max((map_segment(got) - map_segment(want)).abs().max() for got, want in zip(strict.made, plain.made)), 1e-6)
