"""Half precision: what workers round differs from ComfyUI's float32 result as much as what ComfyUI's own model rounds,
and not more.

One pair by default, others with --all; `python -m tests.programs.half_precision` prints the figures of all.
"""

import pytest

from tests.programs.half_precision import errors
from tests.support.tolerances import within

LIMIT = 1.5                                # of the distance of ComfyUI's own half precision to its float32
LEAST = 0.3                                # what does not round at all is nearer by far
FEW = ("sd3", "bf16"),
PAIRS = [*FEW, ("wan", "fp16"), ("sd3", "fp16"), ("wan", "bf16"), ("flux", "bf16")]


@pytest.mark.parametrize("kind, dtype",
                         [pytest.param(*pair, marks=([] if pair in FEW else pytest.mark.slow)) for pair in PAIRS])
def test_half_precision_is_as_near_to_float32_as_comfyuis_own(comfyui, kind, dtype):
    """Under every method; of PipeFusion and displaced patches the steps that are exact."""
    _, ratios = errors(comfyui, kind, dtype)

    within(max(ratios.values()), LIMIT, ratios)
    assert min(ratios.values()) > LEAST
