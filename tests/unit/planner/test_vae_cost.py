"""How long a decode takes on so many devices, and how many of them should share it."""

import itertools
from dataclasses import replace

import pytest

from xdit_backend.planner.cost_model import Device, Links
from xdit_backend.planner.layout_search import Machine
from xdit_backend.planner.vae_cost import Work, choose_ranks, work_seconds

CARD = Device(100e12, 100e12, 1e12, collective_launch_s=1e-4)
LARGE, SMALL = Work(10e12, 20e9, 60, 50e6), Work(0.1e12, 0.2e9, 60, 2e6)


def machine(count, rate=20e9, latency_s=3e-5, device=CARD):
    return Machine((device,) * count, Links({("hop", 2): rate}, latency_s))


@pytest.mark.parametrize("work, made, expected", [
    (LARGE, machine(2), (2, 0)), (SMALL, machine(2), (1, 0)),
    (SMALL, machine(2, latency_s=1e-6, device=replace(CARD, collective_launch_s=0)), (2, 0)),
    (LARGE, machine(2, rate=5e8), (1, 0)), (LARGE, machine(1), (1, 0)),
    (LARGE, Machine((CARD, CARD.slower(10)), machine(2).links), (1, 0)),
    (LARGE, Machine((CARD.slower(10), CARD), machine(2).links), (1, 1)),
    (SMALL, Machine((CARD.slower(2), CARD.slower(3), CARD), machine(2).links), (1, 2))],
    ids=["large", "small", "small-quick-links", "slow-links", "one", "a-slow-second", "a-slow-first", "a-fast-last"])
def test_a_image_is_shared_by_the_devices_that_make_it_faster(work, made, expected):
    assert next(iter(choose_ranks(work, made, len(made.devices)))) == expected


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_what_is_chosen_is_no_more_than_5_percent_behind_the_fastest(count):
    for work, rate in itertools.product((LARGE, SMALL, Work(1.0, 1.0, 0, 0), Work(1e20, 1e15, 1e6, 1e12)),
                                        (1e6, 1e9, 1e12)):
        made = machine(count, rate)
        chosen = choose_ranks(work, made, count)

        assert max(chosen.values()) <= 1.05 * min(work_seconds(work, made, ranks) for ranks in range(1, count + 1))
        assert list(chosen) == sorted(chosen) and {first for _, first in chosen} == {0}


def test_a_faster_link_or_device_is_never_slower():
    slow = work_seconds(LARGE, machine(4, rate=1e9), 4)

    assert work_seconds(LARGE, machine(4, rate=2e9), 4) < slow
    assert work_seconds(LARGE, machine(4, rate=1e9, device=CARD.slower(0.5)), 4) < slow


def test_rows_are_shared_out_by_speed():
    """Of two devices of which one is three times as fast, alone and together, without waits."""
    made = Machine((CARD, CARD.slower(3)), Links({("hop", 2): 1e15}, 0.0))
    work = replace(LARGE, exchanges=0)
    alone = work_seconds(work, made, 1)
    assert work_seconds(work, made, 1, 1) == pytest.approx(3 * alone)

    assert work_seconds(work, made, 2) == pytest.approx(alone * 3 / 4, rel=0.02)
