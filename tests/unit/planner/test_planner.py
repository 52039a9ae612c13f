"""The automatic choice, and a person's."""

import itertools
import time
from dataclasses import replace

import pytest

from xdit_backend.config import DEGREES, ParallelConfig, validate, validate_layout, validate_stages
from xdit_backend.planner.cost_model import Device, Job, Links, ModelDims
from xdit_backend.planner.layout_search import Machine, candidates, estimates, extra_candidates
from xdit_backend.planner.memory_model import MemorySettings, rank_memory, working_fraction
from xdit_backend.planner.planner import (
    AttentionHeads,
    Devices,
    WeightPlacement,
    choose_layout,
    choose_num_patches,
    choose_placement,
    degrees_of,
    memory_settings,
    plan_run,
    warmup_layout,
)
from xdit_backend.planner.run_time import synchronous_steps
from xdit_backend.protocol.errors import ConfigError
from xdit_backend.protocol.specs import Layout, Stages

EXACTLY, EVERY = ParallelConfig(approximate="not allowed"), range(64)
OF_24_HEADS = AttentionHeads("this model", 24)
# Flux.1 dev and Wan 2.1 14B as dims_of finds them; tokens of one megapixel, of 16, and of five seconds of 720p video
FLUX = ModelDims(57, 3072, 24, 12.0, 11.9e9, text_once=True, branches_apart=True)
WAN = ModelDims(40, 5120, 40, 13.4, 14.3e9, joint=False, text_once=True, branches_apart=True)
JOBS = ((FLUX, Job(4096, 512, 28)), (FLUX, Job(65536, 512, 28)), (WAN, Job(75600, 512, 50, branches=2, frames=21)))


def model_of(weight_bytes):
    return ModelDims(57, 3072, 24, 12.0, 11.9e9, weight_bytes=weight_bytes)


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
    heads = AttentionHeads("this model", num_heads)

    assert choose_layout(ParallelConfig(), num_devices, num_branches, heads) == expected


@pytest.mark.parametrize("devices", [2, 3, 4, 6, 8])
def test_every_candidate_passes_validation(devices):
    """As degrees of manual mode, which the nodes refuse where they cannot work."""
    dims = ModelDims(28, 1536, 24, 12.0, 1e9, key_heads=8)
    rates = {(name, 2): 1e10 for name in ("all_to_all", "hop", "all_reduce", "gather")}
    machine = Machine((Device(1e14, 1e14, 1e12),) * devices, Links(rates))
    job = Job(4096, 128, 20, branches=2, images=2)
    for degrees in (*candidates(dims, job, devices), *extra_candidates(dims, job, machine)):
        chosen = {name: getattr(degrees, name.removesuffix("_degree")) for name in DEGREES}
        config = ParallelConfig(mode="manual", num_patches=degrees.num_patches, **chosen)

        validate(config, devices)
        validate_layout(config.layout, dims.heads, "this model", dims.key_heads)
        validate_stages(config, dims.blocks, "this model")


def test_manual_takes_the_degrees_given():
    config = ParallelConfig(mode="manual", ring_degree=2)

    assert choose_layout(config, 2, 2, OF_24_HEADS) == Layout(ring_degree=2)


def test_manual_refuses_degrees_that_do_not_fit_the_model():
    with pytest.raises(ConfigError, match="ulysses_degree=2 does not divide this model's 7 attention heads"):
        choose_layout(ParallelConfig(mode="manual", ulysses_degree=2), 2, 1, AttentionHeads("this model", 7))


@pytest.mark.parametrize("requested, num_stages, rows, columns, sequence_degree, expected", [
    (0, 2, 128, 128, 1, 4), (0, 3, 128, 128, 1, 6), (0, 2, 6, 64, 1, 3), (8, 2, 8, 16, 2, 4), (8, 2, 8, 2, 2, 2),
    (1, 4, 64, 64, 1, 1),
    (5, 1, 64, 64, 1, 5), (3, 2, 2, 2, 1, 1)])
def test_number_of_patches(requested, num_stages, rows, columns, sequence_degree, expected):
    """Chosen: twice the stages; fewer where the latent has too few rows,
    or a row too few tokens for the sequence ranks."""
    assert choose_num_patches(requested, num_stages, (1, 4, rows, columns), (2, 2), sequence_degree) == expected


