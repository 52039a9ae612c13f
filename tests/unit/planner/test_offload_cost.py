"""Which blocks come from host memory: within the budget, evenly, and as fast as the best choice there is."""

import itertools
import math
from dataclasses import replace

import pytest

from tests.unit.tools.dry_run.rows import published, spec_of
from xdit_backend.checkpoints.model_dims import dims_of
from xdit_backend.config import ParallelConfig
from xdit_backend.planner.cost_model import Degrees, Device, Job, Links, ModelDims
from xdit_backend.planner.descriptions import describe_weights
from xdit_backend.planner.layout_search import Machine, estimate
from xdit_backend.planner.memory_model import DEFAULT_SETTINGS, Memory, memory_budget
from xdit_backend.planner.offload_cost import NUM_BUFFERS, num_buffers, offloaded_memory, plan_offload, step_seconds
from xdit_backend.planner.planner import EVERYWHERE, Devices, WeightPlacement, choose_placement, plan_run, usual_job
from xdit_backend.protocol.specs import Stages
from xdit_backend.tools.bench.size import parse_layout
from xdit_backend.tools.dry_run.simulated_rank import outline, table_of

MS_10 = dict.fromkeys(range(40), 10.0)


def resident_bytes(plan, sizes, extra_bytes):
    """What the device holds, counted anew."""
    stays = sum(size for block, size in sizes.items() if block not in plan.blocks)
    largest = max((sizes[block] for block in plan.blocks), default=0)
    return extra_bytes + stays + num_buffers(len(plan.blocks)) * largest


