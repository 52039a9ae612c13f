"""The measures of `bench drift`."""

import argparse

import pytest
import torch
import torch.nn.functional as F

from tests.support.tolerances import within
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.hooks.function_overrides import FunctionOverrides
from xdit_backend.tools.bench.drift import errors_of, extrapolated, seen_by_attentions
from xdit_backend.tools.bench.quality import DEMO, load_recogniser


def calls_along(polynomial):
    return [(time, torch.full((2, 1, 1, 3, 2), polynomial(time), dtype=torch.float64)) for time in (1.0, 0.8, 0.5, 0.1)]


@pytest.mark.parametrize("order, polynomial",
                         [(1, lambda time: 3 - 2 * time), (2, lambda time: 3 - 2 * time + 5 * time * time)])
def test_drift_of_its_order_is_foretold(order, polynomial):
    """From the call on that has enough before it; and not by none, nor by one order less."""
    calls = calls_along(polynomial)

    within((extrapolated(calls[:3], 0.1, 1.0, order) - calls[3][1]).abs().max(), 1e-12)
    within(errors_of(calls, 1.0, order)[-1], 1e-6)
    assert errors_of(calls, 0.0, order)[-1] > 1e-2 and (order == 1 or errors_of(calls, 1.0, 1)[-1] > 1e-2)


def test_what_attentions_see_is_seen_without_changing_torch(monkeypatch):
    """Each self-attention of the demo model, in each step, for both branches; and the model draws as it does."""
    before, options = vars(F).copy(), argparse.Namespace(steps=2, sampler="euler", guidance=3.0)
    seen, placed = seen_by_attentions(DEMO, load_recogniser()[2][:1], options), []

    assert len(seen) == len(open_checkpoint(str(DEMO)).meta_model().transformer_blocks)
    assert all(len(calls) == 2 and calls[0][1].shape[:2] == (2, 2) for calls in seen)
    assert not any(torch.equal(calls[0][1], calls[1][1]) for calls in seen)
    assert vars(F) == before
    monkeypatch.setattr(FunctionOverrides, "place", lambda self, module: placed.append(module))
    assert seen_by_attentions(DEMO, load_recogniser()[2][:1], options) == [] and len(placed) == len(seen)


def test_a_rounded_slope_is_nearly_the_slope():
    calls = calls_along(lambda time: 3 - 2 * time)

    for dtype, allowed in ((torch.bfloat16, 0.01), (torch.float8_e4m3fn, 0.1)):
        rounded = extrapolated(calls[:3], 0.1, 1.0, 1, dtype)
        assert 0 <= (rounded - calls[3][1]).abs().max() < allowed
