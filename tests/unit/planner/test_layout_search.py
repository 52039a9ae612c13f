"""Forecasts: golden choices on machines as there are, and what must hold of any of them."""

import itertools
import math
from dataclasses import replace

import pytest

from tests.support.tolerances import within
from xdit_backend.config import ParallelConfig
from xdit_backend.planner.cost_model import Degrees, Device, Job, Links, ModelDims
from xdit_backend.planner.layout_search import (
    Machine,
    are_identical,
    candidates,
    choose,
    estimate,
    estimates,
    is_worth_it,
)
from xdit_backend.planner.memory_model import ActivationFootprint, MemorySettings
from xdit_backend.planner.planner import FASTER, USUAL_JOB, Devices, placement_for_speed
from xdit_backend.planner.run_time import run_seconds
from xdit_backend.protocol.specs import EXCHANGES

FLUX = ModelDims(57, 3072, 24, 12.0, 11.9e9, text_once=True)
PIXART = ModelDims(28, 1152, 16, 14.0, 0.61e9, joint=False, text_once=True)
L40 = Device(137e12, 145e12, 0.864e12)
A100 = Device(187e12, 178e12, 1.9e12)
GB = 1e9


def links(all_to_all, hop, **more):
    """{2, 4 and 8 ranks: GB/s} of each."""
    rates = {("all_to_all", size): rate * GB for size, rate in zip((2, 4, 8), all_to_all)}
    return Links(rates | {("hop", size): rate * GB for size, rate in zip((2, 4, 8), hop)}
                 | {("all_reduce", 2): 10 * GB, ("gather", 2): 6 * GB}, **more)


def machine(count, device, between, **more):
    return Machine((device,) * count, between, **more)


NVLINK, PCIE = links((80, 60, 55), (80, 80, 80), hidden=0.75), links((26, 3.8, 1.2), (20, 14, 12), hidden=0.5)
EIGHT = machine(8, A100, NVLINK)


def test_links_of_a_machine_say_nothing_of_the_network():
    """Three of two machines' four devices leave the first; so do two of six where a machine has three."""
    rates = {("hop", 2): 1e10, ("hop", 4): 1e8}
    apart, together = Links(rates, latencies=rates, per_machine=2), Links(rates, latencies=rates)

    assert [apart.rate("hop", size)
            for size in (2, 3, 4)] == [apart.latency("hop", size) for size in (2, 3, 4)] == [1e10, 1e8, 1e8]
    assert 1e8 < together.rate("hop", 3) < 1e10
    odd = Links({("hop", 2): 1e8, ("hop", 3): 1e10, ("hop", 6): 1e8}, per_machine=3)
    assert [odd.rate("hop", size) for size in (2, 3, 4)] == [1e8, 1e10, 1e8]


def test_stages_on_two_machines_wait_for_the_network_that_their_ranks_share():
    """A hop of hidden states: of one stage's two ranks each sends its half, over one network."""
    rates = {(name, size): 1e11 if size == 2 else 1e6 for name in ("hop", "all_to_all") for size in (2, 4)}
    job, device = Job(4096, 512, 20), Device(1e17, 1e17, 1e15)
    degrees = Degrees(pipefusion=2, ulysses=2, num_patches=2)
    # of the two ranks' halves of one of two patches, in bfloat16
    hop_s = 4096 * FLUX.width * 2 / 2 / 1e6
    slow, fast = (sum(run_seconds(FLUX, job, degrees, device, Links(rates, per_machine=size)).values())
                  for size in (2, 0))

    assert 2 * 19 * hop_s < slow < 2.3 * 20 * hop_s
    within(abs(fast / slow - 0.5), 0.02)                       # as if each had a network of its own


@pytest.mark.parametrize("dims, job, devices, device, between, expected", [
    (PIXART, Job(4096, 120, 20, branches=2), 2, A100, NVLINK, Degrees(cfg=2)),
    (PIXART, Job(65536, 120, 20, branches=2), 2, L40, PCIE, Degrees(cfg=2)),
    (FLUX, Job(16384, 512, 28), 2, A100, NVLINK, Degrees(ulysses=2)),
    (FLUX, Job(16384, 512, 28), 8, L40, PCIE, Degrees(pipefusion=8, num_patches=8)),
    (FLUX, Job(4096, 512, 28), 1, L40, PCIE, Degrees())],
                         ids=["cfg-nvlink", "cfg-pcie", "ulysses-nvlink", "pipefusion-pcie", "one"])
