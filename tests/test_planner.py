"""The automatic choice, and a person's."""

from dataclasses import replace

import pytest

from xdit_backend.config import DEGREES, ParallelConfig, validate, validate_layout, validate_stages
from xdit_backend.forecast.choice import Machine, candidates, further_candidates
from xdit_backend.forecast.cost import Device, Job, Links, Net
from xdit_backend.forecast.memory import rank_memory, working_share
from xdit_backend.planner import choose_layout, choose_num_patches, choose_stages, degrees_of, warmup_layout
from xdit_backend.protocol.errors import ConfigError
from xdit_backend.protocol.messages import Layout, Stages


def model_of(weight_bytes):
    return Net(57, 3072, 24, 12.0, 11.9e9, weight_bytes=weight_bytes)


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


@pytest.mark.parametrize("devices", [2, 3, 4, 6, 8])
def test_every_candidate_passes_validation(devices):
    """As degrees of manual mode, which the nodes refuse where they cannot work."""
    net = Net(28, 1536, 24, 12.0, 1e9, key_heads=8)
    rates = {(name, 2): 1e10 for name in ("all_to_all", "hop", "all_reduce", "gather")}
    machine = Machine((Device(1e14, 1e14, 1e12),) * devices, Links(rates))
    job = Job(4096, 128, 20, branches=2, images=2)
    for degrees in (*candidates(net, job, devices), *further_candidates(net, job, machine)):
        chosen = {name: getattr(degrees, name.removesuffix("_degree")) for name in DEGREES}
        config = ParallelConfig(mode="manual", num_patches=degrees.num_patches, **chosen)

        validate(config, devices)
        validate_layout(config.layout, net.heads, "this model", net.key_heads)
        validate_stages(config, net.blocks, "this model")


def test_manual_takes_the_degrees_given():
    config = ParallelConfig(mode="manual", ring_degree=2)

    assert choose_layout(config, 2, 2, 24, "this model") == Layout(ring_degree=2)


def test_manual_refuses_degrees_that_do_not_fit_the_model():
    with pytest.raises(ConfigError, match="ulysses_degree=2 does not divide this model's 7 attention heads"):
        choose_layout(ParallelConfig(mode="manual", ulysses_degree=2), 2, 1, 7, "this model")


@pytest.mark.parametrize("asked, num_stages, rows, columns, sequence_degree, expected", [
    (0, 2, 128, 128, 1, 4), (0, 3, 128, 128, 1, 6), (0, 2, 6, 64, 1, 3), (8, 2, 8, 16, 2, 4), (8, 2, 8, 2, 2, 2), (1, 4, 64, 64, 1, 1),
    (5, 1, 64, 64, 1, 5), (3, 2, 2, 2, 1, 1)])
def test_number_of_patches(asked, num_stages, rows, columns, sequence_degree, expected):
    """Chosen: twice the stages; fewer where the latent has too few rows, or a row too few tokens for the sequence ranks."""
    assert choose_num_patches(asked, num_stages, (1, 4, rows, columns), (2, 2), sequence_degree) == expected


@pytest.mark.parametrize("layout, stages, batch, expected", [
    (Layout(), None, 2, 1), (Layout(cfg_degree=2), None, 2, 1 / 2), (Layout(ulysses_degree=2, ring_degree=2), None, 6, 1 / 4),
    (Layout(data_degree=2), None, 2, 1), (Layout(data_degree=2), None, 6, 2 / 3), (Layout(cfg_degree=2, ring_degree=2), None, 8, 1 / 4),
    (Layout(pipefusion_degree=2), Stages(2), 4, 1 / 2), (Layout(pipefusion_degree=2), Stages(2, every_block=True), 4, 1 / 4),
    (Layout(cfg_degree=2, pipefusion_degree=2, ulysses_degree=2), Stages(2, 2), 2, 1 / 4), (Layout(), None, 1, 1)], ids=str)
