"""Weights of a rank in host memory: which, where, written by whom, and the same when they are back."""

import pytest
import torch
import torch.distributed as dist

from tests.support.model_zoo import example
from tests.support.ranks import run_ranks
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.partition import ranks_by_part
from xdit_backend.protocol import messages, specs
from xdit_backend.protocol.shared_memory import SegmentStore, map_segment
from xdit_backend.protocol.specs import Layout, Stages
from xdit_backend.worker.engine import Engine
from xdit_backend.worker.weight_residency import Residency


@pytest.fixture
def store():
    store = SegmentStore()
    yield store
    store.close()


def model():
    generator = torch.Generator().manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(33, 20), torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm1d(7),
                              torch.nn.Linear(64, 64))
    for weight in net.parameters():
        weight.data = torch.randn(weight.shape, generator=generator)
    net[3].weight.data = net[3].weight.data.t()                # a matrix that is stored by columns
    net[1].weight.data = net[1].weight.data.bfloat16()
    return net.requires_grad_(False)


class Device:
    """A pretended device: what is fetched from it and brought to it, in bytes."""

    def __init__(self):
        self.fetched = self.brought = 0

    def residency(self, net, files=None):
        return Residency(net, files or {}, self.to_device, self.to_host)

    def to_device(self, weight):
        self.brought += weight.nbytes
        return weight.clone()

    def to_host(self, weight, home):
        self.fetched += weight.nbytes
        home.copy_(weight)


def values(net):
    return {name: (tensor.clone(), tensor.stride()) for name, tensor in net.state_dict().items()}


def assert_same(net, before):
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name][0]) and tensor.stride() == before[name][1], name


def segment(store, num_bytes):
    return store.create((int(num_bytes),), torch.uint8)[0]


