"""The engine on every rank of every mixture of methods: predictions equal the oracle,
and each rank does its part only."""

import functools
import gc
import itertools
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.support.model_zoo import example
from tests.support.pipefusion_oracle import StaleModel
from tests.support.ranks import run_cases, run_ranks
from tests.support.tolerances import unrounded, within
from xdit_backend.checkpoints.build_vae import load_autoencoder
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.parallel.pipefusion import Link
from xdit_backend.partition import cut_patches
from xdit_backend.planner.planner import choose_num_patches
from xdit_backend.protocol import messages, specs
from xdit_backend.protocol.shared_memory import SegmentStore, map_segment
from xdit_backend.protocol.specs import Layout, Stages
from xdit_backend.tools.bench.vae import random_decoder
from xdit_backend.worker.command_loop import PREFETCHED, prefetch_ahead
from xdit_backend.worker.engine import Engine
from xdit_backend.worker.predictions import _own_images

AXES = ("data", "cfg", "pipefusion", "ring", "ulysses")
NUM_PATCHES, NUM_STEPS = 3, 2
TIMES = (900.0, 700.0, 500.0)


def execute(rank, world_size, commands):
    """Carry out commands on this rank as the worker's loop does; returns its measurements."""
    engine = Engine(rank, torch.device("cpu"), lambda *phase: None)
    torch.set_grad_enabled(False)
    with unrounded(commands[0].spec.tensor_degree):
        for index, command in enumerate(commands):
            prefetch_ahead(engine, commands[index:index + PREFETCHED])
            numbers = engine.execute(command)
    for link in engine.links:
        link.drain()
        assert link.num_posted == link.num_received
    return numbers | {"sent": sum(link.num_sent for link in engine.links),
                      "received": sum(link.num_received for link in engine.links)}


@pytest.fixture
def store():
    store = SegmentStore()
    yield store
    store.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd3")
    example("SD3").model.save_pretrained(folder / "transformer")
    return folder


def branches_of_three_images():
    return [example("SD3", rows=12, columns=6, batch=3), example("SD3", rows=12, columns=6, batch=3, num_text_tokens=9)]


def pieces(shape, num_patches):
    """Of each prediction: (its step, its patch and the rows of that; None and None: it is of the whole latent)."""
    yield 0, None, None
    for step in range(1, 1 + NUM_STEPS):
        for patch, rows in cut_patches(shape, (2, 2), num_patches):
            yield step, patch, rows


def time_of(step):
    return torch.full((3,), TIMES[step], dtype=torch.float64)


def with_no_room_for_one(rank, world_size, commands):
    """As execute, where there is no room for the second message of a prediction when its receive is posted ahead."""
    post, requested = Link.post_receive, []

    def failing(link, *arguments):
        requested.append(arguments)
        if len(requested) == 4:
            raise torch.OutOfMemoryError("no room")
        return post(link, *arguments)
    Link.post_receive = failing
    return execute(rank, world_size, commands) | {"requested": len(requested)}


@functools.cache
def oracle(num_patches, tensor_degree):
    """What each prediction of each branch is to be, whatever the layout."""
    branches = branches_of_three_images()
    with torch.no_grad(), unrounded(tensor_degree):
        start, models, wanted = [one.latent.clone() for one in branches], [StaleModel(one) for one in branches], []
        for step, patch, rows in pieces(start[0].shape, num_patches):
            for latent, model in zip(start, models):
                want = model.predict(latent + step, time_of(step),
                                     None if patch is None else (patch.start, patch.start + rows))
                wanted.append(want if patch is None else want.narrow(2, patch.start, rows))
        return wanted


def play(store, folder, layout, stages, speeds=(), execute=execute):
    """A warm-up step and two stale steps of two branches with three images, on all ranks:
    [(predictions, oracle's)], measurements."""
    commands, made, wanted = requested(store, folder, layout, stages, speeds)
    numbers = run_ranks(execute, world_size_of(layout), commands)
    return outcome(made, wanted), numbers


def outcome(made, wanted):
    return [(map_segment(segment), want) for segment, want in zip(made, wanted, strict=True)]


def world_size_of(layout):
    return math.prod(getattr(layout, f"{axis}_degree") for axis in (*AXES, "tensor"))


