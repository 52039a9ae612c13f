"""Files of published models at their full size, with a real header and holes for content, as each rank loads them on a
pretended device: its own weights to the byte, each copied once, without a wait, never more than one tensor twice."""

import dataclasses
import json
import math
import struct

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.tools.dry_run.rows import published, spec_of, weights_of
from xdit_backend.checkpoints import loader
from xdit_backend.checkpoints.build_transformer import build_empty
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.offload.offload_plan import plan_weights
from xdit_backend.tools.bench.size import parse_layout
from xdit_backend.tools.dry_run.fake_cuda import CUDA, fake_cuda_device
from xdit_backend.tools.dry_run.op_counter import DeviceWork
from xdit_backend.tools.dry_run.simulated_rank import own_blocks, table_of, world_size_of

ROWS = [("z-image", "pipefusion2", "bfloat16"), ("flux.1-dev", "pipefusion2", "bfloat16"),
        ("flux.1-dev", "tensor2", "float8_e4m3fn"), ("wan2.1-14b-720p", "pipefusion4", "bfloat16"),
        ("wan2.1-14b-720p", "tensor4", "bfloat16"), ("qwen-image", "pipefusion2", "float8_e4m3fn"),
        ("sd3.5-large", "tensor2", "bfloat16"), ("hunyuanvideo-1.5", "pipefusion2", "float8_e4m3fn"),
        ("flux.2-dev", "pipefusion4", "bfloat16")]
DEFAULT = ROWS[:1]
# of a device, that weights may take
STREAMED = [("flux.1-dev", "one", 8e9), ("flux.1-dev", "pipefusion2", 4e9), ("wan2.1-14b-720p", "pipefusion4", 4e9),
            ("flux.2-dev", "one", 12e9)]


class Holes(TorchDispatchMode):
    """While active, host memory is not copied into host memory, and `sent` has the bytes of each tensor that goes to a
    device."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "copy_":
            target, source = args[:2]
            if not target.is_cuda and not source.is_cuda:
                return target
            if not source.is_cuda:
                self.sent.append(source.nbytes)
        return func(*args, **(kwargs or {}))


class Copies:
    """In place of a CopyThread: how many bytes it is asked to copy."""

    def __init__(self):
        self.num_bytes = 0

    def start(self, pairs):
        self.num_bytes += sum(source.nbytes for source, _ in pairs)

    def drain(self):
        pass


def sparse_file(path, shapes):
    """A safetensors file of tensors in bfloat16, which takes no room on the disk. shapes: {name: shape}."""
    start, header = 0, {}
    for name, shape in shapes.items():
        num_bytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, start + num_bytes]}
        start += num_bytes
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(written)) + written)
        file.truncate(8 + len(written) + start)
    return path


def sparse_folder(folder, model):
    """A diffusers folder of a published_models.Unwritten."""
    sparse_file(folder / "diffusion_pytorch_model.safetensors", model.shapes)
    config = {"_class_name": model.family.transformer} | {
        key: value for key, value in model.config.items() if not key.startswith("_")}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return open_checkpoint(str(folder))


def keep_what_is_moved(monkeypatch):
    """The list of all that is moved to the device: a weight has that memory, but a pretended tensor lives only as long
    as what refers to it."""
    plain, on_device = loader.moved, []
    monkeypatch.setattr(loader, "moved", lambda *given: on_device.append(plain(*given)) or on_device[-1])
    return on_device


@pytest.mark.parametrize("name, layout_name, storage", [
    pytest.param(*row, marks=[] if row in DEFAULT else pytest.mark.slow) for row in ROWS])
def test_a_rank_loads_its_own_weights_once(tmp_path, monkeypatch, name, layout_name, storage):
    """Of files of up to 64 GB."""
    model, layout = published(name, None)[0], parse_layout(layout_name)
    checkpoint = sparse_folder(tmp_path, model)
    spec = spec_of(checkpoint, layout, storage)
    table = table_of(model, spec)
    for rank in {0, world_size_of(layout) - 1}:
        own = own_blocks(table, rank) if spec.stages is not None else None
        outside = build_empty(model.family, checkpoint.config)
        monkeypatch.setattr(loader, "build_empty", lambda family, config, made=outside: made)
        with monkeypatch.context() as changed, fake_cuda_device(), DeviceWork() as work, Holes() as holes:
            on_device = keep_what_is_moved(changed)
            loader.load_transformer(spec, CUDA, choose_blocks=own and (lambda _, own=own: own),
                                     tensor_rank=rank % spec.tensor_degree)
            largest = max(tensor.numel() for tensor in on_device)

        assert work.resident_bytes == weights_of((model, None), layout_name, rank, storage)
        assert sum(holes.sent) == weights_of((model, None), layout_name, rank, item_bytes=2)
        assert work.waits == {} and work.mixed == {}
        assert work.peak_bytes - work.resident_bytes <= 2 * largest                # one that is cast there


@pytest.mark.parametrize("name, layout_name, budget_bytes", [
    pytest.param(*row, marks=[] if row in STREAMED[:1] else pytest.mark.slow) for row in STREAMED])
def test_weights_that_stay_in_host_memory_come_once_a_step(tmp_path, monkeypatch, name, layout_name, budget_bytes):
    """None of them is copied while the model is loaded, nor, where the file has them so, in host memory."""
    model, layout = published(name, None)[0], parse_layout(layout_name)
    checkpoint = sparse_folder(tmp_path, model)
    spec = dataclasses.replace(spec_of(checkpoint, layout), weights_memory=int(budget_bytes))
    table = table_of(model, spec)
    own = own_blocks(table, 0) if spec.stages is not None else None
    plan, _ = plan_weights(table, spec.weights_memory, own)
    outside = build_empty(model.family, checkpoint.config)
    monkeypatch.setattr(loader, "build_empty", lambda family, config: outside)
    copies = Copies()
    monkeypatch.setattr(loader, "CopyThread", lambda device, staging: copies)
    kept = []
    monkeypatch.setattr(loader.HostCopies, "keep", lambda self, *given: kept.append(given))
    with monkeypatch.context() as changed, fake_cuda_device(), DeviceWork() as work, Holes() as holes:
        on_device = keep_what_is_moved(changed)
        loaded = loader.load_transformer(spec, CUDA, choose_blocks=own and (lambda _: own))
        while_loading, resident_bytes = sum(holes.sent), work.resident_bytes
        in_steps = [_stepped(loaded.offloaded, own or range(len(table.block_sizes)), copies)
                    for _ in range(2)]
        at_work = work.resident_bytes
        del on_device

    assert resident_bytes == plan.device_bytes - plan.buffer_bytes
    # what is held in float32 travels as the file has it
    assert 0.95 * resident_bytes < while_loading <= resident_bytes
    assert at_work == plan.device_bytes <= budget_bytes and in_steps[1] == plan.offloaded_bytes > 0
    assert loaded.offloaded.blocks == plan.blocks
    assert kept == []
    assert work.waits == {} and work.mixed == {}


def _stepped(offloaded, blocks, copies):
    """Bytes that go to the device in a step of these blocks. After it the first ones come for the next."""
    before = copies.num_bytes
    offloaded.begin(blocks)
    for block in blocks:
        offloaded.enter(block)
        offloaded.leave(block)
    return copies.num_bytes - before
