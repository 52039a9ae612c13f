"""Running workers whose weights come from host memory predict the same bits: branches on ranks of their own or one
after the other, and when they were parked."""

import dataclasses
import os
import time
from pathlib import Path

import pytest
import torch

from tests.support.model_zoo import example
from tests.support.tiers import by_default
from tests.unit.host.conftest import call_of, layout
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.offload.offload_plan import plan_weights, unmapped_bytes
from xdit_backend.models import FAMILIES
from xdit_backend.models.common.example_inputs import conditioning_of
from xdit_backend.protocol.errors import CheckpointError
from xdit_backend.protocol.specs import Stages
from xdit_backend.tools.dry_run.simulated_rank import table_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from diffusers import FluxTransformer2DModel
    path, config = tmp_path_factory.mktemp("flux"), FAMILIES["Flux.1"].testing.config | {"num_single_layers": 14}
    torch.manual_seed(0)
    FluxTransformer2DModel(**config).save_pretrained(path / "transformer")
    return path


@pytest.mark.parametrize("degrees", by_default([{"cfg": 2}, {"ulysses": 2}], [
    {"cfg": 2}, {"ulysses": 2}, {"ring": 2}, {"data": 2}, {"tensor": 2}, {"pipefusion": 2}]), ids=str)
@pytest.mark.parametrize("storage", by_default(["float32"], ["float32", "float8_e4m3fn"]))
def test_workers_whose_weights_come_predict_the_same(client, folder, degrees, storage):
    stages = Stages(2, 1) if "pipefusion" in degrees else None
    checkpoint, one = open_checkpoint(folder), example("Flux.1", torch.float32, batch=2)
    family, calls = checkpoint.family, []
    spec = checkpoint.spec(storage, "float32", stages, degrees.get("tensor", 1))
    for seed, length in ((0, 7), (1, 5)):
        conditioning = conditioning_of(family, one.config, torch.Generator().manual_seed(seed), {"context": length}, 2)
        calls.append(call_of(dataclasses.replace(one, conditioning=conditioning)))
    channels = family.num_channels(one.config)

    want = [each.clone() for each in client.predict(spec, layout(**degrees), channels, calls)]
    whole = client.models.memory(spec.name)
    budget = max(whole.weight_bytes) * 8 // 10
    less = checkpoint.spec(storage, "float32", stages, degrees.get("tensor", 1), weights_memory=budget)
    if storage != "float32" and not degrees.keys() & {"tensor", "pipefusion"}:
        table = table_of(checkpoint, less)
        less = dataclasses.replace(less, host_bytes=unmapped_bytes(table, plan_weights(table, budget)[1]))
        assert less.host_bytes > 0
    assert less.name != spec.name
    for _ in range(2):
        got = client.predict(less, layout(**degrees), channels, calls)
        assert all(torch.equal(*pair) for pair in zip(got, want))
        there = client.models.memory(less.name)
        assert all(0 < held <= budget * 1.01 for held in there.weight_bytes) and any(there.offloaded_bytes)
        client.models.park(less.name, 2 ** 34)
        assert client.models.memory(less.name).parked_bytes == there.weight_bytes
    client.drop(spec.name)
    client.drop(less.name)


def test_two_models_in_turn_predict_what_each_does_alone(client, folder):
    """As the two experts of a workflow: weights of both come, in two types."""
    checkpoint, one, want, specs = open_checkpoint(folder), example("Flux.1", torch.float32), [], []
    channels = checkpoint.family.num_channels(one.config)
    for storage in ("float32", "float8_e4m3fn"):
        whole = checkpoint.spec(storage, "float32")
        want.append([each.clone() for each in client.predict(whole, layout(ulysses=2), channels, [call_of(one)])])
        client.drop(whole.name)
        specs.append(checkpoint.spec(storage, "float32", weights_memory=1))
    for number in (0, 1, 0, 1, 1, 0):
        got = client.predict(specs[number], layout(ulysses=2), channels, [call_of(one)])
        assert all(torch.equal(*pair) for pair in zip(got, want[number]))
    assert not torch.equal(want[0][0], want[1][0])
    assert all(any(client.models.memory(spec.name).offloaded_bytes) for spec in specs)
    for spec in specs:
        client.drop(spec.name)


@pytest.mark.parametrize("degrees", [{"cfg": 2}, {"pipefusion": 2}], ids=str)
def test_a_file_that_is_written_to_fails_the_run_in_words_and_one_that_is_removed_does_not(client, tmp_path, degrees):
    """Its weights are maps of the file, so what is written reaches the workers. Each says so, and none waits for
    another that does: the stage after has what it needs by then."""
    from diffusers import FluxTransformer2DModel
    torch.manual_seed(0)
    FluxTransformer2DModel(**FAMILIES["Flux.1"].testing.config | {"num_single_layers": 14}).save_pretrained(
        tmp_path / "transformer")
    checkpoint, one = open_checkpoint(tmp_path), example("Flux.1", torch.float32)
    stages = Stages(2, 1) if "pipefusion" in degrees else None
    file, spec = Path(checkpoint.files[0]), checkpoint.spec("float32", "float32", stages, weights_memory=1)

    def predict():
        return client.predict(spec, layout(**degrees), checkpoint.family.num_channels(one.config), [call_of(one)] * 2)
    want, whole, was = [each.clone() for each in predict()], file.read_bytes(), file.stat()
    file.rename(tmp_path / "elsewhere")
    assert all(torch.equal(*pair) for pair in zip(predict(), want))
    (tmp_path / "elsewhere").rename(file)

    with open(file, "r+b") as opened:
        opened.seek(len(whole) // 2)
        opened.write(bytes(len(whole) // 4))
    handle = client.submit(spec, layout(**degrees), checkpoint.family.num_channels(one.config), [call_of(one)] * 2)
    request = handle.group._requests[handle.request]
    with pytest.raises(CheckpointError, match="^Queue the prompt again, which .* was written to while a run was "):
        client.wait([handle])
    assert request.failed.keys() == request.answering == {0, 1} and not request.unanswered
    with open(file, "r+b") as opened:
        opened.write(whole)
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert all(torch.equal(*pair) for pair in zip(predict(), want))
    client.drop(spec.name)


def test_waits_for_weights_are_told_apart_in_the_image_of_a_run(client, folder):
    checkpoint, one = open_checkpoint(folder), example("Flux.1", torch.float32)
    least = plan_weights(table_of(checkpoint, checkpoint.spec("float32", "float32")), 1)[0].device_bytes
    spec = checkpoint.spec("float32", "float32", weights_memory=least)
    client.predict(spec, layout(cfg=2), checkpoint.family.num_channels(one.config), [call_of(one)] * 2)
    since_s = time.perf_counter()

    client.predict(spec, layout(cfg=2), checkpoint.family.num_channels(one.config), [call_of(one)] * 2)

    for done in client.catch_up(60, since_s).values():
        step = next(span for span in done.spans if span.kind == "whole")
        waits = [span for span in done.spans if span.kind == "weights"]
        assert waits and all(step.start_s <= wait.start_s <= wait.end_s <= step.end_s for wait in waits)
    client.drop(spec.name)
