"""Weights that change after a model was loaded: only what is changed is read, where it is held;
what is taken back is as before."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.comfy_quants import save_comfy_quant
from tests.support.model_zoo import example
from tests.support.tiny_checkpoints import save_dequantised, save_gguf, save_scaled
from tests.support.tolerances import close, relative_error
from xdit_backend.checkpoints import weight_deltas
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.checkpoints.quantisation.quantise_on_load import TYPES
from xdit_backend.checkpoints.weight_deltas import change_weights
from xdit_backend.memory.staging import StagingBuffers
from xdit_backend.protocol.errors import CheckpointError
from xdit_backend.protocol.shared_memory import Segment, SegmentStore
from xdit_backend.protocol.specs import Change, LowRank

CPU = torch.device("cpu")
NAME = "transformer_blocks.{}.attn.to_q.weight"


@pytest.fixture
def store():
    store = SegmentStore()
    yield store
    store.close()


@pytest.fixture
def spec(tmp_path):
    example("SD3").model.save_pretrained(tmp_path / "transformer")
    header = open_checkpoint(tmp_path)
    return header.spec("float64", "float64")


def test_changes_are_made_and_taken_back_bit_for_bit(store, spec, monkeypatch):
    read = []
    loaded = load_transformer(spec, CPU)
    model, files = loaded.model, loaded.files
    before, homes = {name: tensor.clone() for name, tensor in model.state_dict().items()}, dict(files)
    assert homes
    up, down, other = torch.randn(32, 2), torch.randn(2, 16), torch.randn(32, 32).double()
    product = LowRank(store.share(up), store.share(down), 0.5, (1, 8, 16))
    monkeypatch.setattr(weight_deltas, "read_file", lambda header, wanted, _read=weight_deltas.read_file: _read(
        header, lambda name: wanted(name) and (read.append(name) or True)))

    summed, replaced = Change(None, (product, product), "float64", "float64"), Change(store.share(other), ())
    change_weights(loaded, {NAME.format(0): summed, NAME.format(1): replaced})

    wanted = dict(before)
    wanted[NAME.format(0)] = before[NAME.format(0)].clone()
    for _ in range(2):
        wanted[NAME.format(0)][:, 8:24] += (0.5 * (up @ down)).double()
    wanted[NAME.format(1)] = other
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert read == [NAME.format(0)] and len(files) == len(homes) - 2

    change_weights(loaded, {NAME.format(0): Change(None, ()), NAME.format(1): Change(None, ())})

    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert files.keys() == homes.keys()


def in_pieces_and_whole(store, monkeypatch):
    """A tensor with four products of whole numbers, which are exact in any order: of all rows, of some, of some columns
    and, by a hook, of rows in the middle; made two rows at a time, and at once."""
    def term(rows, columns, offset=None):
        up, down = torch.randint(-4, 5, (rows, 2)), torch.randint(-4, 5, (2, columns))
        return LowRank(store.share(up.float()), store.share(down.float()), 0.5, offset)
    tensor, staging = torch.randint(-9, 10, (9, 6)).double(), StagingBuffers(CPU)
    change = Change(None, (term(9, 6), term(4, 6, (0, 3, 4)), term(9, 2, (1, 3, 2))), "float64", "float32",
                    (term(3, 6, (0, 4, 3)),))
    whole = weight_deltas.changed(tensor, change, staging)
    monkeypatch.setattr(weight_deltas, "SUMMED", 12)
    return weight_deltas.changed(tensor, change, staging), whole


def test_sums_that_are_made_a_few_rows_at_a_time_are_those_of_all(store, monkeypatch):
    pieces, whole = in_pieces_and_whole(store, monkeypatch)
    assert torch.equal(pieces, whole)


def test_it_notices_rows_that_are_added_elsewhere(store, monkeypatch):
    plain = weight_deltas._rows_of
    monkeypatch.setattr(weight_deltas, "_rows_of", lambda term, num_rows: (plain(term, num_rows)[0] // 2,
                                                                     plain(term, num_rows)[1]))
    pieces, whole = in_pieces_and_whole(store, monkeypatch)
    assert not torch.equal(pieces, whole)


def test_a_file_that_was_replaced_is_not_mixed_with_what_was_loaded(store, spec):
    other = torch.randn(32, 32).double()
    loaded = load_transformer(spec, CPU)
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    change = {NAME.format(0): Change(None, (LowRank(store.share(other), store.share(other), 0.5, None),), "float64",
                                     "float64")}
    file, = open_checkpoint(spec.path).files
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, f"{file}.new")
    os.replace(f"{file}.new", file)

    with pytest.raises(CheckpointError, match="has changed on disk since Load xDiT Model read it"):
        change_weights(loaded, change)
    with pytest.raises(CheckpointError, match="has changed on disk since Load xDiT Model read it"):
        load_transformer(spec, CPU)

    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.model.state_dict().items())
    checkpoint = open_checkpoint(spec.path)
    load_transformer(checkpoint.spec("float64", "float64"), CPU)
    os.rename(file, f"{file}.elsewhere")
    with pytest.raises(CheckpointError, match=f"Put the model's file back, .*: {file} is no longer there"):
        checkpoint.spec("float64", "float64")


QKV, PROJ = "joint_blocks.0.x_block.attn.qkv.weight", "joint_blocks.1.x_block.attn.proj.weight"


@pytest.mark.parametrize("how", ["scaled", "Q8_0", "nvfp4", pytest.param("mxfp8", marks=pytest.mark.slow),
                                 *(pytest.param(how, marks=pytest.mark.quantisers) for how in ("int8", "nf4"))])
def test_a_quantised_weight_stays_so_beside_factors_and_is_plain_where_it_is_replaced(file_of, store, tmp_path, how):
    """Compared with the same changes of the dequantised weights;
    factors of some rows of a fused matrix, and of some columns."""
    plain_path, quantisation = tmp_path / "plain.safetensors", how if how in TYPES else ""
    if quantisation:
        path = file_of("sd3")
        save_dequantised(plain_path, path, how)
    else:
        path = tmp_path / f"model.{'gguf' if how == 'Q8_0' else 'safetensors'}"
        save_file(save_scaled(path, file_of("sd3"), per_row=True) if how == "scaled"
                  else save_gguf(path, file_of("sd3"), how) if how == "Q8_0"
                  else save_comfy_quant(path, file_of("sd3"), how)[0], plain_path)
    specs = [open_checkpoint(file).spec("float32", "float32", quantisation=quantisation)
             for file, quantisation in ((path, quantisation), (plain_path, ""))]
    loaded, plain = (load_transformer(spec, CPU) for spec in specs)
    model = loaded.model
    before, data = outputs(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows, columns = (messages_of(store, *shapes)
                     for shapes in (((256, 2), (2, 256), (0, 256, 256)), ((256, 2), (2, 64), (1, 128, 64))))
    added = {QKV: Change(None, (rows, rows), "float32", "float32"),
             PROJ: Change(None, (columns,), "float32", "float32")}
    replaced = {QKV: Change(store.share(torch.randn(768, 256)), ()), PROJ: Change(None, ())}

    for change in (added, replaced):
        for each in (loaded, plain):
            change_weights(each, change)
        close(outputs(model), outputs(plain.model), 1e-6)
        assert relative_error(outputs(model), before) > 1e-3
        assert is_same(model.state_dict(), data) == (change is added)
    change_weights(loaded, {QKV: Change(None, ()), PROJ: Change(None, ())})

    assert torch.equal(outputs(model), before) and is_same(model.state_dict(), data)


def test_ranks_of_tensor_parallelism_have_their_rows_or_columns_of_the_factors(file_of, store, tmp_path):
    path = tmp_path / "model.safetensors"
    save_scaled(path, file_of("sd3"), per_row=True)
    loaded = load_transformer(open_checkpoint(path).spec("float32", "float32"), CPU)
    whole = loaded.model
    added = {QKV: Change(None, (messages_of(store, (768, 2), (2, 256), None),), "float32", "float32"),
             PROJ: Change(None, (messages_of(store, (256, 2), (2, 256), None),), "float32", "float32")}
    spec, parts = open_checkpoint(path).spec("float32", "float32", tensor_degree=2), []
    before, x = outputs(whole), torch.randn(3, 256)
    change_weights(loaded, added)
    for rank in range(2):
        share = load_transformer(spec, CPU, tensor_rank=rank)
        change_weights(share, added)
        first, second = (block.attn for block in share.model.transformer_blocks[:2])
        parts.append((first.to_q(x), second.to_out[0](x.chunk(2, 1)[rank])))

    queries, results = zip(*parts)
    close(torch.cat(queries, 1), whole.transformer_blocks[0].attn.to_q(x), 1e-5)
    close(sum(results), whole.transformer_blocks[1].attn.to_out[0](x), 1e-5)
    assert relative_error(outputs(whole), before) > 1e-3


def is_same(state, other):
    return all(tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in state.items())


def messages_of(store, up, down, offset):
    return LowRank(store.share(torch.randn(up)), store.share(torch.randn(down)), 0.3, offset)


def outputs(model):
    """What the first two blocks' changed layers make of the same input."""
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(5))
    attention = [block.attn for block in model.transformer_blocks[:2]]
    with torch.inference_mode():
        return torch.cat([attention[0].to_q(x), attention[0].to_k(x), attention[0].to_v(x), attention[1].to_out[0](x)],
                         1)


def test_a_stage_takes_the_changes_of_its_own_blocks(store, spec):
    """What is for others, it does not even open."""
    loaded = load_transformer(spec, CPU, choose_blocks=lambda model: range(1, 3))
    mine, others = torch.randn(32, 32).double(), Change(Segment("/dev/shm/nothing", "float64", (32, 32)), ())

    change_weights(loaded, {NAME.format(0): others, NAME.format(1): Change(store.share(mine), ()),
                            NAME.format(3): others})

    state = loaded.model.state_dict()
    assert torch.equal(state[NAME.format(1)], mine) and state[NAME.format(0)].is_meta