def test_golden_choices(dims, job, devices, device, between, expected):
    assert choose(estimates(dims, job, machine(devices, device, between))).degrees == expected


def test_an_exact_layout_wins_what_is_nearly_a_tie():
    ordered = estimates(FLUX, Job(16384, 512, 28), machine(2, A100, NVLINK))

    assert not ordered[0].is_exact and choose(ordered).is_exact and choose(ordered).seconds <= 1.05 * ordered[0].seconds


def test_what_does_not_fit_comes_last():
    job = Job(4096, 512, 28)
    ordered = estimates(FLUX, job, machine(2, replace(A100, memory_bytes=16 * GB), NVLINK))

    assert ordered[0].fits and ordered[0].degrees.pipefusion == 2 and choose(ordered) == ordered[0]
    assert [one.fits for one in ordered] == sorted((one.fits for one in ordered), reverse=True)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8, 16])
def test_candidates_use_all_devices_and_can_be_run(devices):
    job = Job(4096, 512, 28, branches=2, images=2)
    layouts = list(candidates(FLUX, job, devices))

    assert layouts and len(set(layouts)) == len(layouts)
    for degrees in layouts:
        assert degrees.devices == devices and degrees.cfg <= 2 and degrees.data <= 2
        assert 24 % degrees.ulysses == 0 and degrees.pipefusion <= 57


@pytest.mark.parametrize("rows, most", [(None, 4), (3, 2), (1, 1)])
def test_candidates_have_no_more_ranks_than_rows_of_tokens(rows, most):
    """Of families of which each rank has whole ones, as Sana's."""
    layouts = list(candidates(FLUX, Job(4096, 512, 28, rows=rows), 4))

    assert max(degrees.sequence for degrees in layouts) == most


EVERY = [Degrees(), Degrees(cfg=2), Degrees(data=2), Degrees(ulysses=4), Degrees(ring=4), Degrees(ulysses=2, ring=4),
         Degrees(tensor=4), Degrees(displaced=4), Degrees(pipefusion=4), Degrees(pipefusion=4, num_patches=8),
         Degrees(pipefusion=2, warmup_by_sequence=True),
         Degrees(cfg=2, ulysses=2, pipefusion=2, num_patches=4), Degrees(ring=2, pipefusion=2)]


@pytest.mark.parametrize("degrees", EVERY, ids=str)
@pytest.mark.parametrize("dims", [FLUX, PIXART, replace(FLUX, skips=True, key_heads=8),
                                 replace(PIXART, attention="linear")],
                         ids=["flux", "pixart", "skips", "linear"])
def test_faster_is_never_slower(dims, degrees):
    """A faster link, device or host, or less to do, takes no longer."""
    job = Job(4096, 512, 20, branches=2, images=2)
    slow = estimate(dims, job, degrees, machine(8, L40, PCIE)).seconds

    faster_links = replace(PCIE, rates={name: 2 * rate for name, rate in PCIE.rates.items()})
    host = {name: getattr(L40, name) / 2
            for name in ("block_launch_s", "collective_launch_s", "round_launch_s", "slot_launch_s")}
    for device, between in ((L40, faster_links), (replace(L40, matrix_flops_s=3e14, attention_flops_s=3e14), PCIE),
                            (replace(L40, **host), PCIE), (L40, replace(PCIE, hidden=1.0)),
                            (L40, replace(PCIE, latency_s=0.0))):
        assert estimate(dims, job, degrees, machine(8, device, between)).seconds <= slow * (1 + 1e-12)
    for less in (replace(job, steps=10), replace(job, branches=1), replace(job, tokens=2048), replace(job, images=1)):
        assert estimate(dims, less, degrees, machine(8, L40, PCIE)).seconds <= slow * (1 + 1e-12)


@pytest.mark.parametrize("degrees", EVERY, ids=str)
def test_forecasts_of_absurd_sizes_are_finite(degrees):
    sizes = itertools.product((1, 10 ** 12), (0, 10 ** 9), (1, 10 ** 9))
    for (tokens, text, steps), dims in itertools.product(sizes, (FLUX, PIXART, replace(PIXART, skips=True))):
        made = estimate(dims, Job(tokens, text, steps, branches=2), degrees, machine(8, A100, NVLINK))

        assert math.isfinite(made.seconds) and made.seconds > 0 and math.isfinite(made.memory.total)
        assert all(seconds >= 0 for seconds in made.causes.values())


