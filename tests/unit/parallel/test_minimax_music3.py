"""MiniMax Music 3, whose forward passes through all blocks once for each window: each method equals one device in
float64."""

import pytest

from tests.support.compare_single_device import Saved, errors_of_saved, execute, layouts_of, save, words
from tests.support.model_zoo import example, lacks_module
from tests.support.tolerances import within
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.models import FAMILIES

NAME, TOLERANCE = "MiniMax Music 3", 1e-9
LAYOUTS = [layout for count in (1, 2) for layout in layouts_of(NAME, count)]
SIZES = {"rows": 30, "columns": 40}        # 1201 latent frames, which are three windows
pytestmark = pytest.mark.skipif(lacks_module(FAMILIES[NAME]), reason=f"no {FAMILIES[NAME].transformer}")


@pytest.fixture
def saved(tmp_path):
    branches = [example(NAME, num_text_tokens=tokens, seed=seed, **SIZES) for seed, tokens in enumerate((440, 300))]
    return Saved(NAME, branches, save(branches[0], tmp_path))


@pytest.mark.parametrize("count, weights_memory", [(2, 0), *(pytest.param(*case, marks=pytest.mark.slow)
                                                            for case in ((4, 0), (2, 1)))])
def test_every_method_equals_one_device(saved, count, weights_memory):
    """With weights on the devices, or streamed from system RAM once for each window."""
    requested = [(NAME, layout) for layout in LAYOUTS if words(layout).count(" x ") == count // 2 - 1]

    outcomes = errors_of_saved(requested, lambda name: saved, count, weights_memory)

    assert requested and [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)] == []
    within(max(outcomes.values()), TOLERANCE)


def execute_with_other_positions(rank, world_size, runs):
    """Rotate each token as the one before it, where tokens are split."""
    cut = Hooks._cut_once
    Hooks._cut_once = lambda self, context, position, value, argument: cut(
        self, context, position, value.roll(1, argument.dim), argument)
    execute(rank, world_size, runs)


def test_other_positions_are_noticed(saved):
    ring = next(layout for layout in LAYOUTS if words(layout) == "ring")

    [error] = errors_of_saved([(NAME, ring)], lambda name: saved, 2,
                              execute=execute_with_other_positions).values()

    assert error > 100 * TOLERANCE
