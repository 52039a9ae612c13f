"""A rank of tensor parallelism holds its share of a file's layers, and no more memory than that."""

import contextlib
import json
from dataclasses import replace

import pytest
import torch

from tests.support.model_zoo import FOLDERS, PIPELINES, example, having, save_as_published
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.checkpoints.quantisation.gguf import dequantised
from xdit_backend.checkpoints.weight_deltas import change_weights
from xdit_backend.checkpoints.weight_table import weight_table
from xdit_backend.models.common.tp_plan import REPLICATED, find_style
from xdit_backend.protocol.errors import UnsupportedError
from xdit_backend.protocol.shared_memory import SegmentStore
from xdit_backend.protocol.specs import Change, LowRank

CPU = torch.device("cpu")


def check(path, dtypes, degree=2, quantisation=""):
    """Load the whole, and each rank's share; compare them and their sizes.
    Returns the share of the whole that rank 0 holds."""
    header = open_checkpoint(path)
    family = header.family
    read = []                                                  # (bytes so far, in all) that a loader says
    spec = header.spec(*dtypes, quantisation=quantisation)
    whole = load_transformer(spec, CPU, lambda *said: read.append(said)).model
    spec, parts = replace(spec, tensor_degree=degree), dict(whole.named_parameters())
    of_whole, in_all = read[-1][1], sum(parameter.nbytes for parameter in parts.values())
    buffers = dict(whole.named_buffers())
    for rank in range(degree):
        loaded = load_transformer(spec, CPU, lambda *said: read.append(said), tensor_rank=rank)
        model, splits = loaded.model, loaded.splits
        for name, parameter in model.named_parameters():
            wanted = splits[name].own(parts[name].data, degree, rank) if name in splits else parts[name]
            assert torch.equal(parameter.float(), wanted.float()), name
            assert parameter.is_contiguous() or name not in splits
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, splits[name].own(buffers[name], degree, rank) if name in splits
                               else buffers[name]), name
        blocks = tuple(f"{name}." for name in (*(name for list_ in family.blocks for name in list_.names),
                                               *family.plan.unstaged_blocks))
        styles = {name: find_style(family.plan.tp_plan, name.removeprefix(block).partition(".")[2])
                  for block in blocks for name, module in whole.named_modules()
                  if isinstance(module, torch.nn.Linear) and name.startswith(block)}
        linears = [name for name, style in styles.items() if style != REPLICATED]
        formula = sum(parameter.nbytes / (degree if name.rpartition(".")[0] in linears else 1)
                      for name, parameter in parts.items())
        held = sum(parameter.nbytes for parameter in model.parameters())
        assert abs(held / formula - 1) < 0.05
        # buffers, and what is held in another type than the file's
        auxiliary = of_whole - in_all
        assert read[-1][0] == read[-1][1] and (quantisation or abs(read[-1][1] / (formula + auxiliary) - 1) < 0.05)
        assert (rank or held + sum(buffer.nbytes for buffer in model.buffers())
                == weight_table(whole, family, spec).resident_bytes)
    return held / in_all


@pytest.mark.parametrize("name", having("tensor", FOLDERS))
def test_a_rank_reads_its_share_of_a_diffusers_folder(tmp_path, name):
    save_as_published(example(name, torch.float32).model, tmp_path / "transformer")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": PIPELINES.get(name, "Pipeline")}))

    assert check(tmp_path / "transformer", ("float32", "float32")) < 0.97


@pytest.mark.parametrize("kind, dtypes", [("sd3", ("float32", "float32")), ("sd3", ("float8_e4m3fn", "bfloat16")),
                                          ("flux", ("float8_e4m3fn", "bfloat16")), ("wan", ("bfloat16", "bfloat16"))])
def test_a_rank_reads_its_share_of_a_single_file(tmp_path, kind, dtypes):
    """The publishers' formats, with fused layers, and plain float8."""
    from tests.support.comfyui_server import comfyui_folder
    from tests.support.tiny_checkpoints import import_comfyui, save
    if comfyui_folder() is None:
        pytest.skip("no ComfyUI to make the file with")
    import_comfyui(comfyui_folder())
    save(kind, tmp_path / "model.safetensors", dtype=getattr(torch, dtypes[0]))

    assert check(tmp_path / "model.safetensors", dtypes) < 0.95


@pytest.mark.parametrize("per_row", [True, False])
def test_a_rank_reads_its_share_of_a_scaled_file(file_of, tmp_path, per_row):
    """A scale of each row goes with the row."""
    from tests.support.tiny_checkpoints import save_scaled
    save_scaled(tmp_path / "scaled.safetensors", file_of("sd3"), "comfy_quant", per_row)

    assert check(tmp_path / "scaled.safetensors", ("float32", "float32")) < 0.95


