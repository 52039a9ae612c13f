"""Compiled blocks of files of every type: weights that are cast, unpacked or multiplied as they are held, come from
host memory, and are changed by a LoRA and back give the bits that they give as they are. A LoRA that is added in place
to products of weights as they are held is added once."""

import dataclasses

import pytest
import torch
from torch._dynamo.utils import counters

import tests.support.reusing_backend  # noqa: F401
from tests.support.comfy_quants import WRITTEN, save_as
from tests.support.tiers import by_default
from tests.unit.checkpoints.offload.test_offloaded_files import loaded_of, prediction
from tests.unit.checkpoints.test_weight_deltas import PROJ, QKV, messages_of
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.quantisation import kitchen_layers
from xdit_backend.checkpoints.quantisation.quantise_on_load import TYPES
from xdit_backend.checkpoints.weight_deltas import change_weights
from xdit_backend.protocol.shared_memory import SegmentStore
from xdit_backend.protocol.specs import Change, ForwardOptions


@pytest.mark.parametrize("how", [*by_default(["scaled", "Q4_K"],
                                             ["float32", "bfloat16", "float8_e4m3fn", "scaled", "Q4_K", "Q8_0",
                                              *WRITTEN]),
                                 *(pytest.param(how, marks=pytest.mark.quantisers) for how in ("int8", "nf4"))])
def test_compiled_blocks_hold_weights_as_they_are(file_of, tmp_path, how):
    torch._dynamo.reset()
    counters.clear()
    store, is_plain = SegmentStore(), hasattr(torch, how) or how in TYPES
    checkpoint = open_checkpoint(file_of("sd3") if is_plain else save_as(how, tmp_path, file_of("sd3")))
    spec = checkpoint.spec(how if hasattr(torch, how) and how not in TYPES else "float32", "float32",
                           quantisation=how if how in TYPES else "")

    def same(loaded):
        """The bits as they are, and as graphs; and how many graphs there are."""
        wanted = prediction(loaded)
        assert torch.equal(prediction(loaded, options=ForwardOptions(compile_backend="eager")), wanted)
        return wanted, counters["stats"]["unique_graphs"]
    try:
        with torch.inference_mode():
            whole, coming = (loaded_of(dataclasses.replace(spec, weights_memory=budget)) for budget in (0, 1))
            before, graphs = same(whole)
            rows = messages_of(store, (256, 2), (2, 256), (0, 256, 256))
            changes = {QKV: Change(None, (rows,), "float32", "float32"),
                       PROJ: Change(store.share(torch.randn(256, 256)), ())}
            change_weights(whole.transformer, changes)
            changed, of_changed = same(whole)
            change_weights(whole.transformer, dict.fromkeys(changes, Change(None, ())))
            again, at_last = same(whole)
            # a layer that is stored quantised has another graph while a LoRA is beside it
            assert torch.equal(before, again) and not torch.equal(before, changed) and at_last == of_changed
            assert of_changed == graphs or not is_plain or how in TYPES
            assert torch.equal(same(coming)[0], before)
    finally:
        store.close()


# formats that any device multiplies as they are held
MULTIPLIED = "int8_tensorwise", "int8_convrot", "convrot_w4a4", "asym_w4a8_int8"


@pytest.fixture
def with_a_lora(file_of, tmp_path):
    """how weights are held -> (a model without a LoRA's values, the values that it adds: a function that predicts with
    a backend, with or without it)."""
    torch._dynamo.reset()
    store = SegmentStore()

    def of(how):
        checkpoint = open_checkpoint(save_as(how, tmp_path, file_of("sd3")))
        loaded = loaded_of(checkpoint.spec("float32", "float32"))
        rows = messages_of(store, (256, 2), (2, 256), (0, 256, 256))

        def predicted(has_lora, backend=""):
            terms = (rows,) if has_lora else ()
            change_weights(loaded.transformer, {QKV: Change(None, terms, "float32", "float32")})
            return prediction(loaded, options=ForwardOptions(compile_backend=backend))
        return predicted
    with torch.inference_mode():
        yield of
    store.close()


@pytest.mark.parametrize("how", by_default(MULTIPLIED[:1], MULTIPLIED))
def test_a_lora_is_added_in_place_once_in_compiled_blocks(with_a_lora, how):
    """Each prediction is of two forwards, the second of which finds what the first has left."""
    predicted = with_a_lora(how)
    without, wanted = predicted(False), predicted(True)

    assert torch.equal(predicted(True, "reusing"), wanted) and torch.equal(predicted(False, "reusing"), without)
    assert (wanted - without).abs().max() > 1e-2 * wanted.abs().max()


def test_it_notices_a_product_that_is_given_again_with_the_lora_in_it(with_a_lora, monkeypatch):
    predicted, plain, made = with_a_lora("int8_tensorwise"), kitchen_layers.product, {}
    wanted = predicted(True)

    def product(layer, weight, auxiliary, tensor, *others):
        return made.setdefault((weight.data_ptr(), tensor.sum().item()),
                               plain(layer, weight, auxiliary, tensor, *others))
    monkeypatch.setattr(kitchen_layers, "product", product)

    assert not torch.equal(predicted(True), wanted)
