"""The measures of `bench drift`."""

import pytest
import torch

from tests.tolerances import within
from xdit_backend.bench.drift import errors_of, extrapolated


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


def test_a_rounded_slope_is_nearly_the_slope():
    calls = calls_along(lambda time: 3 - 2 * time)

    for dtype, allowed in ((torch.bfloat16, 0.01), (torch.float8_e4m3fn, 0.1)):
        rounded = extrapolated(calls[:3], 0.1, 1.0, 1, dtype)
        assert 0 <= (rounded - calls[3][1]).abs().max() < allowed
