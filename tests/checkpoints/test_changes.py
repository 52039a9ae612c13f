"""Weights that change after a model was loaded: only what is changed is read, where it is held; what is taken back is as before."""

import pytest
import torch

from tests.models.zoo import example
from xdit_backend.checkpoints import transformer
from xdit_backend.checkpoints.header import model_spec, read_header, recognise
from xdit_backend.checkpoints.transformer import change_weights, load_transformer
from xdit_backend.protocol.messages import Change, LowRank
from xdit_backend.protocol.segments import Segment, SegmentStore

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
    header = read_header(tmp_path)
    return model_spec(header, recognise(header), "float64", "float64")


def test_changes_are_made_and_taken_back_bit_for_bit(store, spec, monkeypatch):
    family, files, read = recognise(read_header(spec.path)), {}, []
    model, config = load_transformer(spec, family, CPU, files=files)
    before, homes = {name: tensor.clone() for name, tensor in model.state_dict().items()}, dict(files)
    assert homes
    up, down, other = torch.randn(32, 2), torch.randn(2, 16), torch.randn(32, 32).double()
    product = LowRank(store.share(up), store.share(down), 0.5, (1, 8, 16))
    monkeypatch.setattr(transformer, "_read", lambda header, wanted, _read=transformer._read: _read(
        header, lambda name: wanted(name) and (read.append(name) or True)))

    summed, replaced = Change(None, (product, product), "float64", "float64"), Change(store.share(other), ())
    change_weights(model, config, family, spec, CPU, {NAME.format(0): summed, NAME.format(1): replaced}, files=files)

    wanted = dict(before)
    wanted[NAME.format(0)] = before[NAME.format(0)].clone()
    for _ in range(2):
        wanted[NAME.format(0)][:, 8:24] += (0.5 * (up @ down)).double()
    wanted[NAME.format(1)] = other
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert read == [NAME.format(0)] and len(files) == len(homes) - 2

    change_weights(model, config, family, spec, CPU, {NAME.format(0): Change(None, ()), NAME.format(1): Change(None, ())}, files=files)

    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert files.keys() == homes.keys()


def test_a_stage_takes_the_changes_of_its_own_blocks(store, spec):
    """What is for others, it does not even open."""
    family = recognise(read_header(spec.path))
    model, config = load_transformer(spec, family, CPU, choose_blocks=lambda model: range(1, 3))
    mine, others = torch.randn(32, 32).double(), Change(Segment("/dev/shm/nothing", "float64", (32, 32)), ())

    change_weights(model, config, family, spec, CPU, {
        NAME.format(0): others, NAME.format(1): Change(store.share(mine), ()), NAME.format(3): others}, range(1, 3))

    assert torch.equal(model.state_dict()[NAME.format(1)], mine) and model.state_dict()[NAME.format(0)].is_meta
