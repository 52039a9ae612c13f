"""Files of published models at their full size, with a real header and holes for content, as each rank loads them on a
pretended device: its own weights to the byte, each copied once, without a wait, never more than one tensor twice."""

import json
import math
import struct

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dry_run.rows import published, spec_of, weights_of
from xdit_backend.bench.size import parse_layout
from xdit_backend.checkpoints import loading
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.transformer import build_empty
from xdit_backend.dry_run.device_work import DeviceWork
from xdit_backend.dry_run.pretended import CUDA, pretended_cuda
from xdit_backend.dry_run.rank import outline, own_blocks, world_size_of

# with so many blocks of each kind, or all: a file larger than the memory of a machine cannot be mapped there
ROWS = [("z-image", None, "pipefusion2", "bfloat16"), ("flux.1-dev", 8, "pipefusion2", "bfloat16"),
        ("flux.1-dev", 8, "tensor2", "float8_e4m3fn"), ("wan2.1-14b-720p", 8, "pipefusion4", "bfloat16"),
        ("wan2.1-14b-720p", 8, "tensor4", "bfloat16"), ("qwen-image", 8, "pipefusion2", "float8_e4m3fn"),
        ("sd3.5-large", None, "tensor2", "bfloat16"), ("hunyuanvideo-1.5", None, "pipefusion2", "float8_e4m3fn")]
DEFAULT = ROWS[:1]


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
    """A diffusers folder of a published.Unwritten."""
    sparse_file(folder / "diffusion_pytorch_model.safetensors", model.shapes)
    config = {"_class_name": model.family.transformer} | {
        key: value for key, value in model.config.items() if not key.startswith("_")}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return open_checkpoint(str(folder))


def keep_what_is_moved(monkeypatch):
    """The list of all that is moved to the device: a weight has that memory, but a pretended tensor lives only as long
    as what refers to it."""
    plain, on_device = loading.moved, []
    monkeypatch.setattr(loading, "moved", lambda *given: on_device.append(plain(*given)) or on_device[-1])
    return on_device


@pytest.mark.parametrize("name, blocks, layout_name, storage", [
    pytest.param(*row, marks=[] if row in DEFAULT else pytest.mark.slow) for row in ROWS])
def test_a_rank_loads_its_own_weights_once(tmp_path, monkeypatch, name, blocks, layout_name, storage):
    model, layout = published(name, blocks)[0], parse_layout(layout_name)
    checkpoint = sparse_folder(tmp_path, model)
    spec = spec_of(checkpoint, layout, storage)
    empty, _ = outline(model, spec)
    for rank in {0, world_size_of(layout) - 1}:
        own = own_blocks(empty, model.family, spec, rank) if spec.stages is not None else None
        outside = build_empty(model.family, checkpoint.config)
        monkeypatch.setattr(loading, "build_empty", lambda family, config, made=outside: made)
        with monkeypatch.context() as changed, pretended_cuda(), DeviceWork() as work, Holes() as holes:
            on_device = keep_what_is_moved(changed)
            loading.load_transformer(spec, CUDA, choose_blocks=own and (lambda _, own=own: own),
                                     tensor_rank=rank % spec.tensor_degree)
            largest = max(tensor.numel() for tensor in on_device)

        assert work.held_bytes == weights_of((model, None), layout_name, rank, storage)
        assert sum(holes.sent) == weights_of((model, None), layout_name, rank, item_bytes=2)
        assert work.waits == {} and work.mixed == {}
        assert work.peak_bytes - work.held_bytes <= 2 * largest                # one that is cast there
