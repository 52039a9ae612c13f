"""The report of tolerances: the largest error of each test stands beside what it allows, and too much or NaN fails."""

import pytest
import torch

from tests.support.tolerances import COMPARISONS, Comparison, close, report, within


def test_an_error_above_its_tolerance_fails_and_is_remembered(request):
    close(torch.tensor([3.0, 4.001]), torch.tensor([3.0, 4.0]), 1e-3)
    with pytest.raises(AssertionError, match="off by 0.5, where 0.1 is allowed: euler"):
        within(0.5, 0.1, "euler")
    with pytest.raises(AssertionError):
        within(float("nan"), 0.1)

    made = [one for one in COMPARISONS if one.test == request.node.nodeid]
    assert [one.tolerance for one in made] == [1e-3, 0.1, 0.1]
    assert made[0].error == pytest.approx(2e-4, rel=0.01)
    del COMPARISONS[-3:]


def test_the_loosest_tolerance_comes_first():
    made = [Comparison("a.py::tight[1]", 1e-5, 1e-4), Comparison("a.py::loose", 1e-7, 1e-2),
            Comparison("a.py::tight[2]", 5e-5, 1e-4)]

    assert report(made) == ["   1.0e-07 of 1.0e-02  a.py::loose", "   5.0e-05 of 1.0e-04  a.py::tight"]
