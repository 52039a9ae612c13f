"""How far from its reference each result was: every comparison of numbers in the tests goes through here.

`start.py test --tolerances` prints, for each test, the largest error that was met beside the one that is allowed.
"""

import os
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode

COMPARISONS = []                           # of this run, in the order they were made


@dataclass(frozen=True)
class Comparison:
    test: str
    error: float
    tolerance: float


def relative_error(result, reference):
    """Euclidean norm of the difference, in units of the reference's.
    Of several tensors (a list or tuple, or ComfyUI's nested one), the largest."""
    if not torch.is_tensor(result):
        return max(relative_error(*pair) for pair in zip(_parts(result), _parts(reference), strict=True))
    return ((result - reference).norm() / reference.norm()).item()


def _parts(tensors):
    return tensors if isinstance(tensors, (list, tuple)) else tensors.unbind()


def close(result, reference, tolerance, case=None):
    """Fail unless the relative error is below the tolerance. case: what to name when it is not."""
    within(relative_error(result, reference), tolerance, case)


def within(error, tolerance, case=None):
    """Fail unless this error is below the tolerance, and remember both. NaN fails."""
    test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]
    COMPARISONS.append(Comparison(test, float(error), tolerance))
    assert error < tolerance, f"off by {error:.2g}, where {tolerance:.2g} is allowed" + (f": {case}" if case else "")


def report(comparisons):
    """Lines of a table: of each test (all its parameters together) the largest error beside its tolerance,
    the loosest first."""
    worst = {}
    for one in comparisons:
        name = one.test.partition("[")[0], one.tolerance
        worst[name] = max(worst.get(name, 0.0), one.error)
    rows = sorted(worst.items(), key=lambda row: row[1] / row[0][1])
    return [f"{error:10.1e} of {tolerance:7.1e}  {test}" for (test, tolerance), error in rows]


class InDouble(TorchFunctionMode):
    """What models compute in float32 though they are in float64 (norms, rotations) stays in float64 under this.

    Where partial sums are added in another order, a number may round to the float32 above instead of the one below,
    1e-7 away.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        to_float = (function is torch.Tensor.float or function is torch.Tensor.to
                    and torch.float32 in (*args[1:], *kwargs.values()))
        return args[0] if to_float and args[0].dtype == torch.float64 else function(*args, **kwargs)


def unrounded(tensor_degree):
    """InDouble where the layers are spread, whose sums are added in another order than one device's; else nothing."""
    return InDouble() if tensor_degree > 1 else nullcontext()