def test_memory_adds_up_over_ranks():
    """Stages and shards of tensors hold the weights once, in all; stages the keys and values. Of activations each shard
    of a sequence has what is whole, its part of the rest, and what Ulysses packs."""
    job, dims = Job(4096, 512, 20), replace(FLUX, blocks=56)
    one = estimate(dims, job, Degrees(), EIGHT).memory
    four, eight = (estimate(dims, job, Degrees(pipefusion=stages), EIGHT).memory for stages in (4, 8))
    shards = estimate(FLUX, job, Degrees(ulysses=4), EIGHT).memory
    tensors = estimate(FLUX, job, Degrees(tensor=4), EIGHT).memory

    assert one.total == one.weights + one.keys_values + one.activations and one.keys_values == 0
    within(abs(4 * four.weights / (one.weights) - 1), 1e-12)
    within(abs(4 * tensors.weights / (one.weights) - 1), 1e-12)
    within(abs(4 * four.keys_values / (8 * eight.keys_values) - 1), 1e-12)
    within(abs(4 * four.keys_values / (2 * (4096 + 512) * 3072 * 56 * 2) - 1), 1e-12)      # 2 B (S + S_t) h
    footprint = ActivationFootprint()
    within(abs(shards.activations / one.activations * footprint.alone / (footprint.held + footprint.exchange / 4) - 1),
           1e-12)
    assert estimate(FLUX, job, Degrees(pipefusion=4, warmup_by_sequence=True), EIGHT).memory.weights == one.weights
    twice, away = (estimate(dims, job, Degrees(pipefusion=4), EIGHT, settings).memory
                   for settings in (MemorySettings(cached_steps=2), MemorySettings(offload=True)))
    assert twice.keys_values == 2 * four.keys_values
    # two blocks' are on the device
    assert away.host == four.keys_values and away.keys_values == 2 / (56 / 4) * four.keys_values
    outside = estimate(replace(dims, outside_bytes=GB), job, Degrees(pipefusion=4), EIGHT).memory
    within(abs(outside.weights - (GB + (one.weights - GB) / 4)) / GB, 1e-12)


@pytest.mark.parametrize("job, degrees, between, cause", [
    (Job(65536, 512, 20), Degrees(ulysses=2), NVLINK, "compute"),
    (Job(16384, 512, 20), Degrees(ulysses=8), PCIE, "link"),
    (Job(64, 16, 20), Degrees(ulysses=2), NVLINK, "launch"),
    (Job(65536, 512, 4), Degrees(pipefusion=8, num_patches=16), NVLINK, "warm-up")])
def test_what_limits_a_run_is_named(job, degrees, between, cause):
    assert estimate(FLUX, job, degrees, machine(8, A100, between)).limited_by == cause


def test_a_schedule_is_that_of_its_slots():
    """One device's work without links and launching: PipeFusion's steps are its slots, warm-up its whole steps."""
    ideal = Device(1e14, 1e14, 1e30, half_rows=0, half_keys=0, block_launch_s=0, collective_launch_s=0,
                   round_launch_s=0, slot_launch_s=0)
    free = links((1e12,) * 3, (1e12,) * 3, latency_s=0.0)
    dims, job = replace(FLUX, blocks=56), Job(4096, 0, 16)
    one = estimate(dims, job, Degrees(), machine(8, ideal, free)).seconds

    for stages, patches, warmup in ((2, 4, 1), (4, 4, 0), (4, 8, 3), (4, 2, 1)):
        layout = Degrees(pipefusion=stages, num_patches=patches, warmup_steps=warmup)
        slots = (16 - warmup - 1) * max(patches, stages) + patches + stages - 1
        made = estimate(dims, job, layout, machine(8, ideal, free)).seconds
        within(abs(made / (one / 16 * (warmup + slots / (stages * patches))) - 1), 1e-6)


def test_displaced_steps_are_synchronous_in_the_warm_up_and_at_the_first():
    """Without a warm-up as with one step of it; never more than there are."""
    rates = links((1e11,) * 3, (1e11,) * 3)
    seconds = [run_seconds(FLUX, Job(4096, 512, 20), Degrees(displaced=2, warmup_steps=steps), A100, rates)["warm-up"]
               for steps in (0, 1, 3, 20, 50)]

    assert seconds[0] > 0
    assert [each / seconds[0] for each in seconds] == pytest.approx([1, 1, 3, 20, 20])


# --- devices that are not alike: seconds are shares of the fast one's, as arithmetic on the rates says ---