def test_a_ranks_share_of_the_activations(layout, stages, batch, expected):
    """batch: of both branches. One image cannot be shared; stages take one branch after the other, and all rows of it to warm up."""
    branches = 2 - batch % 2
    job = Job(4096, 0, 20, branches, images=batch // branches)
    assert working_share(job, degrees_of(layout, ParallelConfig(), stages), branches_apart=True) == expected


def test_bytes_of_stale_keys_and_values():
    """Two branches of one image, 100 tokens of width 64 in half precision, 5 blocks in two stages; forecasts need two steps'."""
    net, job = Net(5, 64, 4, 12.0, 1e6), Job(100, 0, 20, branches=2)

    def kept(offload=False, is_forecast=False, **degrees):
        return rank_memory(net, job, degrees_of(Layout(pipefusion_degree=2, **degrees), ParallelConfig()), steps_kept=1 + is_forecast,
                           offload=offload).keys_values

    assert kept() == 2 * 2 * 100 * 64 * 3 * 2
    assert kept(is_forecast=True) == 2 * 2 * 2 * 100 * 64 * 3 * 2
    assert kept(ulysses_degree=2, cfg_degree=2) == 2 * 100 * 64 * 3 * 2 // 2
    assert kept(offload=True, is_forecast=True) == 0


def test_auto_spreads_weights_only_where_one_device_cannot_hold_them():
    gigabyte = 2 ** 30
    small, large = model_of(12 * gigabyte), model_of(24 * gigabyte)
    assert choose_stages(ParallelConfig(), 2, small, [24 * gigabyte] * 2) is None
    assert choose_stages(ParallelConfig(), 1, large, [12 * gigabyte] * 1) is None
    assert choose_stages(ParallelConfig(), 2, large, [16 * gigabyte] * 2) == Stages(2)
    assert choose_stages(ParallelConfig(), 4, large, [16 * gigabyte] * 4) == Stages(2, sequence_degree=2)
    assert choose_stages(ParallelConfig(), 4, large, [8 * gigabyte] * 4) == Stages(4)
    assert choose_stages(ParallelConfig(), 4, large, [gigabyte] * 4) == Stages(4)
    assert choose_stages(ParallelConfig(), 2, replace(large, outside_bytes=23 * gigabyte), [16 * gigabyte] * 2) == Stages(2)
    assert choose_stages(ParallelConfig(), 4, replace(large, outside_bytes=4 * gigabyte), [16 * gigabyte] * 4) == Stages(4)
    layout = choose_layout(ParallelConfig(), 4, 2, 24, "this model", Stages(2, sequence_degree=2))
    assert layout == Layout(pipefusion_degree=2, ulysses_degree=2)


def test_manual_stages_and_their_warm_up():
    config = ParallelConfig(mode="manual", pipefusion_degree=2, ring_degree=2, stage_blocks="1,3")

    roomy, tight = (choose_stages(config, 4, model_of(weights), [100] * 4) for weights in (30, 60))

    assert roomy == Stages(2, 2, (1, 3), every_block=True) and tight == Stages(2, 2, (1, 3))
    assert warmup_layout(config.layout, roomy) == Layout(ring_degree=4)
    assert warmup_layout(config.layout, tight) == config.layout


def test_a_unet_shares_out_branches_and_images_alone():
    """By itself nothing approximate; what needs tokens is refused."""
    layouts = [choose_layout(ParallelConfig(), devices, branches, None, "SDXL")
               for devices, branches in ((1, 2), (2, 2), (3, 2), (4, 2), (2, 1))]

    assert layouts == [Layout(), Layout(cfg_degree=2), Layout(data_degree=3), Layout(cfg_degree=2, data_degree=2), Layout(data_degree=2)]
    with pytest.raises(ConfigError, match="ring_degree=2 shares out .* and SDXL is a U-Net"):
        choose_layout(ParallelConfig(mode="manual", ring_degree=2), 2, 2, None, "SDXL")
