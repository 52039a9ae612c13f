"""Copies of weights from host memory in running workers: one that fails, and how many threads make one. Real workers,
whose copying thread is made to fail, and to tell."""

import os

import pytest
import torch

from tests.support.model_zoo import example
from tests.unit.host.conftest import call_of, decoded, layout, random_decoder, small_latent
from tests.unit.host.test_offloading import folder  # noqa: F401
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.host import torchrun
from xdit_backend.host.autoencoders import Autoencoder
from xdit_backend.host.client import Client
from xdit_backend.protocol.errors import CopyError
from xdit_backend.protocol.specs import Stages

# The third copy from then on fails, in the rank that a file is named after, and those after it (one that was not yet
# waited for is made again in the next step). Where the file "threads" is, a copy of a piece is made, and how many
# threads that has begun is written to another.
FAILING = """
import os
import threading
import torch
copy, made, told = torch.Tensor.copy_, [], []

def tell(folder):
    before = set(os.listdir("/proc/self/task"))
    copy(torch.empty(2 ** 24, dtype=torch.uint8), torch.ones(2 ** 24, dtype=torch.uint8))
    begun = set(os.listdir("/proc/self/task")) - before
    with open(folder + "/threads-" + os.environ["RANK"], "w") as file:
        file.write(str(len(begun)))

def failing(self, *args, **kwargs):
    if threading.current_thread().name == "xdit-copies":
        if not told and os.path.exists({folder!r} + "/threads"):
            told.append(True)
            tell({folder!r})
        own = {folder!r} + "/fails-" + os.environ["RANK"]
        made.extend([self] if os.path.exists(own) else [])
        if len(made) >= 3:
            if os.path.exists(own):
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


def set_environment(monkeypatch, faults, **variables):
    environment = torchrun.environment_of
    monkeypatch.setattr(torchrun, "environment_of", lambda *of: environment(*of) | {
        "PYTHONPATH": os.pathsep.join([str(faults), str(torchrun.ROOT)])} | variables)


@pytest.mark.parametrize("rank, degrees", [
    (0, {}), (1, {"ulysses": 2}), pytest.param(0, {"pipefusion": 2}, marks=pytest.mark.slow), (1, {"pipefusion": 2})],
    ids=str)
def test_a_copy_that_fails_fails_its_run_in_words_and_the_next_one_is_right(
    rank, degrees, faults, folder, monkeypatch, supervisor):       # noqa: F811
    """Whatever rank it is, none waits on for it, and the prompt after has workers whose copies all come."""
    set_environment(monkeypatch, faults)
    checkpoint, one = open_checkpoint(folder), example("Flux.1", torch.float32)
    spec = checkpoint.spec("float32", "float32", Stages(2, 1) if "pipefusion" in degrees else None, weights_memory=1)
    client = Client(("cpu",) * (2 if degrees else 1), supervisor=supervisor)

    def predict():
        result, = client.predict(spec, layout(**degrees), checkpoint.family.num_channels(one.config), [call_of(one)])
        return result.clone()
    try:
        want, group = predict(), client.group
        (faults / f"fails-{rank}").touch()
        with pytest.raises(CopyError, match=r"^Queue the prompt again, .* of block \d+ could not be copied from "
                                            r"system RAM to cpu \(OSError: no page-locked memory is left\).*weights_"):
            predict()
        assert not (faults / f"fails-{rank}").exists()

        assert torch.equal(predict(), want) and client.group is not group
        assert any(client.models.memory(spec.name).offloaded_bytes)
    finally:
        client.close()


@pytest.mark.slow
def test_a_copy_that_fails_while_a_vae_decodes_fails_it_in_words(faults, monkeypatch, supervisor):
    """On one of the two that share it, and the next decode has other workers."""
    set_environment(monkeypatch, faults)
    client = Client(("cpu", "cpu"), supervisor=supervisor)
    vae = Autoencoder("vae", "float64", lambda: random_decoder(32), from_host=True)

    def decode():
        return client.autoencoders.decode(vae, small_latent(), (1, 96, 96, 3)).clone()
    try:
        assert torch.allclose(decode().double(), decoded(), atol=1e-6)
        group = client.group
        (faults / "fails-1").touch()
        with pytest.raises(CopyError, match="^Queue the prompt again, .* could not be copied from system RAM to cpu"):
            decode()

        assert torch.allclose(decode().double(), decoded(), atol=1e-6) and client.group is not group
    finally:
        client.close()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("fork", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_piece_is_copied_by_as_many_threads_as_the_worker_has(
    fork, num_threads, faults, folder, monkeypatch, supervisor):   # noqa: F811
    """Also in a worker that was forked from a process whose libraries have one, and though the thread that copies is
    not the one that said how many."""
    set_environment(monkeypatch, faults, OMP_NUM_THREADS=str(num_threads), XDIT_FORK=fork)
    checkpoint, one = open_checkpoint(folder), example("Flux.1", torch.float32)
    spec = checkpoint.spec("float32", "float32", weights_memory=1)
    client = Client(("cpu", "cpu"), supervisor=supervisor)
    (faults / "threads").touch()
    try:
        client.predict(spec, layout(ulysses=2), checkpoint.family.num_channels(one.config), [call_of(one)])
        was_forked = client.group.why_not_forked == ""
    finally:
        client.close()
        (faults / "threads").unlink()

    assert was_forked is (fork == "1")
    assert [int((faults / f"threads-{rank}").read_text()) for rank in range(2)] == [num_threads - 1] * 2
