"""GGUF files: our model computes with what the package gguf makes of their blocks, held as in the file;
broken ones are refused."""

import struct

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.fake_cuda import CUDA, fake_cuda_device
from tests.support.tiny_checkpoints import families, matrices, metadata_of, save_gguf
from tests.support.tolerances import close, relative_error
from tests.unit.checkpoints.quantisation.test_layerwise_casting import ours
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.detection import recognise
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.checkpoints.quantisation.gguf import PACKED, UNPACKED, dequantised, row_bytes
from xdit_backend.checkpoints.quantisation.quantised_weights import SCALED, unpacked
from xdit_backend.protocol.errors import CheckpointError


@pytest.mark.parametrize("type_", PACKED)
def test_blocks_of_every_type_come_to_what_the_package_makes_of_them(tmp_path, type_):
    values = torch.randn(6, 512, generator=torch.Generator().manual_seed(1))
    save_file({"a.weight": values}, tmp_path / "plain.safetensors")
    want = save_gguf(tmp_path / "a.gguf", tmp_path / "plain.safetensors", type_)["a.weight"]
    header = open_checkpoint(tmp_path / "a.gguf")
    first, _ = header.stored["a.weight"]
    raw = torch.tensor(list((tmp_path / "a.gguf").read_bytes()[first:first + row_bytes(type_, values.numel())]),
                       dtype=torch.uint8)

    result = dequantised(raw.view(6, -1), type_)

    close(result, want, 1e-6)
    for dtype in (torch.bfloat16, torch.float64):              # computed in float32, rounded once
        assert torch.equal(dequantised(raw.view(6, -1), type_, dtype), result.to(dtype))


@pytest.mark.parametrize("type_, moved_bytes",
                         [("Q8_0", 3.4), ("Q4_0", 6.9), ("Q4_1", 6.2), ("Q5_0", 13), ("Q5_1", 12.3), ("Q2_K", 6.9), (
                             "Q3_K", 11.5), ("Q4_K", 6.7), ("Q5_K", 10.8), ("Q6_K", 11.4), ("IQ4_NL", 15.9),
                          ("IQ4_XS", 16.2), ("INT8", 3.1), ("F8_E4M3", 5.1)])
def test_unpacking_does_not_wait_for_the_device(monkeypatch, type_, moved_bytes):
    """Every linear of every forward does it. moved_bytes:
    that its kernels read and write for a number in bfloat16, which takes two."""
    rows, columns, scale = 512, 1024, None
    with fake_cuda_device(monkeypatch) as work_of:
        if type_ in SCALED:
            blocks, scale = torch.empty(rows, columns, dtype=SCALED[type_],
                                        device=CUDA), torch.empty(rows, 1, device=CUDA)
        else:
            blocks = torch.empty(rows, row_bytes(type_, columns), dtype=torch.uint8, device=CUDA)
        work = work_of(unpacked, blocks, type_, scale, torch.bfloat16)

    assert work.kernels > 0 and work.waits == []
    assert work.moved_bytes <= moved_bytes * rows * columns
    assert work.peak_bytes <= (6.1 if type_.startswith("IQ4") else 3.6) * rows * columns


# whose factor is not in one place
@pytest.mark.parametrize("type_", [type_ for type_ in UNPACKED if type_ != "IQ1_M"])
def test_types_that_are_unpacked_when_read_equal_the_dequantised_file(file_of, tmp_path, type_):
    family, path = families()["sd3"], tmp_path / "model.gguf"
    want = save_gguf(path, file_of("sd3"), type_)
    spec = open_checkpoint(path).spec("float32", "float32")
    loaded = load_transformer(spec, torch.device("cpu"))
    model, wanted = loaded.model, family.detection.convert(want, loaded.config)

    assert len(open_checkpoint(path).quantised) > 10
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in model.named_parameters())
    assert open_checkpoint(path).weight_table(spec).resident_bytes == sum(
        tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("kind, type_", [("sd3", "Q4_K"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
    ("flux", "Q5_K"), ("wan", "Q8_0"), ("qwen-image", "Q4_0")))])
