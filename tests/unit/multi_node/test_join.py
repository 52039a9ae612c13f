"""A machine joins, its ranks work as those of this machine do,
and where it is lost the group is replaced when it is back."""

import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from tests.conftest import ROOT
from tests.support.model_zoo import example
from tests.support.tolerances import within
from tests.support.worker_processes import workers_below
from tests.unit.host.conftest import call_of, decode, decoded, layout
from tests.unit.multi_node.conftest import Relay
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.host.client import Client
from xdit_backend.multi_node.listener import Listener
from xdit_backend.protocol.errors import CheckpointError, WorkerDiedError
from xdit_backend.protocol.specs import Stages


@pytest.fixture
def files(tmp_path):
    """(the model here, the folder of the other machine, where it has another name)"""
    here, there = tmp_path / "host" / "flux", tmp_path / "other" / "models" / "renamed"
    example("Flux.1").model.save_pretrained(here / "transformer")
    shutil.copytree(here, there)
    return here, there


def spec_of(folder, stages=None):
    header = open_checkpoint(folder)
    return header.spec("float32", "float32", stages)


def start_join(listener, models, tmp_path, address=None):
    """A process that joins as "other". address: of the listener, unless a relay stands before it."""
    command = [sys.executable, "-m", "xdit_backend", "join", address or f"{listener.address}:{listener.port}", "other",
               "--models", str(models)]
    joined = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"XDIT_LOG_FOLDER": str(tmp_path / "logs")},
                              stdin=subprocess.PIPE, text=True)
    joined.stdin.write(f"{listener._key.text}\n")
    joined.stdin.close()
    return joined


def worker_of(joined):
    return workers_below(joined.pid)[0]


@pytest.mark.slow
def test_ranks_on_another_machine(files, tmp_path, supervisor):
    """Two addresses of this machine stand for two; what goes between them goes through a relay,
    which is cut in the middle of a step."""
    here, there = files
    one, told = example("Flux.1"), []
    listener = Listener("127.0.0.2:0", tmp_path / "key")
    relay = Relay(listener.address, listener.port)
    joined = start_join(listener, there.parent, tmp_path, f"127.0.0.1:{relay.port}")
    client = Client(("cpu", "other/cpu"), listener, supervisor)
    client.workers.on_phase = lambda phase: told.append(phase.text)

    def predict(spec, **degrees):
        result, = client.predict(spec, layout(**degrees), 4, [call_of(one)])
        within((result - one.run()).abs().max(), 1e-5)
    try:
        whole, staged = spec_of(here), spec_of(here, Stages(2))
        for spec, degrees in ((whole, {"ulysses": 2}), (whole, {"cfg": 2}), (staged, {"pipefusion": 2})):
            predict(spec, **degrees)
        assert any(text.startswith("waiting for other to join. ") and listener.key_command("other") in text
                   for text in told)
        within((decode(client) - decoded()).abs().max(), 1e-5)
        assert client.models.park(whole.name, 2 ** 30) > 0
        assert client.models.memory(whole.name) is None        # dropped: no memory is common to all

        weights = next((there / "transformer").glob("*.safetensors"))
        content = weights.read_bytes()
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match="other: copy flux.*(no file here has its contents|has other "
                                                  "contents)"):
            predict(whole, ulysses=2)
        assert client.running                                  # refused before any rank began
        weights.write_bytes(content)
        predict(whole, ulysses=2)

        group, worker = client.group, worker_of(joined)
        worker.suspend()                                       # so that the step is not over when the link is cut
        ticket = client.submit(whole, layout(ulysses=2), 4, [call_of(one)])
        relay.cut()
        with pytest.raises(WorkerDiedError) as error:
            client.wait([ticket])
        assert all(words in str(error.value)
                   for words in ("rank 1 (other/cpu)", "lost with its machine, other", "computing a step")), error
        assert not group.alive
        psutil.wait_procs([worker], timeout=1200)
        assert not worker.is_running() and joined.poll() is None
        relay.heal()
        assert listener.take("other").is_open                  # it has come back by itself
    finally:
        client.close()
        listener.close()
        relay.close()
        joined.terminate()
        assert joined.wait(1200) is not None


# In a worker: rank 1 comes 6 s late to an exchange, once a file is there.
LATE = """
import os
import time
import torch.distributed as dist
transfer = dist.all_to_all_single

def late(*args, **kwargs):
    if os.environ.get("RANK") == "1" and os.path.exists({path!r}):
        os.unlink({path!r})
        time.sleep({late_s})
    return transfer(*args, **kwargs)
dist.all_to_all_single = late
"""


@pytest.mark.slow
def test_a_machine_stays_while_it_is_idle_and_through_a_long_step(files, tmp_path, monkeypatch):
    """For longer than the limits of silence: only a machine without heartbeats is lost."""
    here, there = files
    one, late_s, idle_s = example("Flux.1"), 6.0, 10.0
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "sitecustomize.py").write_text(LATE.format(path=str(tmp_path / "late" / "now"),
                                                                    late_s=late_s))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "late"))
    for name in ("XDIT_SILENCE_TIMEOUT_S", "XDIT_LINK_TIMEOUT_S"):
        monkeypatch.setenv(name, "2")
    listener = Listener("127.0.0.2:0", tmp_path / "key")
    joined = start_join(listener, there.parent, tmp_path)
    client = Client(("cpu", "other/cpu"), listener)

    def predict():
        result, = client.predict(spec_of(here), layout(ulysses=2), 4, [call_of(one)])
        within((result - one.run()).abs().max(), 1e-5)
    try:
        predict()
        group = client.group
        (tmp_path / "late" / "now").touch()
        began_s = time.monotonic()
        predict()
        assert time.monotonic() - began_s > late_s and not (tmp_path / "late" / "now").exists()
        time.sleep(idle_s)
        assert group.alive
        predict()
        assert client.group is group
    finally:
        client.close()
        listener.close()
        joined.terminate()
        assert joined.wait(1200) is not None