@pytest.mark.parametrize("layout, stages, batch, expected", [
    (Layout(), None, 2, 1), (Layout(cfg_degree=2), None, 2, 1 / 2),
    (Layout(ulysses_degree=2, ring_degree=2), None, 6, 1 / 4),
    (Layout(data_degree=2), None, 2, 1), (Layout(data_degree=2), None, 6, 2 / 3),
    (Layout(cfg_degree=2, ring_degree=2), None, 8, 1 / 4),
    (Layout(pipefusion_degree=2), Stages(2), 4, 1 / 2),
    (Layout(pipefusion_degree=2), Stages(2, every_block=True), 4, 1 / 4),
    (Layout(cfg_degree=2, pipefusion_degree=2, ulysses_degree=2), Stages(2, 2), 2, 1 / 4), (Layout(), None, 1, 1)],
                         ids=str)
def test_a_ranks_share_of_the_activations(layout, stages, batch, expected):
    """batch: of both branches. One image cannot be shared;
    stages take one branch after the other, and all rows of it to warm up."""
    branches = 2 - batch % 2
    job = Job(4096, 0, 20, branches, images=batch // branches)
    assert working_fraction(job, degrees_of(layout, ParallelConfig(), stages), branches_apart=True) == expected


@pytest.mark.parametrize("placement", [(None, 1), (None, 2), (Stages(2, 2), 1)], ids=str)
def test_no_run_has_weights_loaded_again(placement):
    """Of short runs and long, of one picture and several, with and without guidance:
    all are layouts of what the ranks hold."""
    stages, tensor_degree = placement
    machine = Machine((Device(2e14, 2e14, 2e12, memory_bytes=80e9),) * 4, Links({
        (name, size): rate for name, rate in (("all_to_all", 5e9), ("hop", 2e10), ("all_reduce", 1e11))
        for size in (2, 4)}))
    for tokens, branches, images in itertools.product((1024, 4096, 65536), (1, 2), (1, 4)):
        plan = plan_run(ParallelConfig(), machine, model_of(24e9), Job(tokens, 512, 28, branches, images=images),
                        *placement)

        held = {(one.degrees.pipefusion, one.degrees.tensor) for one in plan.ordered}
        assert held == {(stages.pipefusion_degree if stages else 1, tensor_degree)} and plan.chosen in plan.ordered


@pytest.mark.parametrize("rate", [200e9, 20e9, 5e9])
def test_where_the_weights_fit_sharding_tensors_pays_nothing(rate):
    """So exact runs have nothing to load again for: by forecast another exact layout is as fast,
    over fast links and slow ones."""
    for (dims, job), count in itertools.product(JOBS, (2, 4, 8)):
        links = Links({(name, size): rate for name in ("all_to_all", "hop", "all_reduce", "gather")
                       for size in (2, 4, 8)}, 2e-5)
        machine = Machine((Device(2e14, 2e14, 2e12, memory_bytes=80e9),) * count, links)
        exact = [one.seconds for one in estimates(dims, job, machine) if one.is_exact]
        split = [one.seconds for one in estimates(dims, job, machine, list(extra_candidates(dims, job, machine)))
                 if one.degrees.tensor > 1]

        assert min(exact) < min(split)


@pytest.mark.parametrize("count, most", [(2, 10), (8, 20), (64, 40)])
def test_the_choice_looks_at_few_layouts_and_takes_less_than_ten_times_what_forecasts_of_all_take(count, most):
    """Of unlike devices, whose forecasts take longest."""
    unlike = [Device(rate, 1e14, 1e12, memory_bytes=80e9, name=f"card {rate:g}") for rate in (1e14, 2e14)]
    rates = {(name, size): 2e10 for name in ("all_to_all", "hop", "all_reduce", "gather")
             for size in (2, 4, 8, 16, 32, 64)}
    machine, dims = Machine(tuple(unlike[rank % 2] for rank in range(count)), Links(rates)), model_of(24e9)
    taken, taken_by_all = [], []
    for tokens in (4096, 4097, 4098):                          # nothing that an earlier choice has found helps
        started_s = time.process_time()
        plan = plan_run(ParallelConfig(), machine, dims, Job(tokens, 512, 28, branches=2))
        chosen_s = time.process_time()
        estimates(dims, Job(tokens + 10, 512, 28, branches=2), machine)
        taken.append(chosen_s - started_s)
        taken_by_all.append(time.process_time() - chosen_s)

    assert 1 <= len(plan.ordered) <= most
    assert min(taken) < 10 * min(taken_by_all)


def test_bytes_of_stale_keys_and_values():
    """Two branches of one image, 100 tokens of width 64 in half precision, 5 blocks in two stages;
    forecasts need two steps'."""
    dims, job = ModelDims(5, 64, 4, 12.0, 1e6), Job(100, 0, 20, branches=2)

    def memory(offload=False, is_forecast=False, **degrees):
        return rank_memory(dims, job, degrees_of(Layout(pipefusion_degree=2, **degrees), ParallelConfig()),
                           MemorySettings(1 + is_forecast, offload))

    def cached(**settings):
        return memory(**settings).keys_values

    assert cached() == 2 * 2 * 100 * 64 * 3 * 2
    assert cached(is_forecast=True) == 2 * 2 * 2 * 100 * 64 * 3 * 2
    assert cached(ulysses_degree=2, cfg_degree=2) == 2 * 100 * 64 * 3 * 2 // 2
    assert cached(offload=True) == 2 * 2 * 2 * 100 * 64 * 2                  # of the block at hand and of the next
    assert cached(offload=True, is_forecast=True) == 3 * 2 * 2 * 100 * 64 * 2
    for is_forecast in (False, True):
        assert memory(offload=True, is_forecast=is_forecast).host == cached(is_forecast=is_forecast)
    assert memory().host == 0


@pytest.mark.parametrize("settings, times", [
    ({}, 2), ({"forecast_keys_values": 0.0}, 1), ({"displaced_mode": "stale_gn"}, 2),
    ({"displaced_mode": "no_sync"}, 1)], ids=str)
def test_bytes_that_displaced_patches_keep(settings, times):
    """Of all 5 blocks, on every rank; those of two calls where they are forecast, which what is frozen is not."""
    dims, job = ModelDims(5, 64, 4, 12.0, 1e6), Job(100, 0, 20, branches=2)
    config = ParallelConfig(mode="manual", displaced_degree=2, **settings)

    memory = rank_memory(dims, job, degrees_of(config.layout, config), memory_settings(config))

    assert memory.keys_values == times * 2 * 2 * 100 * 64 * 5 * 2


@pytest.mark.parametrize("mode, synchronous", [("auto", 1), ("sync_gn", 1), ("full_sync", 20)])
def test_synchronous_steps_of_a_mode_are_counted(mode, synchronous):
    config = ParallelConfig(mode="manual", displaced_degree=2, displaced_mode=mode)

    assert synchronous_steps(20, degrees_of(config.layout, config).warmup_steps) == synchronous


def test_auto_spreads_weights_only_where_one_device_cannot_hold_them():
    gigabyte = 2 ** 30
    small, large = model_of(12 * gigabyte), model_of(24 * gigabyte)
    for devices, dims, size, expected in (
            (2, small, 24, None), (1, large, 12, None), (2, large, 16, Stages(2)),
            (4, large, 16, Stages(2, sequence_degree=2)),
            (4, large, 8, Stages(4)), (4, large, 1, Stages(4)),
            (2, replace(large, outside_bytes=23 * gigabyte), 16, Stages(2)),
            (4, replace(large, outside_bytes=4 * gigabyte), 16, Stages(4))):
        assert choose_placement(ParallelConfig(), dims, Devices([size * gigabyte] * devices)) == (expected, 1)
    layout = choose_layout(ParallelConfig(), 4, 2, OF_24_HEADS, WeightPlacement(Stages(2, sequence_degree=2)))
    assert layout == Layout(pipefusion_degree=2, ulysses_degree=2)


@pytest.mark.parametrize("weights, count, per_machine, expected", [
    (10e9, 2, 1, (Stages(2, 1), 1)), (10e9, 4, 2, (Stages(2, 2), 1)), (10e9, 3, 1, (Stages(3, 1), 1)),
    (60e9, 4, 2, (Stages(4, 1), 1)),
    (10e9, 4, 0, (None, 1)), (900e9, 4, 2, (Stages(4, 1), 1))])
def test_machines_are_stages(weights, count, per_machine, expected):
    """Also where a model fits on one device: tokens are shared within a machine.
    Parts of a machine where it does not fit otherwise."""
    placement = choose_placement(ParallelConfig(), model_of(weights), Devices([24e9] * count, per_machine))

    assert placement == expected
    if per_machine:
        assert per_machine % choose_layout(ParallelConfig(), count, 2, OF_24_HEADS, placement).ulysses_degree == 0


def machines(network, count=4, per_machine=2):
    """Of like devices, whose links within are as fast as PCIe and between as this many bytes a second."""
    rates = {(name, size): 1e10 if size <= per_machine else network
             for name in ("all_to_all", "hop", "all_reduce", "gather")
             for size in {per_machine, count} - {1}}
    latencies = {(name, size): 3e-5 if size <= per_machine else 3e-4 for name, size in rates}
    return Machine((Device(1e14, 1e14, 1e12, memory_bytes=24e9),) * count,
                   Links(rates, latencies=latencies, per_machine=per_machine))


@pytest.mark.parametrize("network, branches, weights, expected", [
    (1e9, (1,), 5e9, Stages(2, 2)), (1e9, (1, 2), 5e9, None), (1e6, (1,), 5e9, None), (1e6, (1,), 30e9, Stages(2, 2)),
    (1e6, (1, 2), 80e9, Stages(4, 1))], ids=str)
def test_what_machines_share_is_chosen_by_their_links(network, branches, weights, expected):
    """Stages, or branches and images where the network is slow, or every run has both branches;
    stages where weights fit on no device."""
    machine = machines(network)
    assert choose_placement(ParallelConfig(), model_of(weights), Devices([24e9] * 4, 2, machine),
                         branches=branches).stages == expected


@pytest.mark.parametrize("network", [1e10, 1e9, 1e6])
@pytest.mark.parametrize("count, per_machine", [(4, 2), (2, 1), (6, 3)])
@pytest.mark.parametrize("job", [Job(4096, 512, 20), Job(4096, 512, 20, branches=2), Job(4096, 512, 20, images=4)],
                         ids=str)
def test_ranks_that_share_tokens_are_in_one_machine(network, count, per_machine, job):
    """However fast the network is said to be; and with one image and one branch a machine works alone,
    instead of one device."""
    chosen = plan_run(ParallelConfig(), machines(network, count, per_machine), model_of(5e9), job).chosen
    unmeasured = choose_layout(EXACTLY, count, job.branches, OF_24_HEADS, per_machine=per_machine)

    assert per_machine % chosen.degrees.sequence == 0 and chosen.degrees.cfg == job.branches
    assert chosen.degrees.sequence == per_machine or job.images > 1
    assert chosen.working == (per_machine if job.branches == job.images == 1 else count) or job.images > 1
    assert unmeasured.ulysses_degree * unmeasured.ring_degree == per_machine and unmeasured.cfg_degree == job.branches


def test_where_nothing_approximate_is_allowed_machines_share_branches_and_images():
    assert choose_placement(EXACTLY, model_of(5e9), Devices([24e9] * 4, 2)) == (None, 1)
    # within a machine
    assert choose_placement(EXACTLY, model_of(60e9), Devices([24e9] * 4, 2), has_stages=False) == (None, 2)





@pytest.mark.parametrize("devices, gigabytes, changes, splittable, expected", [
    (2, 24, {}, EVERY, (None, 2)), (4, 24, {}, EVERY, (None, 2)), (4, 16, {}, EVERY, (None, 4)),
    (2, 48, {}, EVERY, (None, 1)),
    (5, 24, {}, EVERY, (Stages(5), 1)), (2, 24, {}, (), (Stages(2), 1)),
    (2, 24, {"key_heads": 3}, EVERY, (Stages(2), 1)),
    (4, 24, {}, (4,), (None, 4)), (4, 1, {}, EVERY, (None, 4))], ids=str)
def test_where_nothing_approximate_is_allowed_auto_spreads_layers(devices, gigabytes, changes, splittable, expected):
    """Of 24 heads; what cannot be split by a degree has stages with one patch.
    splittable: degrees by which the file can be."""
    dims = replace(model_of(30e9), **changes)
    assert choose_placement(EXACTLY, dims, Devices([gigabytes * 1e9] * devices), splittable.__contains__) == expected
    assert EXACTLY.requested_patches == 1 and degrees_of(Layout(pipefusion_degree=2), EXACTLY).num_patches == 1


@pytest.mark.parametrize("all_reduce, expected",
                         [(None, (Stages(2, 1), 1)), (1e8, (Stages(2, 1), 1)), (1e12, (None, 2))])
def test_auto_takes_an_exact_spread_that_is_forecast_to_be_as_fast(all_reduce, expected):
    """Over slow links stages that wait for each other are faster than layers that are spread, and as exact."""
    rates = {("all_to_all", 2): 1e10, ("hop", 2): 1e10} | ({("all_reduce", 2): all_reduce} if all_reduce else {})
    machine = Machine((Device(1e14, 1e14, 1e12, memory_bytes=24e9),) * 2, Links(rates))
    for config in (ParallelConfig(), EXACTLY):
        placement = choose_placement(config, model_of(30e9), Devices([24e9] * 2, machine=machine))
        plan = plan_run(config, machine, model_of(30e9), Job(4096, 512, 20), *placement)

        assert placement == expected and plan.layout.tensor_degree == placement[1]
        assert plan.chosen.is_exact == (config is EXACTLY or placement[0] is None)


@pytest.mark.parametrize("branches, expected", [(2, Layout(cfg_degree=2, ulysses_degree=3, tensor_degree=2)),
                                                (1, Layout(ulysses_degree=3, ring_degree=2, tensor_degree=2))], ids=str)
def test_branches_and_tokens_share_what_spread_layers_leave(branches, expected):
    """Of 18 heads a rank has 9."""
    assert choose_layout(EXACTLY, 12, branches, AttentionHeads("this model", 18), WeightPlacement(None, 2)) == expected
    rates = {(name, 2): 1e11 for name in ("all_to_all", "hop", "all_reduce")}
    machine = Machine((Device(1e14, 1e14, 1e12),) * 12, Links(rates))
    dims = ModelDims(57, 3072, 18, 12.0, 11.9e9)
    layout = plan_run(EXACTLY, machine, dims, Job(16384, 512, 20, branches), None, 2).layout
    assert layout.tensor_degree == 2 and layout.cfg_degree == branches and layout.ulysses_degree in (1, 3)


def test_manual_stages_and_their_warm_up():
    config = ParallelConfig(mode="manual", pipefusion_degree=2, ring_degree=2, stage_blocks="1,3")

    (roomy, _), (tight, _) = (choose_placement(config, model_of(weights), Devices([100] * 4)) for weights in (30, 60))

    assert roomy == Stages(2, 2, (1, 3), every_block=True) and tight == Stages(2, 2, (1, 3))
    assert warmup_layout(config.layout, roomy) == Layout(ring_degree=4)
    assert warmup_layout(config.layout, tight) == config.layout


def test_a_unet_shares_out_branches_and_images_alone():
    """By itself nothing approximate; what needs tokens is refused."""
    layouts = [choose_layout(ParallelConfig(), devices, branches, AttentionHeads("SDXL", None))
               for devices, branches in ((1, 2), (2, 2), (3, 2), (4, 2), (2, 1))]

    assert layouts == [Layout(), Layout(cfg_degree=2), Layout(data_degree=3), Layout(cfg_degree=2, data_degree=2),
                       Layout(data_degree=2)]
    for name in ("ring_degree", "ulysses_degree", "pipefusion_degree", "tensor_degree"):
        with pytest.raises(ConfigError, match=f"{name}=2 splits .* and SDXL is a U-Net"):
            choose_layout(ParallelConfig(mode="manual", **{name: 2}), 2, 2, AttentionHeads("SDXL", None))
