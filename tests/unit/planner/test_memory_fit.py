"""Settings that would fit: on more devices, and after memory ran out, by estimates scaled to the measured use."""

import re

import pytest

from xdit_backend.config import ParallelConfig
from xdit_backend.planner.cost_model import Degrees, Job, ModelDims
from xdit_backend.planner.memory_fit import (
    MOST_SUGGESTED,
    Hints,
    Latents,
    Measured,
    Method,
    layouts_that_fit,
    placement_that_fits,
    sizes_that_fit,
)
from xdit_backend.planner.memory_model import Memory, rank_memory
from xdit_backend.planner.planner import memory_settings
from xdit_backend.protocol.specs import Stages

NET = ModelDims(60, 3072, 24, 12.0, 12e9, weight_bytes=24e9, outside_bytes=0.4e9)
JOB, ONE_IMAGE = Job(4096, 512, 20, branches=2), Job(4096, 512, 20)
CFG = Degrees(cfg=2)


def measured(total, run, weights=24e9):
    return Measured("cuda:1", weights, run, total)


def test_a_run_that_took_more_than_estimated_is_cut_by_what_it_took():
    """The estimate is 1 GB an image; it took 3 GB an image."""
    latents = Latents(lambda images, sizes: Memory(0.0, 0.0, images * 1e9 * sizes[0] * sizes[1] / 10000), 4, (100, 100),
                      (8, 8))

    words = sizes_that_fit(measured(24e9 + 9.5e9, 12e9), latents, Hints())

    assert words[0] == "at most 3 of the 4 images at once"
    assert re.fullmatch(r"at most 7\d\d x 7\d\d pixels instead of 800 x 800", words[1])        # sqrt(9.5 / 12) of 800


def test_types_of_weights_are_named_that_leave_the_run_what_it_took():
    latents = Latents(lambda images, sizes: Memory(0.0, 0.0, 1e9), 1, (2, 2), (8, 8))
    lighter = {"fp8_e4m3fn": [12e9], "int8": [20.5e9]}

    assert sizes_that_fit(measured(24e9, 4e9), latents, Hints(lighter=lambda: lighter)) == [
        "weight_dtype fp8_e4m3fn (12 GB of weights)"]


@pytest.mark.parametrize("method, text", [
    (Method(CFG), "ulysses_degree=2 "), (Method(CFG, ("ulysses",)), "tensor_degree=2 "),
    (Method(CFG, ("ulysses", "tensor")), None), (Method(CFG, ("ulysses", "tensor"), True), "pipefusion_degree=2 ")])
def test_another_method_on_the_same_devices_is_named_that_fits(method, text):
    """Ulysses halves the activations of the run, tensor parallelism and PipeFusion the weights."""
    run = rank_memory(NET, JOB, CFG).activations
    has_capacity = measured(24e9 + 0.8 * run, run) if text and "ulysses" in text else measured(24e9, run)

    words = layouts_that_fit(has_capacity, NET, JOB, method)

    assert bool(words) is bool(text) and all(word.startswith((text or "", "tensor_degree=2")) for word in words)


def test_no_method_is_named_that_would_run_out_as_well():
    run = rank_memory(NET, JOB, CFG).activations

    assert layouts_that_fit(measured(5e9, run), NET, JOB, Method(CFG, (), True)) == []
    assert layouts_that_fit(measured(24e9, 50 * run), NET, JOB, Method(CFG)) == []


def needed(degree):
    return rank_memory(NET, ONE_IMAGE, Degrees(pipefusion=degree, num_patches=2 * degree),
                       memory_settings(ParallelConfig(), Stages(2))).total


@pytest.mark.parametrize("degree", [3, 12])
def test_the_least_number_of_devices_is_told(degree):
    assert needed(degree) < needed(degree - 1)

    assert placement_that_fits(ParallelConfig(), NET, {}, ONE_IMAGE, needed(degree)) == [
        f"pipefusion_degree={degree} on as many devices like these"]


def test_more_devices_than_people_have_are_not_told():
    assert MOST_SUGGESTED < 20 and needed(20) < needed(15)

    assert placement_that_fits(ParallelConfig(), NET, {}, ONE_IMAGE, needed(20)) == []
