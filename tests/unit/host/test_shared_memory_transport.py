"""Real workers that exchange through shared memory: their results, ports and failures."""

import os
import signal

import psutil
import pytest
import torch

from tests.support.model_zoo import example
from tests.unit.host.conftest import call_of, layout
from tests.unit.host.test_security import listening_ports, ports_of
from xdit_backend.host.client import Client
from xdit_backend.protocol.errors import WorkerDiedError, WorkerStartError


@pytest.fixture
def over_shared_memory(monkeypatch):
    monkeypatch.setenv("XDIT_TRANSPORT", "shared_memory")
    client = Client(("cpu", "cpu"))
    yield client
    client.close()


def test_workers_have_the_bits_of_gloos_open_no_port_and_a_dead_one_is_named(client, over_shared_memory, spec_of):
    spec, before = spec_of("SD3"), listening_ports(psutil.Process())
    for degrees in ({"ulysses": 2}, {"ring": 2}):
        arguments = spec, layout(**degrees), 4, [call_of(example("SD3"))]
        assert torch.equal(over_shared_memory.predict(*arguments)[0], client.predict(*arguments)[0])

    assert not ports_of(over_shared_memory) and listening_ports(psutil.Process()) <= before
    os.kill(int(over_shared_memory.report_memory()[1]["pid"]), signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 1"):
        over_shared_memory.predict(*arguments)


def test_a_transport_that_workers_cannot_use_is_rejected(monkeypatch):
    monkeypatch.setenv("XDIT_TRANSPORT", "nccl")

    with pytest.raises(WorkerStartError, match="Remove the environment variable XDIT_TRANSPORT"):
        Client(("cpu", "cpu")).report_memory()
