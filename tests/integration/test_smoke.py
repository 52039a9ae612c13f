"""Every family under every method: a step of two ranks equals one device. And products of methods, drawn.

`start.py test --smoke` runs one method of each family alone, in a minute; `--smoke-seed` draws the same again.
tests/programs/products.py runs all products.
"""

import random

import pytest

from tests.support.compare_single_device import EXACT, errors_of, layouts_of, words
from tests.support.tolerances import within
from xdit_backend.models import FAMILIES

NUM_PRODUCTS = 16


def pytest_generate_tests(metafunc):
    """Every family with each method that it can have; one of them, drawn, is in the smoke test."""
    seed, rows = metafunc.config.option.smoke_seed, []
    for name in FAMILIES:
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
    requested = [(name, layout) for name, family in FAMILIES.items() if not family.is_unet
             for layout in layouts_of(name, 1)]
    wrong = {f"{name}, {words(layout)}": error
             for (name, layout), error in errors_of(requested, tmp_path, 2, weights_memory=1).items()
             if isinstance(error, Exception) or not error <= EXACT}

    assert not wrong


def test_steps_under_products_of_two_methods_that_are_drawn_equal_one_device(request, tmp_path):
    """One of two branches whose texts are unlike in length, and one of such that are alike in that alone."""
    seed = request.config.option.smoke_seed
    every = [(name, layout) for name in FAMILIES for layout in layouts_of(name, 2)]
    requested = random.Random(seed).sample(every, NUM_PRODUCTS)
    wrong = {f"{name}, {words(layout)}": error
             for (name, layout), error in errors_of(requested, tmp_path, 4, (7, 9, 7), seed=seed).items()
             if isinstance(error, Exception) or not error <= EXACT}

    assert not wrong
