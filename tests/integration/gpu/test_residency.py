"""Parking on a real GPU: its memory comes free for other processes, and the weights come back the same."""

import pytest
import torch

from tests.support.model_zoo import example
from tests.unit.host.conftest import call_of, folders, layout, spec_of  # noqa: F401
from xdit_backend.host.client import Client

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cuda:0")], ids=["one rank", "two ranks on one GPU"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parked_weights_leave_the_gpu_and_come_back_the_same(devices, dtype, spec_of):  # noqa: F811
    one, spec, client = example("SD3", torch.float32, rows=16, columns=12), spec_of("SD3", dtype), Client(devices)
    try:
        degrees = {} if len(devices) == 1 else {"ulysses": 2}
        before, = client.predict(spec, layout(**degrees), 4, [call_of(one)])
        held = client.report_memory()[0]
        freed = client.models.park(spec.name, 2 ** 34, "cuda:0")
        parked = client.report_memory()[0]
        again, = client.predict(spec, layout(**degrees), 4, [call_of(one)])
    finally:
        client.close()

    assert freed >= held["weight_bytes"] > 0 and parked["weight_bytes"] == 0
    assert parked["allocated_bytes"] < held["allocated_bytes"]
    assert torch.equal(again, before)
