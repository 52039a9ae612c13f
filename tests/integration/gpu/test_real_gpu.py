"""What bench card measures of a model is what bench size counts of it."""

import pytest

from tests.support.tolerances import within
from tests.unit.tools.dry_run.rows import spec_of, tiny
from xdit_backend.protocol.specs import Layout
from xdit_backend.tools.dry_run.real_gpu import FIRST_STEPS, measure
from xdit_backend.tools.dry_run.simulated_rank import count

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["Flux.1", "Wan", "SDXL"])
def test_a_model_takes_what_was_counted(name):
    checkpoint, run = tiny(name)
    spec = spec_of(checkpoint, Layout())
    counted = count(checkpoint, spec, Layout(), 0, run)

    seconds, weight_bytes, peak_bytes = measure(checkpoint, spec, run, "", 2)

    assert len(seconds) == FIRST_STEPS + 2
    within(weight_bytes / counted.weight_bytes - 1, 0.1)       # small tensors take 512 bytes each
    assert peak_bytes < counted.peak_bytes + 2 ** 26           # and kernels have workspaces