FAST, IDEAL = Device(1e14, 1e14, 1e30, half_rows=0, half_keys=0, block_launch_s=0, collective_launch_s=0,
                     round_launch_s=0, slot_launch_s=0), links((1e12,) * 3, (1e12,) * 3, latency_s=0.0)


@pytest.mark.parametrize("slower, degrees, ratio", [
    (2.75, Degrees(cfg=2), 2.75 / 2), (2.75, Degrees(ulysses=2), 1 / (1 + 1 / 2.75)), (2.75, Degrees(data=2), 1.0),
    (1.5, Degrees(pipefusion=2, num_patches=2, warmup_steps=0), (20 * 2 + 1) / 40 / (1 + 1 / 1.5))])
def test_unlike_devices_share_out_tokens_and_blocks_by_speed_and_else_wait_for_the_slower(slower, degrees, ratio):
    """With two branches: the fast device alone takes both."""
    unlike = Machine((FAST, FAST.slower(slower)), IDEAL)
    dims, job = replace(FLUX, blocks=56), Job(16384, 0, 20, branches=2)
    one = estimate(dims, job, Degrees(data=2), unlike)

    assert one.working == 1
    within(abs(estimate(dims, job, degrees, unlike).seconds / one.seconds / ratio - 1), 0.02)


@pytest.mark.parametrize("slower, expected", [(1.0, {"cfg": 2}), (1.6, {"cfg": 2}), (2.75, {"data": 2})])
def test_a_slow_gpu_is_left_out_where_it_would_hold_the_other_up(slower, expected):
    """Branches are shared out only where the slower card has more than half of the faster one's speed."""
    unlike, job = Machine((A100, A100.slower(slower)), NVLINK), Job(4096, 512, 20, branches=2)
    exact = estimates(FLUX, job, unlike, [Degrees(cfg=2), Degrees(data=2)])

    assert choose(exact, are_identical(FLUX, job, unlike.devices)).degrees == Degrees(**expected)
    assert are_identical(FLUX, job, unlike.devices) == (slower == 1.0)


@pytest.mark.parametrize("fast_first", [True, False])
@pytest.mark.parametrize("images, working", [(1, 1), (2, 1), (4, 2)])
def test_images_go_where_they_are_done_soonest(images, working, fast_first):
    """Of four images the slow card (a third as fast) takes one; of two none: then the fast one works alone."""
    devices = (FAST, FAST.slower(3)) if fast_first else (FAST.slower(3), FAST)
    made = estimate(FLUX, Job(16384, 0, 20, images=images), Degrees(data=2), Machine(devices, IDEAL))
    one = estimate(FLUX, Job(16384, 0, 20), Degrees(data=2), Machine(devices, IDEAL))

    assert made.working == working
    within(abs(made.seconds / one.seconds / min(images, 3) - 1), 0.02)


def test_tokens_by_speed_make_a_slow_gpu_worth_having():
    """A card a third as fast: 1.3 times the fast one alone; one 30 times slower is left out."""
    job = Job(16384, 512, 20)
    for slower, working in ((3, 2), (30, 1)):
        unlike = Machine((A100, A100.slower(slower)), NVLINK)
        exact = [one for one in estimates(FLUX, job, unlike) if one.is_exact]

        assert choose(exact, are_identical(FLUX, job, unlike.devices)).working == working


def test_a_large_model_fits_where_stages_have_room_together():
    """24 and 12 GB hold 30 GB of blocks that neither half of which fits on the small card."""
    gpus = [replace(A100, memory_bytes=size * GB) for size in (24, 12)]
    dims, job = replace(FLUX, weight_bytes=28e9), Job(1024, 128, 20)

    assert estimate(dims, job, Degrees(pipefusion=2), Machine(tuple(gpus), NVLINK)).fits
    assert not estimate(dims, job, Degrees(pipefusion=2), Machine((gpus[1], gpus[1]), NVLINK)).fits


def test_small_gains_are_not_promised():
    """One device is as fast: a small picture over a slow link, or few seconds in all."""
    job = Job(256, 16, 4)
    chosen, one = choose(estimates(FLUX, job, machine(2, A100, PCIE))), estimate(
        FLUX, job, Degrees(data=2), machine(2, A100, PCIE))

    assert chosen.working == 1 and not is_worth_it(chosen, one)
    job = Job(16384, 512, 28)
    two = machine(2, A100, NVLINK)
    assert is_worth_it(choose(estimates(FLUX, job, two)), estimate(FLUX, job, Degrees(data=2), two))


