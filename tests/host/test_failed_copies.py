"""A copy of weights from host memory that fails in a running worker: real workers, whose copying thread is made to
fail."""

import os

import pytest
import torch

from tests.host.conftest import call_of, layout
from tests.host.test_offloading import folder  # noqa: F401
from tests.models.zoo import example
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.host import torchrun
from xdit_backend.host.client import Client
from xdit_backend.protocol.errors import CopyError
from xdit_backend.protocol.specs import Stages

# The third copy from then on fails, in the rank that a file is named after.
FAILING = """
import os
import threading
import torch
copy, made = torch.Tensor.copy_, []

def failing(self, *args, **kwargs):
    if threading.current_thread().name == "xdit-copies":
        own = {folder!r} + "/fails-" + os.environ["RANK"]
        made.extend([self] if os.path.exists(own) else [])
        if len(made) == 3:
            os.unlink(own)
            raise OSError("no page-locked memory is left")
    return copy(self, *args, **kwargs)
torch.Tensor.copy_ = failing
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults")
    (path / "sitecustomize.py").write_text(FAILING.format(folder=str(path)))
    return path


@pytest.mark.parametrize("rank, degrees", [
    (0, {}), (1, {"ulysses": 2}), pytest.param(0, {"pipefusion": 2}, marks=pytest.mark.slow), (1, {"pipefusion": 2})],
    ids=str)
def test_a_copy_that_fails_fails_its_run_in_words_and_the_next_one_is_right(
    rank, degrees, faults, folder, monkeypatch, forkserver):       # noqa: F811
    """Whatever rank it is, none waits on for it, and the prompt after has workers whose copies all come."""
    environment = torchrun.environment_of
    monkeypatch.setattr(torchrun, "environment_of", lambda *of: environment(*of) | {
        "PYTHONPATH": os.pathsep.join([str(faults), str(torchrun.ROOT)])})
    checkpoint, one = open_checkpoint(folder), example("Flux.1", torch.float32)
    spec = checkpoint.spec("float32", "float32", Stages(2, 1) if "pipefusion" in degrees else None, weights_memory=1)
    client = Client(("cpu",) * (2 if degrees else 1), forkserver=forkserver)

    def predict():
        result, = client.predict(spec, layout(**degrees), checkpoint.family.num_channels(one.config), [call_of(one)])
        return result.clone()
    try:
        want, group = predict(), client.group
        (faults / f"fails-{rank}").touch()
        with pytest.raises(CopyError, match=r"^Queue the prompt again, .* of block \d+ could not be copied from host "
                                            r"memory to cpu \(OSError: no page-locked memory is left\).*weights_mem"):
            predict()
        assert not (faults / f"fails-{rank}").exists()

        assert torch.equal(predict(), want) and client.group is not group
        assert any(client.models.memory(spec.name).offloaded_bytes)
    finally:
        client.close()
