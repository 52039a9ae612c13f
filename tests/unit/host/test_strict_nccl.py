"""Real workers whose groups are joined by the simulation of NCCL, driven by the host as over gloo."""

from pathlib import Path

import pytest

from tests.support.strict_nccl import server
from tests.support.strict_nccl.referee import QUEUES
from tests.support.tolerances import within
from tests.unit.host.conftest import call_of, decode, decoded, layout
from tests.unit.host.test_pipefusion import oracle, sample, small
from xdit_backend.host.client import Client
from xdit_backend.host.forkserver import Forkserver
from xdit_backend.protocol.specs import Layout, Stages


@pytest.fixture(scope="module")
def strict_forkserver():
    """With the simulation on the path of what is forked from it."""
    supervisor = Forkserver()
    yield supervisor
    supervisor.close()


@pytest.mark.slow
@pytest.mark.parametrize("queues", QUEUES)
def test_a_run_of_real_workers_keeps_nccls_rules(monkeypatch, tmp_path, strict_forkserver, spec_of, queues):
    """Steps of a ring, patches of stages with receives posted ahead, warm-up steps of all ranks, a decode."""
    one, stages = small("SD3"), Stages(2, every_block=True)
    with server.strict_world(tmp_path, queues) as world:
        monkeypatch.setenv("PYTHONPATH", str(Path(server.__file__).parent / "in_workers"))
        monkeypatch.setenv("XDIT_STRICT_NCCL", f"{world.address}:{queues}")
        client = Client(("cpu", "cpu"), supervisor=strict_forkserver)
        try:
            ring, = client.predict(spec_of("SD3"), layout(ring=2), 4, [call_of(one)])
            run = sample(client, spec_of("SD3", stages=stages), one, Layout(pipefusion_degree=2), 4, 2)
            image = decode(client)
        finally:
            client.close()

    within((ring - one.run()).abs().max(), 1e-6)
    within((run - oracle(one, 4, 2)).abs().max(), 1e-6)
    within((image - decoded()).abs().max(), 1e-6)
    referee, = world.referees.values()
    assert not referee.failure and referee.num_operations["p2p"] > 20 and referee.num_operations["all_to_all"] > 1
