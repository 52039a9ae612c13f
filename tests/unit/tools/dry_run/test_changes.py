"""A LoRA that is merged into weights of a published model's size, and taken out again, by the worker's commands:
without a wait or a mix of devices, with no more beside the weights than a batch of changes and the sums of one tensor,
and all held as before. A version of the weights that is kept is gone back to without a kernel."""

import dataclasses

import pytest
import torch

from tests.unit.tools.dry_run.rows import published, spec_of
from tests.unit.tools.dry_run.test_loading import Copies, Holes, sparse_folder
from tests.unit.tools.dry_run.test_published import forecast_of
from xdit_backend.checkpoints import loader
from xdit_backend.checkpoints import weight_deltas as changes
from xdit_backend.checkpoints.weight_deltas import SUMMED
from xdit_backend.host import weight_updates as changes_of_host
from xdit_backend.host.weight_updates import BATCH_BYTES, Change, batches
from xdit_backend.memory.staging import StagingBuffers
from xdit_backend.protocol import messages, specs
from xdit_backend.tools.bench.size import parse_layout
from xdit_backend.tools.dry_run.commands import HostMemory
from xdit_backend.tools.dry_run.fake_cuda import CUDA, fake_cuda_device
from xdit_backend.tools.dry_run.op_counter import DeviceWork
from xdit_backend.tools.dry_run.simulated_rank import load, outline, table_of
from xdit_backend.worker.models import Loaded, Models

LORA_RANK = 16
SUMS_BYTES = 16 * SUMMED       # as they are in the file, and in float32 with product and sum
MODEL, NUM_BLOCKS = "flux.1-dev", 2
ROWS = [("bfloat16", 0), ("float8_e4m3fn", 0), ("bfloat16", 1.2e9), ("float8_e4m3fn", 7e8)]


def batches_of(checkpoint, memory, itemsize):
    """[{name: specs.Change}] of all linear layers of the blocks, as a host sends them: first all of what adds a LoRA,
    then all of what takes it out."""
    shapes = {name: shape for name, shape in checkpoint.shapes.items()
              if len(shape) == 2 and "transformer_blocks" in name}
    parts = list(batches({name: Change((), shape[0] * shape[1] * itemsize, None) for name, shape in shapes.items()}))

    def added(shape):
        up, down = (memory.share(torch.empty(size)) for size in ((shape[0], LORA_RANK), (LORA_RANK, shape[1])))
        return specs.Change(None, (specs.LowRank(up, down, 0.5),), "bfloat16", "float32")
    return ([{name: added(shapes[name]) for name in part} for part in parts],
            [dict.fromkeys(part, specs.Change(None, ())) for part in parts])


def models_with(transformer):
    """(a worker's Models that hold a Transformer alone, its name)"""
    models, name = Models(0, 1, CUDA, StagingBuffers(CUDA), lambda *_: None), transformer.spec.name
    models._loaded[name] = Loaded(transformer, None, torch.bfloat16, range(0))
    return models, name


def change(models, name, changes, spare_bytes=0, **version):
    """Carry out messages.ChangeWeights; returns the numbers that are told of the weights."""
    return models.change(messages.ChangeWeights(1, name, changes, **version), spare_bytes)


class Held:
    """What weights hold of a pretended device: a weight has that memory, but a pretended tensor lives only as long as
    what refers to it."""

    def __init__(self, monkeypatch):
        self.weights, self.last = {}, None
        moved, hold = loader.moved, loader.Transformer.hold

        def keep_moved(*given):
            self.last = moved(*given)
            return self.last

        def keep(transformer, weight, *given):
            self.last = None
            hold(transformer, weight, *given)
            self.weights[id(weight)], self.last = self.last, None
        monkeypatch.setattr(loader, "moved", keep_moved)
        monkeypatch.setattr(loader.Transformer, "hold", keep)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")         # where a map is looked for
@pytest.mark.parametrize("storage, budget_bytes", [
    pytest.param(*row, marks=[] if row in ROWS[1:3] else pytest.mark.slow) for row in ROWS])
def test_a_lora_is_merged_in_little_memory_and_without_a_wait(tmp_path, monkeypatch, storage, budget_bytes):
    """All weights are on the device, or some come from host memory, where their new values are."""
    model, memory = published(MODEL, NUM_BLOCKS)[0], HostMemory()
    checkpoint = sparse_folder(tmp_path, model)
    spec = dataclasses.replace(spec_of(checkpoint, parse_layout("one"), storage), weights_memory=int(budget_bytes))
    monkeypatch.setattr(changes, "map_segment", memory.map)
    monkeypatch.setattr(loader, "CopyThread", lambda device, staging: Copies())
    outside = loader.build_empty(model.family, checkpoint.config)
    monkeypatch.setattr(loader, "build_empty", lambda family, config: outside)
    ways = batches_of(checkpoint, memory, getattr(torch, storage).itemsize)
    with monkeypatch.context() as changed, fake_cuda_device(), DeviceWork() as work, Holes():
        held = Held(changed)
        loaded = loader.load_transformer(spec, CUDA)
        models, name = models_with(loaded)
        before = work.resident_bytes
        for way in ways:
            for batch in way:
                work.start_over()
                told = change(models, name, batch)

                assert told["offloaded_bytes"] == 0 if not budget_bytes else told["offloaded_bytes"] > 0
                assert work.waits == {} and work.mixed == {} and work.resident_bytes == before
                # what comes from host memory is taken from the file there again, and the device has nothing to do
                least = 0 if budget_bytes and way is ways[1] else 1
                assert least <= work.peak_bytes - before <= most_bytes(storage) + SUMS_BYTES
                if storage == "bfloat16":                      # a step, which has as much room, is looked at before
                    assert work.peak_bytes - before < forecast_of(MODEL, "one")[0].activations
        assert len(held.weights) > len(ways[0][0])
    assert (loaded.offloaded is not None) == (budget_bytes > 0)