def requested(store, folder, layout, stages, speeds=()):
    """The commands of play, the segments that predictions come to be in, and what they are to be."""
    header = open_checkpoint(folder)
    spec = header.spec("float64", "float64", stages, layout.tensor_degree)
    branches, request, made = branches_of_three_images(), itertools.count(1), []
    commands = [messages.LoadModel(next(request), spec)]
    for index, one in enumerate(branches):
        tensors = {name: store.share(tensor) for name, tensor in one.conditioning.items()}
        commands.append(messages.Conditioning(next(request), f"branch {index}", tensors))
    shape = branches[0].latent.shape
    num_patches = choose_num_patches(NUM_PATCHES, 1, shape, (2, 2), layout.ring_degree * layout.ulysses_degree)
    for step, patch, rows in pieces(shape, num_patches):
        named = []
        for index, one in enumerate(branches):
            piece = one.latent + step if patch is None else (one.latent + step).narrow(2, patch.start, rows)
            prediction, _ = store.create(tuple(piece.shape), torch.float64)
            made.append(prediction)
            named.append(specs.Branch(store.share(piece.contiguous()), store.share(time_of(step)), f"branch {index}",
                                      prediction))
        commands.append(messages.Predict(next(request), spec.name, layout, named, patch, keep=True, speeds=speeds))
    commands.append(messages.ReportMemory(next(request)))
    return commands, made, oracle(num_patches, layout.tensor_degree)


UNLIKE = [(Layout(pipefusion_degree=2, ulysses_degree=2), (100, 30, 60, 40)),
          (Layout(data_degree=2, ring_degree=2), (100, 25, 20, 10)),
          (Layout(data_degree=2, pipefusion_degree=2), (10, 100, 10, 10)),
          (Layout(cfg_degree=2, ulysses_degree=2), (9, 1, 1, 9))]


def mixtures(world_size):
    """Every layout of this many ranks that the tiny model (4 heads, 4 blocks) can run."""
    for degrees in itertools.product((1, 2, 4), repeat=len(AXES)):
        sizes = dict(zip(AXES, degrees))
        if math.prod(degrees) == world_size and sizes["cfg"] < 4 and sizes["data"] < 4:
            yield Layout(**{f"{axis}_degree": size for axis, size in sizes.items()})


def stages_of(layout):
    return Stages(layout.pipefusion_degree, layout.stage_ranks)


def name_of(layout):
    return "-".join(f"{axis}{getattr(layout, f'{axis}_degree')}" for axis in (*AXES, "tensor")
                    if getattr(layout, f"{axis}_degree") > 1)


QUICK = [Layout(cfg_degree=2, pipefusion_degree=2), Layout(data_degree=2, pipefusion_degree=2),
         Layout(cfg_degree=2, pipefusion_degree=2, ulysses_degree=2),
         Layout(data_degree=2, pipefusion_degree=2, ring_degree=2),
         Layout(cfg_degree=2, data_degree=2, pipefusion_degree=2), Layout(cfg_degree=2, pipefusion_degree=4)]


TENSOR = [Layout(cfg_degree=2, tensor_degree=2), Layout(cfg_degree=2, pipefusion_degree=2, tensor_degree=2),
          Layout(pipefusion_degree=2, ring_degree=2, tensor_degree=2),
          Layout(cfg_degree=2, ulysses_degree=2, tensor_degree=2)]


@pytest.mark.parametrize("batch, speeds, expected", [
    (3, (), [(0, 2), (2, 1)]), (3, (10, 20), [(0, 1), (1, 2)]), (3, (100, 1), [(0, 3), (3, 0)]),
    (8, (10, 30, 40), [(0, 1), (1, 3), (4, 4)])])
def test_images_are_shared_out_by_speed(batch, speeds, expected):
    degree = len(expected)
    ranks = [SimpleNamespace(degrees={"data": degree}, ranks={"data": rank}, data_speeds=speeds)
             for rank in range(degree)]

    assert [_own_images(batch, mesh) for mesh in ranks] == expected


@pytest.mark.parametrize("layout, speeds",
                         [UNLIKE[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in UNLIKE[1:])], ids=str)
def test_mixtures_of_unlike_devices_equal_the_oracle(store, folder, layout, speeds):
    """Images, tokens, heads and blocks by speed; data ranks with one image of three, with two, and with none."""
    results, _ = play(store, folder, layout, replace(stages_of(layout), speeds=speeds), speeds)

    within(max((got - want).abs().max() for got, want in results), 1e-12)