def test_devices_that_share_a_machine_are_faster_alone():
    shared, job = machine(2, A100, NVLINK, alone=1.25), Job(16384, 512, 28)

    within(abs(estimate(FLUX, job, Degrees(data=2), machine(2, A100, NVLINK)).seconds
               / estimate(FLUX, job, Degrees(data=2), shared).seconds - 1.25), 0.01)


def test_what_the_host_launches_takes_a_cpus_own_time():
    """A block of few tokens, whose launch passes beside computing on a card,
    and adds to it where the host is the device."""
    job = Job(64, 16, 1)
    gpu, cpu = (estimate(FLUX, job, Degrees(), machine(1, replace(A100, launch_hidden=hidden), PCIE)).causes
                 for hidden in (1.0, 0.0))

    launched = FLUX.blocks * FLUX.kernels * A100.block_launch_s
    within(abs((cpu["compute"] - gpu["compute"]) / launched - 1), 1e-6)
    assert gpu["launch"] > 0 and cpu["launch"] == 0


SLOW_GB = (5, 5, 5)


@pytest.mark.parametrize("between, count, branches, expected", [
    (SLOW_GB, 2, (1,), 2), (SLOW_GB, 4, (1,), 4), (SLOW_GB, 2, (1, 2), None),
    ((200, 200, 200), 2, (1,), None)], ids=str)
def test_for_speed_takes_stages_where_they_are_much_faster_than_anything_exact(between, count, branches, expected):
    """By what forecasts say of all layouts; and never one that only "allowed" is said of."""
    dims, memory = replace(FLUX, branches_apart=True), 80 * GB
    group = machine(count, replace(A100, memory_bytes=memory), links(between, between))
    devices = Devices([memory] * count, machine=group)

    faster = placement_for_speed(ParallelConfig(approximate="for speed"), dims, devices, branches)

    assert (faster and faster.placement.stages.pipefusion_degree) == expected
    gains = []
    for each in branches:
        every = estimates(dims, replace(USUAL_JOB, branches=each), group, settings=MemorySettings(2))
        best = {is_exact: min(one.seconds for one in every if one.is_exact == is_exact and one.fits)
                for is_exact in (True, False)}
        gains.append(best[True] / best[False])
    assert min(gains) > FASTER if expected else min(gains) < FASTER
    for other in (ParallelConfig(), ParallelConfig(approximate="not allowed"),
                  ParallelConfig(approximate="for speed", num_patches=1),
                  ParallelConfig(approximate="for speed", mode="manual")):
        assert placement_for_speed(other, dims, devices, branches) is None
    assert placement_for_speed(ParallelConfig(approximate="for speed"), dims, replace(devices, machine=None)) is None
    if faster:
        assert faster.words.startswith(f"PipeFusion {count}, {2 * count} patches for speed: ")


def test_for_speed_takes_no_stages_without_room_for_their_keys_and_values():
    dims, memory = replace(FLUX, branches_apart=True), FLUX.resident_bytes / 0.79
    group = machine(2, replace(A100, memory_bytes=memory), links(SLOW_GB, SLOW_GB))
    large = replace(dims, width=dims.width * 8, elements=dims.elements / 64)
    for each, expected in ((dims, True), (large, False)):
        faster = placement_for_speed(ParallelConfig(approximate="for speed"), each,
                                     Devices([memory] * 2, machine=group),
                                  (1,))
        assert bool(faster) == expected


@pytest.mark.parametrize("degrees, keys, everything", [
    (Degrees(ulysses=2), 0.75, 0.5), (Degrees(ring=2), 0.5, 0.5), (Degrees(cfg=2), 1.0, 1.0)], ids=str)
def test_forecasts_know_in_which_form_tensors_travel(degrees, keys, everything):
    """Over links so slow that nothing else counts: the seconds are those of the bytes."""
    slow, job = machine(2, A100, links((1e-3, 1e-3, 1e-3), (1e-3, 1e-3, 1e-3))), Job(4096, 512, 20, branches=2)
    whole, of_keys, of_all = (estimate(FLUX, job, degrees, slow.exchanging(exchange)).causes["link"]
                              for exchange in EXCHANGES)

    within(abs(of_keys - keys * whole), 0.01 * whole + 1e-9)
    within(abs(of_all - everything * whole), 0.01 * whole + 1e-9)
