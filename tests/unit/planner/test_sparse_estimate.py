"""The estimate counts the part of self-attention that block-sparse attention computes."""

from dataclasses import replace

import pytest

from xdit_backend.planner.cost_model import (
    Degrees,
    Device,
    Job,
    Links,
    ModelDims,
    Run,
    Tokens,
    attended_fraction,
    block_time,
)
from xdit_backend.protocol.specs import SparseOptions

DIMS = ModelDims(40, 5120, 40, 12.0, 14e9, joint=False)
JOB = Job(64 * 512, 0, 20)


@pytest.mark.parametrize("sparse, fraction", [
    (SparseOptions("sla", keep_percent=10.0, start_percent=0.0), 0.1 + 3 / 512 + 1 / 64),
    (SparseOptions("sol-attn", tau=1.0, start_percent=0.0), 0.1587 + 3 / 512 + 1 / 64),
    (SparseOptions("sla", keep_percent=10.0, start_percent=0.2, end_percent=0.7), 0.5 + 0.5 * (0.1 + 3 / 512 + 1 / 64)),
    (SparseOptions("sla", keep_percent=10.0, start_percent=0.0, dense_blocks=tuple(range(20))),
     0.5 + 0.5 * (0.1 + 3 / 512 + 1 / 64)),
    (SparseOptions("sla", min_tokens=64 * 513), 1.0), (None, 1.0)])
def test_the_fraction_is_that_of_the_selected_blocks(sparse, fraction):
    assert attended_fraction(DIMS, replace(JOB, sparse=sparse), JOB.tokens, 0) == pytest.approx(fraction, abs=1e-4)


def test_a_sparse_block_takes_less_time():
    device, tokens = Device(1e14, 1e14, 1e12), Tokens(1, JOB.tokens, 0)
    sparse = SparseOptions("sla", keep_percent=10.0, start_percent=0.0)
    dense_s, sparse_s = (block_time(Run(DIMS, replace(JOB, sparse=each), Degrees(), device, Links()), tokens).compute
                         for each in (None, sparse))

    attention_s = 4 * JOB.tokens ** 2 * DIMS.width / 1e14 * (1 + device.half_keys / JOB.tokens)
    assert dense_s - sparse_s == pytest.approx((1 - attended_fraction(DIMS, replace(JOB, sparse=sparse), JOB.tokens, 0))
                                               * attention_s)
