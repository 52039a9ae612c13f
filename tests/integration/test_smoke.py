"""Every family under every method: a step of two ranks equals one device. And products of methods, drawn.

`start.py test --smoke` runs one method of each family alone, in a minute; `--smoke-seed` draws the same again.
tests/programs/products.py runs all products.
"""

import functools
import random

import pytest
import torch

from tests.support.compare_single_device import (
    EXACT,
    as_folder,
    can_run,
    errors_of,
    errors_of_saved,
    execute,
    layouts_of,
    layouts_on,
    words,
)
from tests.support.model_zoo import lacks_module
from tests.support.tolerances import within
from xdit_backend.models import FAMILIES
from xdit_backend.parallel import tensor_parallel
from xdit_backend.protocol.specs import Layout

NUM_PRODUCTS = 16
NAMES = [name for name, family in FAMILIES.items() if not lacks_module(family)]      # of which ComfyUI has the class
TENSOR = Layout(tensor_degree=4), Layout(data_degree=2, tensor_degree=2)


def pytest_generate_tests(metafunc):
    """Every family with each method that it can have; one of them, drawn, is in the smoke test."""
    seed, rows = metafunc.config.option.smoke_seed, []
    for name in NAMES:
        layouts = layouts_of(name, 1)
        drawn = random.Random(f"{seed} {name}").choice(layouts)
        rows += [pytest.param(name, layout, marks=[pytest.mark.smoke] if layout == drawn else [],
                              id=f"{name}-{words(layout)}")
                 for layout in layouts]
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("name, layout", rows)


@pytest.fixture(scope="module")
def errors(request, tmp_path_factory):
    requested = [item.callspec.params for item in request.session.items if item.path == request.path
             and hasattr(item, "callspec")]
    return errors_of([(params["name"], params["layout"]) for params in requested if "layout" in params],
                     tmp_path_factory.mktemp("smoke"), 2, seed=request.config.option.smoke_seed)


def test_a_step_of_two_ranks_equals_one_device(errors, name, layout):
    outcome = errors[name, layout]
    if isinstance(outcome, Exception):
        raise outcome

    within(outcome, EXACT)


@pytest.mark.slow
def test_a_step_whose_weights_come_from_host_memory_equals_one_device_under_every_method(tmp_path):
    """Of every family, with as few of them on the device as can be; PipeFusion's stages of two blocks keep theirs."""
    requested = [(name, layout) for name in NAMES if not FAMILIES[name].plan.is_unet
             for layout in layouts_of(name, 1)]
    wrong = {f"{name}, {words(layout)}": error
             for (name, layout), error in errors_of(requested, tmp_path, 2, weights_memory=1).items()
             if isinstance(error, Exception) or not error <= EXACT}

    assert not wrong


def test_steps_under_products_of_two_methods_that_are_drawn_equal_one_device(request, tmp_path):
    """One of two branches whose texts are unlike in length, and one of such that are alike in that alone."""
    seed = request.config.option.smoke_seed
    every = [(name, layout) for name in NAMES for layout in layouts_of(name, 2)]
    requested = random.Random(seed).sample(every, NUM_PRODUCTS)

    assert not wrong_of(requested, tmp_path, 4, (7, 9, 7), seed)


def wrong_of(requested, folder, world_size, texts, seed):
    """{product: error, or what was raised} of those that are not one device's."""
    return {f"{name}, {words(layout)}": error
            for (name, layout), error in errors_of(requested, folder, world_size, texts, seed=seed).items()
            if isinstance(error, Exception) or not error <= EXACT}


@pytest.mark.parametrize("product", TENSOR, ids=words)
def test_steps_of_sampled_families_under_tensor_parallelism_of_four_ranks_equal_one_device(request, tmp_path, product):
    """Shards of a quarter of the weights, and shards of half of them with images split across two such groups."""
    seed = request.config.option.smoke_seed
    able = [name for name in NAMES if can_run(name, product)]
    assert able

    requested = [(name, product) for name in random.Random(f"{seed} {words(product)}").sample(able, 3)]
    assert not wrong_of(requested, tmp_path, 4, (7, 9), seed)


def adding_two_ranks(rank, world_size, runs):
    """compare_single_device.execute, with nothing of the other ranks in sums over the tensor axis."""
    start = tensor_parallel.start_all_reduce
    tensor_parallel.start_all_reduce = lambda tensors, *others: start(
        [tensor if rank < 2 else torch.zeros_like(tensor) for tensor in tensors], *others)
    try:
        execute(rank, world_size, runs)
    finally:
        tensor_parallel.start_all_reduce = start


@pytest.mark.parametrize("product", TENSOR, ids=words)
def test_a_sum_over_too_few_of_four_ranks_shows(tmp_path, product):
    saved_of = functools.partial(as_folder, folder=tmp_path, num_text_tokens=(7, 9))
    error, = errors_of_saved([("SD3", product)], saved_of, 4, execute=adding_two_ranks).values()

    assert error > 1e-3


@pytest.mark.slow
@pytest.mark.everyone
@pytest.mark.parametrize("name", FAMILIES)
def test_every_layout_of_four_devices_equals_one_device(request, tmp_path, name):
    requested = [(name, layout) for layout in layouts_on(name, 4)]

    assert not wrong_of(requested, tmp_path, 4, (7, 9, 7), request.config.option.smoke_seed)


@pytest.mark.slow
def test_sampled_layouts_of_eight_devices_equal_one_device(request, tmp_path):
    seed = request.config.option.smoke_seed
    every = [(name, layout) for name in NAMES for layout in layouts_on(name, 8)]

    assert not wrong_of(random.Random(seed).sample(every, NUM_PRODUCTS), tmp_path, 8, (7, 9, 7), seed)