@pytest.mark.parametrize("format_", ["int8_convrot", pytest.param("int8_tensorwise", marks=pytest.mark.slow)])
def test_a_rank_reads_its_share_of_an_int8_file(file_of, tmp_path, format_):
    """Whole groups of those that are rotated together, or the degrees that have them are said."""
    from tests.support.comfy_quants import save_comfy_quant
    save_comfy_quant(tmp_path / "int8.safetensors", file_of("sd3"), format_)

    assert check(tmp_path / "int8.safetensors", ("float32", "float32")) < 0.95
    header = open_checkpoint(tmp_path / "int8.safetensors")
    cut = pytest.raises(UnsupportedError, match="^Use tensor_degree 2 or 4, tensor_degree 1 .*has 256 inputs, in "
                                                "blocks of 64, ")
    with cut if format_ == "int8_convrot" else contextlib.nullcontext():
        load_transformer(header.spec("float32", "float32", tensor_degree=8), CPU)


@pytest.mark.quantisers
@pytest.mark.parametrize("quantisation", ["int8", "nf4"])
def test_a_rank_has_its_share_of_what_is_quantised_whole(file_of, quantisation):
    assert check(file_of("sd3"), ("float32", "float32"), quantisation=quantisation) < 0.95
    header = open_checkpoint(file_of("sd3"))
    spec = header.spec("float32", "float32", tensor_degree=16, quantisation=quantisation)
    message = "^Use tensor_degree 2 or 4, tensor_degree.*fp8 or int8: .*has 256 inputs, in blocks of 64, "
    with pytest.raises(UnsupportedError, match=message) if quantisation == "nf4" else contextlib.nullcontext():
        load_transformer(spec, CPU)


def check_numbers(path, type_):
    """The numbers that a rank's blocks come to are its share of the inputs."""
    header = open_checkpoint(path)
    dtypes = ("float32", "float32")
    whole = dict(load_transformer(header.spec(*dtypes), CPU).model.named_parameters())
    for rank in range(2):
        loaded = load_transformer(header.spec(*dtypes, tensor_degree=2), CPU, tensor_rank=rank)
        splits = loaded.splits
        cut = {name: weight for name, weight in loaded.model.named_parameters()
               if name in splits and splits[name].dim == 1 and weight.dtype == torch.uint8}
        assert len(cut) > 5
        for name, weight in cut.items():
            parts = dequantised(whole[name], type_).split(splits[name].parts, 1)
            assert torch.equal(dequantised(weight, type_),
                               torch.cat([part.chunk(2, 1)[rank] for part in parts], 1)), name


@pytest.mark.parametrize("type_", ["Q4_K", "Q8_0"])
def test_a_rank_reads_its_share_of_a_gguf_file(file_of, tmp_path, type_):
    """Whole blocks of rows, or the degrees that have whole ones are said."""
    from tests.support.tiny_checkpoints import save_gguf
    save_gguf(tmp_path / "model.gguf", file_of("sd3"), type_)
    header = open_checkpoint(tmp_path / "model.gguf")

    if type_ == "Q8_0":
        assert check(tmp_path / "model.gguf", ("float32", "float32")) < 0.95
        check_numbers(tmp_path / "model.gguf", type_)
    degrees = "tensor_degree 2 or 4 or 8, " * (type_ == "Q8_0")
    with pytest.raises(UnsupportedError, match=f"^Use {degrees}tensor_degree.*fp8"
                       + (" or int8: " if type_ == "Q8_0" else ", int8 or Q8_0: ")
                       + "tensor_degree=(2|16) cannot shard these quantised weights, as transformer_blocks.0.* has "
                       f"256 inputs, in blocks of {256 if type_ == 'Q4_K' else 32}, "):
        load_transformer(header.spec("float32", "float32", tensor_degree=2 if type_ == "Q4_K" else 16), CPU)


@pytest.fixture
def store():
    store = SegmentStore()
    yield store
    store.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_its_share_of_a_lora(store, tmp_path, rank):
    """Of a layer split by columns, of one split by rows and its bias, and back again."""
    example("SD3", torch.float32).model.save_pretrained(tmp_path / "transformer")
    header = open_checkpoint(tmp_path / "transformer")
    dtypes = ("float32", "float32")
    whole = load_transformer(header.spec(*dtypes), CPU)
    share = load_transformer(header.spec(*dtypes, tensor_degree=2), CPU, tensor_rank=rank)
    model, splits, files = share.model, share.splits, share.files
    before, homes = {name: tensor.clone() for name, tensor in model.state_dict().items()}, files.keys() | set()
    product = LowRank(store.share(torch.randn(32, 2)), store.share(torch.randn(2, 32)), 0.5)
    attention = "transformer_blocks.0.attn"
    summed = Change(None, (product,), *dtypes)
    changes = {f"{attention}.to_q.weight": summed, f"{attention}.to_out.0.weight": summed,
               f"{attention}.to_out.0.bias": Change(store.share(torch.ones(32)), ())}

    change_weights(whole, changes)
    change_weights(share, changes)

    changed = dict(whole.model.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = splits[name].own(changed[name].data, 2, rank) if name in splits else changed[name]
        assert torch.equal(parameter, wanted), name
        assert parameter.untyped_storage().nbytes() == parameter.nbytes or id(parameter) in files, name
    assert not torch.equal(model.get_submodule(attention).to_q.weight, before[f"{attention}.to_q.weight"])

    change_weights(share, dict.fromkeys(changes, Change(None, ())))

    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert files.keys() == homes