def test_ranks_with_the_same_weights_write_each_once_and_find_them_again(store):
    """Two ranks; the second parks half of what the first does."""
    ranks = [(net := model(), device := Device(), device.residency(net)) for _ in range(2)]
    total = int(ranks[0][2].numbers["weight_bytes"])
    before, targets = values(ranks[0][0]), [total, total // 2]
    shared = segment(store, total)

    for own, (_, _, residency) in enumerate(ranks):
        residency.park(targets, own, shared)

    parked = [int(residency.parked_bytes) for _, _, residency in ranks]
    assert parked[0] == total and total // 2 <= parked[1] < total
    assert sum(device.fetched for _, device, _ in ranks) == sum(tensor.nbytes for tensor, _ in before.values())
    assert 0 < ranks[1][1].fetched < ranks[0][1].fetched
    for net, device, residency in ranks:
        residency.restore()
        assert_same(net, before)
        assert residency.parked_bytes == 0 and device.brought > 0
        assert residency.device_bytes == sum(tensor.nbytes for tensor, _ in before.values())


def test_only_as_much_is_parked_as_is_asked_for_and_nothing_is_written_twice(store):
    net, device = model(), Device()
    residency, before = device.residency(net), values(net)
    largest = int(residency.numbers["largest_bytes"])

    residency.park([100], 0, segment(store, 100 + largest))
    assert 100 <= residency.parked_bytes < 100 + largest
    residency.restore()
    first = device.fetched
    residency.park([100], 0, segment(store, 0))                # its places are known already
    residency.park([10_000], 0, segment(store, 10_000 + largest))
    residency.restore()

    assert first < device.fetched <= sum(tensor.nbytes for tensor, _ in before.values())
    assert_same(net, before)


def test_weights_that_are_in_the_file_need_no_memory(store):
    """Their maps are their home; only the one that was cast takes memory."""
    net, device = model(), Device()
    files = {id(weight): weight.data for weight in (*net.parameters(), *net.buffers())
             if weight.dtype != torch.bfloat16}
    residency, before = device.residency(net, files), values(net)
    cast_bytes = net[1].weight.nbytes
    assert cast_bytes <= residency.numbers["unmapped_bytes"] < cast_bytes + 64

    residency.park([int(residency.numbers["weight_bytes"])], 0, segment(store, residency.numbers["unmapped_bytes"]))

    assert device.fetched == cast_bytes
    assert net[0].weight.data_ptr() == files[id(net[0].weight)].data_ptr()
    residency.restore()
    assert_same(net, before)


def test_a_failure_while_they_come_back_leaves_the_rest_parked(store):
    net, device = model(), Device()
    residency, before = device.residency(net), values(net)
    total = int(residency.numbers["weight_bytes"])
    residency.park([total], 0, segment(store, total))
    to_device, calls = residency._to_device, []

    def out_of_memory(weight):
        calls.append(weight)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no")
        return to_device(weight)

    residency._to_device = out_of_memory
    with pytest.raises(torch.OutOfMemoryError):
        residency.restore()
    assert 0 < residency.parked_bytes < total
    residency.restore()

    assert residency.parked_bytes == 0
    assert_same(net, before)


# --- on real ranks ---

def execute_in_step(rank, world_size, commands):
    """Carry out commands on this rank, each when all have done the one before, as a host that waits would have it."""
    engine = Engine(rank, torch.device("cpu"), lambda *phase: None)
    torch.set_grad_enabled(False)
    numbers = []
    for command in commands:
        numbers.append(engine.execute(command))
        dist.barrier()
    return numbers


@pytest.mark.parametrize("stages, layout", [
    (None, Layout(ulysses_degree=2)), (None, Layout(tensor_degree=2)), (Stages(2), Layout(pipefusion_degree=2)),
    (Stages(2, every_block=True), Layout(pipefusion_degree=2))],
                         ids=["ulysses2", "tensor2", "pipefusion2", "pipefusion2, every block"])
def test_predictions_are_the_same_after_weights_were_parked(store, tmp_path, stages, layout):
    """A part of one rank's first, then everything. The file is float64 and the model float32,
    so that no weight is in the file so."""
    one = example("SD3", torch.float64, rows=12, columns=6)
    one.model.save_pretrained(tmp_path / "transformer")
    header = open_checkpoint(tmp_path)
    spec = header.spec("float32", "float32", stages, layout.tensor_degree)
    context = {name: store.share(tensor) for name, tensor in one.conditioning.items()}
    predictions = [store.create(tuple(one.latent.shape), torch.float32)[0] for _ in range(3)]
    latent, timestep = store.share(one.latent), store.share(one.timestep)
    parts = len(ranks_by_part(2, spec))

    def predict(prediction):
        branch = specs.Branch(latent, timestep, "branch", prediction)
        return messages.Predict(1, spec.name, layout, [branch])

    def park(*targets):
        return messages.ParkModel(1, spec.name, list(targets), [segment(store, 2 ** 22) for _ in range(parts)])

    restore, report = messages.RestoreModel(1, spec.name), messages.ReportMemory(1)
    numbers = run_ranks(execute_in_step, 2, [
        messages.LoadModel(1, spec), messages.Conditioning(1, "branch", context), predict(predictions[0]), report,
        park(0, 10_000), report, restore, predict(predictions[1]),
        park(2 ** 40, 2 ** 40), report, restore, predict(predictions[2]), report])

    first, *later = (map_segment(prediction) for prediction in predictions)
    assert first.std() > 0.01 and all(torch.equal(first, other) for other in later)
    for rank, ((_, _, _, held, *_), (_, _, _, _, _, partly, *_)) in enumerate(zip(numbers, numbers)):
        assert (partly["weight_bytes"] == held["weight_bytes"] if rank == 0
                else partly["weight_bytes"] <= held["weight_bytes"] - 9_000)
        assert numbers[rank][9]["weight_bytes"] == 0 and numbers[rank][9]["parked_bytes"] >= held["weight_bytes"]
        assert numbers[rank][12]["weight_bytes"] == held["weight_bytes"] > 0
