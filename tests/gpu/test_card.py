"""What bench card measures of a model is what bench size counts of it."""

import pytest

from tests.dry_run.rows import spec_of, tiny
from tests.tolerances import within
from xdit_backend.dry_run.card import FIRST_STEPS, measure
from xdit_backend.dry_run.rank import count
from xdit_backend.protocol.specs import Layout

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
