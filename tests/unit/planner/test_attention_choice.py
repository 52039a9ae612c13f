"""The choice of the fastest exact attention operator, with doubles for timings."""

import dataclasses

import pytest

from xdit_backend.planner.attention_choice import fastest_operators, with_fastest
from xdit_backend.planner.cost_model import Device
from xdit_backend.protocol.specs import OPERATOR_HEADS, OPERATOR_KEYS, operator_key

DEVICE = Device(1e14, 1e14, 1e12, name="a GPU")


def timed(**seconds):
    """A Device whose operators take these seconds, for all sizes."""
    return dataclasses.replace(DEVICE, operators={
        f"{name} {head} {keys}": each for name, each in seconds.items() for head in OPERATOR_HEADS
        for keys in OPERATOR_KEYS})


def test_the_fastest_operator_is_chosen_for_each_size():
    device = timed(sdpa=2.0, torch_flash=2.0, torch_cudnn=1.5, torch_efficient=3.0)
    device.operators["torch_flash 64 1024"] = 1.0

    found = fastest_operators([device])

    assert found["64 1024"] == found["64 1024 lse"] == "torch_flash"
    rest = {key: name for key, name in found.items() if not key.startswith("64 1024")}
    assert set(rest.values()) == {"torch_cudnn"} and len(rest) == 10


def test_sdpa_stays_unless_another_is_faster_by_more_than_noise_but_it_has_no_log_sum_exp():
    found = fastest_operators([timed(sdpa=1.0, torch_flash=0.99, torch_efficient=2.0)])

    assert {key: name for key, name in found.items() if "128 4096" in key} == {
        "128 4096": "sdpa", "128 4096 lse": "torch_flash"}


def test_all_devices_take_the_same_one_whatever_their_order():
    """The operator of the slowest device counts, and one that a device lacks is not chosen."""
    fast, slow = timed(sdpa=1.0, torch_flash=0.5, torch_cudnn=0.2, flash3=0.1), timed(sdpa=4.0, torch_flash=2.0,
                                                                                    torch_cudnn=3.0)

    assert fastest_operators([fast, slow]) == fastest_operators([slow, fast])
    assert set(fastest_operators([fast, slow]).values()) == {"torch_flash"}
    assert set(fastest_operators([fast]).values()) == {"flash3"}


def test_devices_without_timings_have_no_choice():
    assert fastest_operators([DEVICE]) == {} == fastest_operators([timed(sdpa=1.0, torch_flash=0.5), DEVICE])


@pytest.mark.parametrize("head, keys, expected", [
    (64, 1, "64 1024"), (64, 1024, "64 1024"), (128, 1025, "128 4096"), (128, 10 ** 6, "128 16384"), (72, 100, None),
    (136, 100, None)])
def test_sizes_have_classes(head, keys, expected):
    assert operator_key(head, keys, False) == expected
    assert operator_key(head, keys, True) == (expected and f"{expected} lse")


def test_estimates_follow_the_choice():
    device = timed(sdpa=2.0, torch_cudnn=1.0)
    device.operators["torch_cudnn 64 4096"] = 1.6

    faster = with_fastest(device, fastest_operators([device]))

    assert faster.attention_rate(128) == pytest.approx(2 * device.attention_rate(128))
    assert faster.attention_rate(64) == pytest.approx(1.25 * device.attention_rate(64))
    assert with_fastest(device, {}).attention_rate(128) == device.attention_rate(128)