@pytest.mark.parametrize("layout",
                         [*QUICK[:3], *(pytest.param(layout, marks=pytest.mark.slow) for layout in QUICK[3:] + TENSOR)],
                         ids=name_of)
def test_mixtures_equal_the_oracle(store, folder, layout):
    results, _ = play(store, folder, layout, stages_of(layout))

    within(max((got - want).abs().max() for got, want in results), 1e-12)


@pytest.mark.slow
def test_every_mixture_of_eight_ranks_equals_the_oracle(store, folder):
    """One after the other on the same ranks."""
    plays = {name_of(layout): requested(store, folder, layout, stages_of(layout))
             for layout in mixtures(8) if layout not in QUICK}
    ended = run_cases(execute, 8, [(commands,) for commands, _, _ in plays.values()])

    for (name, (_, made, wanted)), numbers in zip(plays.items(), ended, strict=True):
        if isinstance(numbers, Exception):
            raise numbers
        within(max((got - want).abs().max() for got, want in outcome(made, wanted)), 1e-12, name)


def test_every_stage_receives_each_part_once_and_the_last_sends_nothing(store, folder):
    """1 + 2 x 3 commands of two branches are 14 messages into every stage but the first,
    and out of every one but the last."""
    _, numbers = play(store, folder, Layout(pipefusion_degree=3), Stages(3))

    assert [(rank["received"], rank["sent"]) for rank in numbers] == [(0, 14), (14, 14), (14, 0)]


def test_a_receive_that_found_no_room_ahead_is_posted_again_alone(store, folder):
    """One that was posted for a message before it takes that message:
    with another beside it, all later ones would be a message behind."""
    results, numbers = play(store, folder, Layout(pipefusion_degree=2), Stages(2, 1), execute=with_no_room_for_one)

    within(max((got - want).abs().max() for got, want in results), 1e-12)
    assert numbers[1]["requested"] == numbers[1]["received"] + 1 == numbers[0]["sent"] + 1


def load_and_drop(rank, world_size, spec):
    """How many of a model's weights are still there once it has been dropped, and how many there were."""
    gc.disable()
    engine = Engine(rank, torch.device("cpu"), lambda *phase: None)
    engine.execute(messages.LoadModel(1, spec))
    weights = [weakref.ref(weight) for weight in engine._models[spec.name].transformer.model.parameters()]
    engine.execute(messages.DropModel(2, spec.name))
    return sum(weight() is not None for weight in weights), len(weights)


def test_a_dropped_model_is_gone_at_once(folder):
    """Its memory is another's from then on; Python's own collection may come much later."""
    header = open_checkpoint(folder)
    spec = header.spec("float64", "float64")
    (left, count), = run_ranks(load_and_drop, 1, spec)

    assert count > 50 and left == 0


def unused(rank, world_size, machines):
    """Bytes that this rank may use of the 100 that are free on its machine."""
    engine = Engine(rank, torch.device("cpu"), lambda *phase: None, machines=machines)
    with mock.patch("xdit_backend.worker.predictions.free_bytes", lambda device: 100):
        return engine._predictions.unused_bytes


@pytest.mark.parametrize("machines, expected", [((), [33] * 3), (("", "", "other"), [50, 50, 100])])
def test_cpu_workers_share_the_memory_of_their_own_machine(machines, expected):
    assert run_ranks(unused, 3, machines) == expected


def load_in_stages(rank, world_size, spec, kinds, flops_s):
    """Which blocks a stage has on cards of these kinds, of which each makes so much of a matrix multiplication."""
    replaced = {"kind_of": lambda device: kinds[rank], "matrix_flops_s": lambda device, dtype: flops_s[rank]}
    with mock.patch.multiple("xdit_backend.worker.models", **replaced):
        engine = Engine(rank, torch.device("cpu"), lambda *phase: None)
        engine.execute(messages.LoadModel(1, spec))
    return len(engine._models[spec.name].blocks)


@pytest.mark.parametrize("kinds, speeds, expected", [
    ([(128, 8, 9), (144, 9, 0)], (), [1, 3]), ([(128, 8, 9), (128, 8, 9)], (), [2, 2]),
    ([(128, 8, 9), (144, 9, 0)], (30, 10), [3, 1])], ids=["unlike", "identical", "measured before"])
def test_stages_of_unlike_gpus_that_nobody_has_measured_are_balanced_by_what_they_multiply(folder, kinds, speeds,
                                                                                            expected):
    """A newer card with a few more processors may be three times as fast."""
    spec = open_checkpoint(folder).spec("float64", "float64", Stages(2, speeds=speeds))

    assert run_ranks(load_in_stages, 2, spec, kinds, (1e14, 3e14)) == expected