def placement(count, blocks=40):
    return tuple((2 * number + 1) * blocks // (2 * count) for number in range(count))


@pytest.mark.parametrize("sizes", [[7] * 12, [20] * 4 + [5] * 12, [3, 9, 4, 8, 5, 7, 6, 6], [1, 50, 1, 50, 1, 50]])
def test_weights_keep_to_the_budget_wherever_some_choice_does(sizes):
    """Of small models, every choice is looked at: where one fits, the plan does, and where none does, it has least."""
    sizes = dict(enumerate(sizes))
    choices = [chosen for count in range(len(sizes) + 1) for chosen in itertools.combinations(sizes, count)]
    least = min(resident_bytes(plan_offload(sizes, sizes, 10, 0), sizes, 10), 10 + sum(sizes.values()))

    for budget in range(10, 12 + sum(sizes.values()), 3):
        plan = plan_offload(sizes, sizes, 10, budget)
        assert plan.device_bytes == resident_bytes(plan, sizes, 10)
        assert plan.device_bytes + plan.offloaded_bytes - plan.buffer_bytes == 10 + sum(sizes.values())
        assert plan.device_bytes <= budget or (plan.device_bytes == least and budget < least)
    of_choices = [10 + sum(sizes.values()) - sum(sizes[block] for block in chosen)
                  + num_buffers(len(chosen)) * max((sizes[block] for block in chosen), default=0)
                  for chosen in choices]
    assert least == min(of_choices)


def test_nothing_comes_where_all_fits_and_no_more_than_is_needed():
    sizes = dict(enumerate([7] * 12))

    assert plan_offload(sizes, sizes, 10, 94).blocks == ()
    # of three, one would stay in the second buffer
    assert plan_offload(sizes, sizes, 10, 93).blocks == plan_offload(sizes, sizes, 10, 87).blocks == (0, 6)
    assert [plan_offload(sizes, sizes, 10, budget).offloaded_bytes for budget in (93, 87, 86, 80)] == [14, 14, 28, 28]
    assert len(plan_offload(sizes, sizes, 10, 60).blocks) == NUM_BUFFERS + 5
    assert plan_offload({}, {}, 10, 0).device_bytes == 10


def test_blocks_of_one_kind_are_spread_evenly():
    sizes = dict(enumerate([7] * 40))
    for budget in range(30, 290, 10):
        blocks = plan_offload(sizes, sizes, 10, budget).blocks
        gaps = [second - first for first, second in itertools.pairwise((*blocks, blocks[0] + 40))]
        assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("a_copy, count, took_ms, took_at_the_end_ms, bound_ms", [
    (16, 20, 414, 518, 400), (19, 20, 416, 583, 400), (30, 20, 619, 815, 600), (8, 35, 465, 429, 400),
    (20, 35, 725, 755, 700)])
def test_a_step_takes_what_threads_took(a_copy, count, took_ms, took_at_the_end_ms, bound_ms):
    """Of 40 blocks of 10 ms, so many come in a_copy ms each: spread evenly, and the last ones. Measured with a thread
    for the copies, whose blocks and copies slept."""
    copies = dict.fromkeys(range(40), float(a_copy))

    evenly, at_the_end = (step_seconds(MS_10, copies, blocks) for blocks in (placement(count),
                                                                             tuple(range(40 - count, 40))))

    assert bound_ms <= evenly <= took_ms < 1.15 * evenly
    assert bound_ms <= at_the_end <= took_at_the_end_ms < 1.1 * at_the_end
    assert step_seconds(MS_10, copies, ()) == 400
    # one buffer: each copy waits for the block before, and each block for its copy
    assert step_seconds(MS_10, copies, tuple(range(40)), 1) == pytest.approx(40 * (10 + a_copy))


@pytest.mark.parametrize("a_copy", [0.4, 0.8, 1.0, 1.5, 4.0])
@pytest.mark.parametrize("sizes", [[4] * 10, [8] * 3 + [4] * 7], ids=["one kind", "two kinds"])
def test_no_other_choice_of_blocks_is_much_faster(sizes, a_copy):
    """Every choice that keeps to the budget is walked through, for links of all speeds."""
    sizes = dict(enumerate(map(float, sizes)))
    copies = {block: size * a_copy for block, size in sizes.items()}
    for share in (0.5, 0.8):
        budget = share * sum(sizes.values()) + 5
        plan = plan_offload(sizes, sizes, 5, budget)
        best = min(step_seconds(sizes, copies, chosen) for count in range(NUM_BUFFERS + 1, len(sizes) + 1)
                   for chosen in itertools.combinations(sizes, count)
                   if 5 + sum(sizes.values()) - sum(sizes[block] for block in chosen)
                   + NUM_BUFFERS * max(sizes[block] for block in chosen) <= budget)

        assert step_seconds(sizes, copies, plan.blocks) <= 1.15 * best


NET = ModelDims(57, 3072, 24, 12.0, 11.9e9, weight_bytes=23.8e9, outside_bytes=0.4e9)              # as Flux.1 in bf16
JOB = Job(4096, 512, 20)
CARD = Device(33e12, 28e12, 288e9, memory_bytes=16e9, host_bytes_s=12.4e9)                    # a 4060 Ti, at PCIe 4 x8
LINKS = Links({(name, 2): 6e9 for name in ("all_to_all", "hop", "all_reduce", "gather")})
COMING = replace(DEFAULT_SETTINGS, weights_memory=math.inf)


@pytest.mark.parametrize("free_bytes", [8e9, 12e9, 16e9, 24e9])
def test_forecasts_count_what_a_plan_of_blocks_would_hold(free_bytes):
    """To a block, of blocks that are alike."""
    needed = Memory(NET.weight_bytes, 0.5e9, 1e9)
    a_block = (NET.weight_bytes - NET.outside_bytes) / NET.blocks
    sizes = dict.fromkeys(range(NET.blocks), int(a_block))

    plan = plan_offload(sizes, sizes, int(NET.outside_bytes), free_bytes - 1.5e9)
    memory = offloaded_memory(NET, needed, free_bytes, math.inf)

    assert memory.total <= free_bytes
    little = offloaded_memory(NET, needed, NET.weight_bytes + 1.5e9 - a_block / 2, math.inf)
    assert little.streamed == NUM_BUFFERS * a_block and len(plan_offload(
        sizes, sizes, int(NET.outside_bytes), NET.weight_bytes - a_block / 2).blocks) == NUM_BUFFERS
    assert abs(memory.streamed - plan.offloaded_bytes) <= a_block and abs(memory.weights - plan.device_bytes) <= a_block
    assert offloaded_memory(NET, needed, NET.outside_bytes + 1.5e9, math.inf) is None
    assert offloaded_memory(NET, needed, 40e9, math.inf) == needed
    assert offloaded_memory(NET, needed, 40e9, 10e9).weights == 10e9


def test_a_step_takes_as_long_as_computing_or_as_its_weights_come():
    """On one card that is too small; beside it one that is not."""
    large = estimate(NET, JOB, Degrees(), Machine((replace(CARD, memory_bytes=48e9),), Links()), COMING)
    for host_bytes_s in (0.0, 24e9, 6e9, 1e9):
        made = estimate(NET, JOB, Degrees(), Machine((replace(CARD, host_bytes_s=host_bytes_s),), Links()), COMING)
        assert made.fits == (host_bytes_s > 0)
        if made.fits:
            assert made.memory.total <= memory_budget(CARD.memory_bytes) and made.memory.streamed > 8e9
            assert made.streaming_s == made.memory.streamed / host_bytes_s
            assert made.seconds == pytest.approx(max(large.seconds, JOB.steps * made.streaming_s))
            assert (made.limited_by == "weights") == (host_bytes_s == 1e9)
        alone = replace(CARD, host_bytes_s=host_bytes_s, host_alone_bytes_s=20e9)
        both = [estimate(NET, JOB, degrees, Machine((alone,) * 2, Links(dict.fromkeys(LINKS.rates, 2e9))), COMING)
                for degrees in (Degrees(), Degrees(ulysses=2))] if host_bytes_s else []
        # a card that copies alone, and two at once
        assert [one.memory.streamed / one.streaming_s for one in both] == pytest.approx([20e9,
                                                                                         host_bytes_s][:len(both)])
    assert large.memory.streamed == large.streaming_s == 0
    assert not estimate(NET, JOB, Degrees(), Machine((CARD,), Links())).fits


@pytest.mark.parametrize("num_stages", [1, 2])
def test_weights_come_into_whatever_room_has_two_blocks(num_stages):
    """Sums of numbers that are no whole ones are not compared with each other."""
    least = NET.outside_bytes + NUM_BUFFERS * num_stages * (NET.weight_bytes - NET.outside_bytes) / NET.blocks
    for number in range(500):
        beside = number * 1234567.891
        needed = Memory(NET.weight_bytes, beside / 3, beside * 2 / 3)
        held = offloaded_memory(NET, needed, least + beside + 10 * number + 1, math.inf, num_stages)
        assert held.streamed > 0 and held.total <= least + beside + 10 * number + 2
        assert offloaded_memory(NET, needed, least + beside - 1, math.inf, num_stages) is None


def test_auto_weighs_weights_that_come_with_spreading_them():
    """A picture of 24 GB of weights on two cards of 16 GB: over a fast link from the host, exact methods with weights
    that come are as fast as stages; over a slow one stages hold all."""
    for host_bytes_s, expected in ((40e9, True), (1e9, False), (0.0, False)):
        machine = Machine((replace(CARD, host_bytes_s=host_bytes_s),) * 2, Links(dict.fromkeys(LINKS.rates, 6e10)))
        devices = Devices([CARD.memory_bytes] * 2, 0, machine)
        placement = choose_placement(ParallelConfig(), NET, devices)
        assert (placement == EVERYWHERE) == expected, placement
        config = ParallelConfig(weights_memory="all on the device")
        assert choose_placement(config, NET, devices) != EVERYWHERE
    large = replace(NET, weight_bytes=80e9)
    assert choose_placement(ParallelConfig(), large, Devices([16e9] * 2), has_own_memory=True) == EVERYWHERE
    assert choose_placement(ParallelConfig(), large, Devices([16e9] * 2)) != EVERYWHERE
    assert choose_placement(ParallelConfig(weights_memory="9"), NET, Devices([16e9] * 2)) == EVERYWHERE


HALF_TOO_LARGE = replace(NET, weight_bytes=48e9)               # stages and shards of 24 GB, on cards of 16


@pytest.mark.parametrize("host_bytes_s, link_bytes_s, can_split, expected", [
    (6e9, 6e9, True, {"tensor": 2}), (25e9, 6e9, True, {"ring": 2}),
    (1e9, 1e9, False, {"pipefusion": 2, "num_patches": 1}), (6e9, 1e9, True, {"pipefusion": 2, "num_patches": 1}),
    (25e9, 1e9, True, {"pipefusion": 2, "num_patches": 2}), (25e9, 6e9, False, {"ring": 2})], ids=str)
def test_auto_weighs_stages_and_shards_that_are_too_large_as_well(host_bytes_s, link_bytes_s, can_split, expected):
    """No card has room for its half. Over a slow way from the host a half comes sooner than all, of stages once for one
    patch; over a fast one stages are busy with a patch each; over a fast link between the cards exact methods win."""
    machine = Machine((replace(CARD, host_bytes_s=host_bytes_s),) * 2, Links(dict.fromkeys(LINKS.rates, link_bytes_s)))
    placement = choose_placement(ParallelConfig(), HALF_TOO_LARGE, Devices([CARD.memory_bytes] * 2, 0, machine),
                           lambda degree: can_split)
    chosen = plan_run(ParallelConfig(), machine, HALF_TOO_LARGE, JOB, *placement).chosen
    stages = [estimate(HALF_TOO_LARGE, JOB, Degrees(pipefusion=2, num_patches=count), machine, COMING)
              for count in (1, 2, 4)]

    assert chosen.degrees == Degrees(**expected) and chosen.fits and chosen.memory.streamed > 0
    assert chosen.memory.total <= memory_budget(CARD.memory_bytes)
    # a stage's weights come once for each patch, and of one patch no keys and values are kept
    assert stages[0].memory.keys_values == 0 < stages[1].memory.keys_values
    assert [round(one.streaming_s * host_bytes_s / one.memory.streamed) for one in stages] == [1, 2, 4]
    assert stages[1].seconds <= stages[2].seconds
    requested = plan_run(ParallelConfig(num_patches=4), machine, HALF_TOO_LARGE, JOB, Stages(2)).chosen
    assert requested.degrees.num_patches == 4
    assert not estimate(HALF_TOO_LARGE, JOB, Degrees(pipefusion=2), machine).fits


@pytest.mark.parametrize("host_bytes_s, link_bytes_s, of_one, of_both", [
    (12e9, 1e9, WeightPlacement(Stages(2)), EVERYWHERE), (12e9, 8e9, WeightPlacement(None, 2), EVERYWHERE),
    (3e9, 2e9, WeightPlacement(None, 2), WeightPlacement(Stages(2)))], ids=str)
def test_weights_are_spread_for_runs_with_and_without_guidance(host_bytes_s, link_bytes_s, of_one, of_both):
    """Two branches need no link between two cards: what is best for one is not best for the two usual runs."""
    machine = Machine((replace(CARD, host_bytes_s=host_bytes_s),) * 2, Links(dict.fromkeys(LINKS.rates, link_bytes_s)))
    devices = Devices([CARD.memory_bytes] * 2, 0, machine)

    assert choose_placement(ParallelConfig(), HALF_TOO_LARGE, devices, branches=(1,)) == of_one
    assert choose_placement(ParallelConfig(), HALF_TOO_LARGE, devices) == of_both


@pytest.mark.parametrize("name, memory_bytes", [
    ("hunyuanvideo-1.5", 12e9), *(pytest.param(*row, marks=pytest.mark.slow) for row in (
        ("hunyuanvideo-1.5", 16e9), ("wan2.1-14b-480p", 16e9), ("wan2.1-14b-480p", 24e9)))])
def test_auto_spreads_models_of_videos_by_a_usual_video(name, memory_bytes):
    """Two stages hold the weights of a picture's run, but no video's keys and values; both branches with weights that
    come do."""
    checkpoint, _ = published(name, None)
    spec = spec_of(checkpoint, parse_layout("one"))
    dims = dims_of(checkpoint.family, outline(checkpoint, spec)[0], table_of(checkpoint, spec))
    machine = Machine((Device(7e13, 7e13, 9e11, memory_bytes=memory_bytes, host_bytes_s=12e9),) * 2,
                      Links(dict.fromkeys(LINKS.rates, 6e9)))

    def fits(dims):
        placement = choose_placement(ParallelConfig(), dims, Devices([memory_bytes] * 2, 0, machine))
        return plan_run(ParallelConfig(), machine, dims, usual_job(dims, 2), *placement).chosen.fits
    assert dims.usual_tokens == 32760 and fits(dims)


def test_auto_knows_what_comes_from_the_disk():
    """Host memory has room for a half of what comes: reading it again in every step takes longer than the way from the
    host. All ranks read what they all need once, so that stages, which come to as many bytes in all, gain less."""
    links = Links(dict.fromkeys(LINKS.rates, 1e9))
    machine = Machine((replace(CARD, host_bytes_s=25e9),) * 2, links)
    ample, scarce = machine.reading((100e9, 2e9)), machine.reading((20e9, 2e9))
    for degrees, parts, times in ((Degrees(ulysses=2), 1, 1), (Degrees(tensor=2), 2, 1),
                                  (Degrees(pipefusion=2, num_patches=2), 2, 2)):
        one, disk = (estimate(HALF_TOO_LARGE, JOB, degrees, each, COMING) for each in (ample, scarce))
        assert one.memory == disk.memory and one.streaming_s == pytest.approx(times * one.memory.streamed / 25e9)
        if parts * one.memory.streamed > 20e9:
            assert disk.streaming_s == pytest.approx(times * parts * one.memory.streamed / 2e9)
            assert disk.limited_by == "weights"
            comings = JOB.steps - 1 + 1 / times                # the warm-up step is whole
            assert disk.seconds == pytest.approx(max(one.seconds, comings * disk.streaming_s))
        else:
            assert disk == one

    def chosen(machine):
        placement = choose_placement(ParallelConfig(), HALF_TOO_LARGE, Devices([CARD.memory_bytes] * 2, 0, machine),
                               lambda degree: False)
        return plan_run(ParallelConfig(), machine, HALF_TOO_LARGE, JOB, *placement).chosen
    assert chosen(ample).degrees.num_patches == 2 and chosen(scarce).degrees.num_patches == 1


def two_gpus(gather_bytes_s, host_bytes_s=1e9, **links):
    rates = LINKS.rates | {("gather", 2): gather_bytes_s}
    return Machine((replace(CARD, host_bytes_s=host_bytes_s),) * 2, Links(rates, **links))


@pytest.mark.parametrize("degrees, num_alike", [(Degrees(ulysses=2), 2), (Degrees(cfg=2), 2), (Degrees(data=2), 2),
                                                (Degrees(displaced=2), 2), (Degrees(tensor=2), 1),
                                                (Degrees(pipefusion=2), 1)], ids=str)
def test_devices_with_fast_links_bring_a_part_each_of_what_all_hold(degrees, num_alike):
    """What comes takes half as long, and its exchange beside."""
    # of displaced patches there is no room for more
    dims, job = HALF_TOO_LARGE, JOB if degrees.displaced > 1 else replace(JOB, branches=2, images=2)
    slow, fast = (estimate(dims, job, degrees, two_gpus(rate), COMING) for rate in (2.9e9, 100e9))

    assert slow.limited_by == "weights" and not slow.shards_weights and fast.shards_weights == (num_alike == 2)
    if num_alike == 2:
        once_s = slow.memory.streamed * (1 / 2 / 1e9 + 1 / 2 / 100e9)
        assert fast.streaming_s == pytest.approx(once_s) and fast.seconds == pytest.approx(JOB.steps * once_s)
    else:
        assert fast.seconds == slow.seconds


def test_devices_do_not_share_what_comes_where_that_gains_nothing_or_some_rest():
    two, one_branch = replace(JOB, branches=2, images=2), replace(JOB, images=1)
    fast = two_gpus(100e9)
    assert estimate(NET, two, Degrees(cfg=2), fast, COMING).shards_weights
    for job, degrees, machine in (
            (two, Degrees(cfg=2), two_gpus(100e9, 30e9)),     # it is hidden
            (two, Degrees(), fast),                            # the other card rests
            (one_branch, Degrees(data=2), fast), (one_branch, Degrees(cfg=2), fast),
            (two, Degrees(cfg=2), two_gpus(100e9, per_machine=1)),
            (two, Degrees(cfg=2), replace(fast, links=Links({key: rate for key, rate in fast.links.rates.items()
                                                             if key[0] != "gather"})))):
        assert not estimate(NET, job, degrees, machine, COMING).shards_weights, (job, degrees, machine)


def test_the_node_says_where_weights_are_and_what_they_cost():
    for host_bytes_s, says in ((12e9, "hidden"), (1e9, "transfer-bound")):
        machine = Machine((replace(CARD, host_bytes_s=host_bytes_s),) * 2, Links(dict.fromkeys(LINKS.rates, 2e9)))
        chosen = plan_run(ParallelConfig(), machine, NET, replace(JOB, branches=2)).chosen
        words = describe_weights(chosen.memory.weights, chosen.memory.streamed, chosen, JOB.steps)
        # where the link is all that counts, a second card gains nothing
        assert chosen.working == (2 if says == "hidden" else 1)
        assert words.startswith("Weights: 1") and says in words
    shared = replace(chosen, shards_weights=True)
    assert ", one shard by each device, which all-gather them, " in describe_weights(1e9, 2e9, shared, 20)
    assert describe_weights(1e9, 2e9, None, 20) == ("Weights: 1 GB resident per device, 2 GB offloaded to system RAM "
                                                    "and streamed at every step")


def test_a_plan_knows_what_a_lora_takes():
    """Its factors have no room any more, so that as much more comes; what it takes beside the largest weight too."""
    dims = replace(NET, unpack_bytes=2e9, lora_unpack_bytes=(6e9, 0.0))
    machine = Machine((replace(CARD, host_bytes_s=6e9),) * 2, Links(dict.fromkeys(LINKS.rates, 6e9)))

    def chosen(*changed):
        return plan_run(ParallelConfig(), machine, dims, JOB, changed=changed).chosen.memory
    plain, with_factors, whole = chosen(), chosen(False, 1e9), chosen(True, 1e9)

    assert plain.streamed > 0 and with_factors.streamed > plain.streamed + 0.99e9 and with_factors.total <= plain.total
    assert whole.activations > plain.activations and whole.streamed > with_factors.streamed