def test_a_gguf_file_equals_the_dequantised_one(file_of, tmp_path, kind, type_):
    """Matrices that fit blocks take what they take in the file; what the host plans is what is held."""
    family, path = families()[kind], tmp_path / "model.gguf"
    save_file(save_gguf(path, file_of(kind), type_), tmp_path / "plain.safetensors", metadata_of(file_of(kind)))

    with torch.inference_mode():
        result, want = ours(path, family, "float32"), ours(tmp_path / "plain.safetensors", family, "float32")
        exact = ours(file_of(kind), family, "float32")

    close(result, want, 1e-5)
    assert relative_error(result, exact) > 1e-3
    header = open_checkpoint(path)
    spec = header.spec("float32", "float32")
    held, plain = (open_checkpoint(file).weight_table(spec).resident_bytes
                   for file in (path, tmp_path / "plain.safetensors"))
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]]
    numbers = sum(header.shapes[name][0] * header.shapes[name][1] for name in header.quantised)
    assert header.quantised <= matrices(file_of(kind)) and len(header.quantised) > 10
    assert held == plain - 4 * numbers + numbers // block * size


def write(path, tensors, count=None, **metadata):
    """A GGUF file. tensors: {name: (array, its type's number or None, what is added to its offset)}.
    count: what its header says."""
    said, infos, data = b"", b"", b""
    string = lambda text: struct.pack("<Q", len(text)) + text.encode()  # noqa: E731
    for key, shape in metadata.items():
        said += string(f"comfy.gguf.orig_shape.{key}") + struct.pack(f"<IIQ{len(shape)}i", 9, 5, len(shape), *shape)
    for name, (array, type_, moved) in tensors.items():
        dims = list(reversed(array.shape))
        infos += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_, len(data) + moved)
        data += array.tobytes() + bytes(-array.nbytes % 32)
    raw = b"GGUF" + struct.pack("<IQQ", 3, len(tensors) if count is None else count, len(metadata)) + said + infos
    path.write_bytes(raw + bytes(-len(raw) % 32) + data)


ONES, F32 = np.ones((4, 8), np.float32), 0


@pytest.mark.parametrize("tensors, how, words", [
    ({"a": (ONES, F32, 2 ** 40)}, {}, "model.gguf again, it is cut short: its header promises 1,099,"),
    ({"a": (ONES, F32, 0), "b": (ONES, F32, -32)}, {}, "b starts at byte"),
    ({"a": (ONES, 39, 0)}, {}, "holds a in the type MXFP4, which xDiT does not read"),
    ({"a": (ONES, 12345, 0)}, {}, "in the type number 12345"),
    ({"a": (ONES, 12, 0)}, {}, "a has the shape .4, 8. in Q4_K, which do not match"),
    ({"a": (ONES, F32, 0)}, {"a": (5, 8)}, "in F32 for .5, 8., which do not match"),
    ({"a": (ONES, F32, 0)}, {"count": 2 ** 60}, "has a header that cannot be read"),
], ids=range(7))
def test_a_lying_header_is_refused_in_words(tmp_path, tensors, how, words):
    write(tmp_path / "model.gguf", {"a": (ONES, F32, 0)})
    assert open_checkpoint(tmp_path / "model.gguf").shapes == {"a": (4, 8)}
    write(tmp_path / "model.gguf", tensors, **how)

    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_file_cut_anywhere_is_refused(tmp_path):
    write(tmp_path / "whole.gguf", {"a": (ONES, F32, 0), "b": (ONES, F32, 0)}, a=(4, 4, 2))
    whole = (tmp_path / "whole.gguf").read_bytes()
    assert open_checkpoint(tmp_path / "whole.gguf").shapes == {"a": (4, 4, 2), "b": (4, 8)}
    for length in range(len(whole)):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="cut.gguf again(, it is cut short|: it has a header)"):
            open_checkpoint(tmp_path / "cut.gguf")


def test_a_text_encoder_is_called_that(tmp_path):
    write(tmp_path / "model.gguf", {"token_embd.weight": (ONES, F32, 0), "enc.blk.0.attn_q.weight": (ONES, F32, 0)})

    with pytest.raises(CheckpointError, match="a text encoder or a language model in GGUF"):
        recognise(open_checkpoint(tmp_path / "model.gguf"))