class AskedOf(set):
    """Requests that nobody waits for, from the third time on that one is asked about."""

    num_asked = 0

    def __contains__(self, request):
        self.num_asked += 1
        return self.num_asked > 2 and super().__contains__(request)


def give_up_loading(rank, world_size, spec):
    """Rank 0 gives a load up, rank 1 finishes it; then both drop the model and load it again."""
    aborted = AskedOf({1} if rank == 0 else ())
    engine = Engine(rank, torch.device("cpu"), lambda *phase: None, aborted)
    numbers = engine.execute(messages.LoadModel(1, spec))
    requested, is_there = aborted.num_asked, spec.name in engine._models
    engine.execute(messages.DropModel(2, spec.name))
    return requested, is_there, numbers, engine.execute(messages.LoadModel(3, spec))


def test_a_load_that_is_given_up_ends_with_the_tensor_at_hand(folder):
    """Also in stages, whose ranks have agreed on their blocks first."""
    header = open_checkpoint(folder)
    spec = header.spec("float64", "float64", Stages(2))
    (requested, is_there, numbers, again), (others, is_elsewhere, told, _) = run_ranks(give_up_loading, 2, spec)

    assert (requested, is_there, numbers) == (3, False, None) and again["weight_bytes"] > 0
    assert others > 20 and is_elsewhere and told["weight_bytes"] > 0


def give_up_decoding(rank, world_size, weights, latent, images):
    """One rank is told that nobody waits for a decode; then all decode again."""
    aborted, said = AskedOf({2} if rank == min(1, world_size - 1) else ()), []
    engine = Engine(rank, torch.device("cpu"), lambda *phase: said.append(phase), aborted)
    engine.execute(messages.LoadAutoencoder(1, specs.AutoencoderSpec("vae", "float64", weights)))
    given_up = engine.execute(messages.Decode(2, "vae", latent, images[0]))
    # who has no rows says nothing
    requested, (_, done, total) = aborted.num_asked, said[-1] if said else ("", 0, 1)
    return requested, done < total / 2, given_up, engine.execute(messages.Decode(3, "vae", latent, images[1]))[
        "busy_s"] > 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_decode_that_is_given_up_ends_on_all_ranks_at_once(store, world_size):
    """Also on one that was not told, or has no rows, as the third here; the next decode is right."""
    weights, latent = random_decoder(32), torch.randn(1, 4, 2, 2, dtype=torch.float64,
                                                      generator=torch.Generator().manual_seed(0))
    images = [store.create((1, 16, 16, 3), torch.float32)[0] for _ in range(2)]
    told = run_ranks(give_up_decoding, world_size, store.share_all(weights), store.share(latent), images)

    assert told[:2] == [(3, True, None, True)] * min(2, world_size)
    with torch.no_grad():
        wanted = load_autoencoder(weights, torch.float64, torch.device("cpu"), {}).decode(latent).sample
    within((map_segment(images[1]) - wanted.add(1).div(2).clamp(0, 1).movedim(1, -1)).abs().max(), 1e-6)


def test_a_rank_holds_its_share_of_weights_and_keys(store, folder):
    """Within 5 % of: its blocks and what is outside the blocks; 2 B (S + S_t) h for each of its blocks and branch."""
    from xdit_backend.checkpoints.weight_table import block_sizes
    model = example("SD3").model
    sizes = [size for size, _ in block_sizes(model, open_checkpoint(folder).family)]
    outside = sum(t.numel() for t in (*model.parameters(), *model.buffers())) - sum(sizes)

    _, numbers = play(store, folder, Layout(pipefusion_degree=2), Stages(2, num_blocks=(1, 3)))

    for rank, blocks in enumerate((range(0, 1), range(1, 4))):
        weights = 8 * (outside + sum(sizes[blocks.start:blocks.stop]))
        keys = sum(8 * 2 * 3 * (18 + text) * 32 for text in (7, 9) for _ in blocks)
        dual = 2 * 8 * 2 * 3 * 18 * 32 if rank == 0 else 0     # block 0 has a second attention, over the image only
        assert numbers[rank]["weight_bytes"] == pytest.approx(weights, rel=0.05)
        assert numbers[rank]["key_value_bytes"] == pytest.approx(keys + dual, rel=0.05)