def most_bytes(storage):
    """Of a batch's weights with the LoRA in them, before they are held."""
    return BATCH_BYTES * 2 // getattr(torch, storage).itemsize


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("budget_bytes, owner, name, mutant", [
    (1.2e9, loader, "in_host_memory", lambda tensor, dtype, staging: tensor.to("cpu", dtype)),
    pytest.param(0, changes_of_host, "BATCH_BYTES", 2 ** 40, marks=pytest.mark.slow)])
def test_it_notices_a_copy_that_is_waited_for_and_changes_at_once(tmp_path, monkeypatch, budget_bytes, owner, name,
                                                                  mutant):
    monkeypatch.setattr(owner, name, mutant)

    with pytest.raises(AssertionError):
        test_a_lora_is_merged_in_little_memory_and_without_a_wait(tmp_path, monkeypatch, "bfloat16", budget_bytes)


@pytest.mark.parametrize("type_, layout_name", [
    ("Q4_K", "one"), pytest.param("float8_e4m3fn", "one", marks=pytest.mark.slow),
    pytest.param("Q8_0", "tensor2", marks=pytest.mark.slow)])
def test_a_lora_is_added_beside_packed_weights(monkeypatch, type_, layout_name):
    """Of weights that stay as they are, nothing is read; there are its factors, and then there are not."""
    plain, memory = dataclasses.replace(published(MODEL, NUM_BLOCKS)[0], type_=type_), HostMemory()
    spec = spec_of(plain, parse_layout(layout_name))
    monkeypatch.setattr(changes, "map_segment", memory.map)
    monkeypatch.setattr(changes, "read_file", lambda checkpoint, wanted: {
        name: torch.empty(checkpoint.shapes[name], device="meta") for name in checkpoint.shapes})
    monkeypatch.setattr(type(plain), "check_is", lambda self, spec: None, raising=False)
    monkeypatch.setattr(changes, "read_plain", lambda checkpoint, tensors, without: dict(tensors))
    add, take_out = batches_of(plain, memory, 1)
    (model, packed), table = outline(plain, spec), table_of(plain, spec)
    with fake_cuda_device(), DeviceWork() as work, Holes():
        models, name = models_with(load(plain, table, model, packed, (range(2 * NUM_BLOCKS), 0)).transformer)
        before = work.resident_bytes
        work.start_over()
        for batch in add:
            change(models, name, batch)
        added, peak_bytes, waits, mixed = work.resident_bytes - before, work.peak_bytes, work.waits, work.mixed
        for batch in take_out:
            change(models, name, batch)

        assert waits == {} and mixed == {} and work.resident_bytes == before
    whole = sum(4 * LORA_RANK * sum(plain.shapes[name]) for batch in add for name in batch)
    assert added == whole if spec.tensor_degree == 1 else whole / 2 < added < whole
    assert peak_bytes - before <= added + 8 * LORA_RANK * max(sum(plain.shapes[name]) for name in add[0])


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("spare_bytes", [2 ** 40, 0])
def test_a_version_of_the_weights_is_gone_back_to_without_a_kernel(tmp_path, monkeypatch, spare_bytes):
    """Where there was room to keep it, as of LoRA hooks, which change weights in every step; else it was not kept."""
    model, memory = published(MODEL, NUM_BLOCKS)[0], HostMemory()
    checkpoint = sparse_folder(tmp_path, model)
    monkeypatch.setattr(changes, "map_segment", memory.map)
    monkeypatch.setattr(loader, "CopyThread", lambda device, staging: Copies())
    outside = loader.build_empty(model.family, checkpoint.config)
    monkeypatch.setattr(loader, "build_empty", lambda family, config: outside)
    add, _ = batches_of(checkpoint, memory, 2)
    with fake_cuda_device(), DeviceWork() as work, Holes():
        models, name = models_with(loader.load_transformer(spec_of(checkpoint, parse_layout("one")), CUDA))
        for index, batch in enumerate(add):
            change(models, name, batch, spare_bytes, version=1, begins=index == 0)
        work.start_over()
        answers = [models.go_back(messages.ReturnWeights(1, name, to, left)) for to, left in ((1, 2), (2, 1), (3, 2))]

        assert [answer["cached"] for answer in answers] == [spare_bytes > 0, spare_bytes > 0, 0]
        assert work.kernels == 0 and work.waits == {} and work.mixed == {}