def test_a_tensor_rank_holds_its_share_of_weights_and_keys(store, folder):
    """Of its stage's linears and heads the half; what is outside the blocks, whole."""
    model, stages = example("SD3").model, Stages(2, 2, num_blocks=(1, 3))
    whole = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    split = [sum(t.numel() for module in block.modules() if isinstance(module, torch.nn.Linear)
                 for t in module.parameters())
             for block in model.transformer_blocks]
    blocks = [sum(t.numel() for t in block.parameters()) for block in model.transformer_blocks]

    _, numbers = play(store, folder, Layout(pipefusion_degree=2, tensor_degree=2), stages)

    for rank, own in enumerate((range(0, 1), range(0, 1), range(1, 4), range(1, 4))):
        others = sum(blocks[block] for block in range(4) if block not in own)
        keys = sum(8 * 2 * 3 * (18 + text) * 16 for text in (7, 9) for _ in own)
        dual = 2 * 8 * 2 * 3 * 18 * 16 if 0 in own else 0
        assert numbers[rank]["weight_bytes"] == pytest.approx(
            8 * (whole - others - sum(split[block] for block in own) / 2), rel=0.05)
        assert numbers[rank]["key_value_bytes"] == pytest.approx(keys + dual, rel=0.05)


def exchanges_begun(rank, world_size, commands):
    """Of each command: whether it failed, and how many exchanges this rank had begun."""
    engine, begun = Engine(rank, torch.device("cpu"), lambda *phase: None), []
    for command in commands:
        try:
            engine.execute(command)
            begun.append((False, engine.traffic.num_exchanges))
        except Exception:
            begun.append((True, engine.traffic.num_exchanges))
    return begun


def no_room_for_the_second(rank, world_size, commands):
    """As exchanges_begun, where there is never room for the second message of a prediction."""
    post, posted = Link.post_receive, []

    def failing(link, *arguments):
        if posted:
            raise torch.OutOfMemoryError("no room")
        posted.append(post(link, *arguments))
        return posted[-1]
    Link.post_receive = failing
    return exchanges_begun(rank, world_size, commands)


def test_a_receive_that_was_posted_counts_when_another_found_no_room(store, folder):
    """What it waits for may still come: CUDA devices cannot go on with that."""
    header, one = open_checkpoint(folder), example("SD3", rows=8, columns=6)
    spec = header.spec("float64", "float64", Stages(2))
    text = {key: store.share(each) for key, each in one.conditioning.items()}
    latent, time = store.share(one.latent), store.share(one.timestep)
    places = [store.create(tuple(one.latent.shape), torch.float64)[0] for _ in range(2)]
    commands = [messages.LoadModel(1, spec), messages.Conditioning(2, "text", text), messages.Predict(
        3, spec.name, Layout(pipefusion_degree=2), [specs.Branch(latent, time, "text", place) for place in places])]

    assert run_ranks(no_room_for_the_second, 2, commands)[1][2] == (True, 1)


def test_a_rank_knows_what_it_has_begun_with_others_when_it_fails(store, folder):
    """What all ranks refuse before their first exchange leaves nothing in flight between CUDA devices."""
    header, one = open_checkpoint(folder), example("SD3", rows=8, columns=6)
    spec = header.spec("float64", "float64")
    prediction, _ = store.create(tuple(one.latent.shape), torch.float64)
    wrong = store.share(torch.zeros(1, 4, 8, 7, dtype=torch.float64))
    conditioning = {name: store.share(tensor) for name, tensor in one.conditioning.items()}
    commands = [messages.LoadModel(1, spec), messages.Conditioning(2, "whole", conditioning),
                messages.Conditioning(3, "no y", {"context": conditioning["context"]})]
    for request, (name, place) in enumerate([("no y", prediction), ("whole", prediction), ("whole", wrong)], 4):
        branch = specs.Branch(store.share(one.latent), store.share(one.timestep), name, place)
        commands.append(messages.Predict(request, spec.name, Layout(ulysses_degree=2), [branch]))

    refused, done, too_late = (list(each) for each in list(zip(*run_ranks(exchanges_begun, 2, commands)))[3:])

    assert refused == [(True, 0)] * 2
    assert [failed for failed, _ in done] == [False, False] and done[0][1] == done[1][1] > 0
    # rank 0 writes the prediction, which has another shape
    assert too_late == [(True, done[0][1]), (False, done[0][1])]
