"""Compiled blocks of files of every type: weights that are cast, unpacked or multiplied as they are held, come from
host memory, and are changed by a LoRA and back give the bits that they give as they are."""

import dataclasses

import pytest
import torch
from torch._dynamo.utils import counters

from tests.checkpoints.test_changes import PROJ, QKV, messages_of
from tests.checkpoints.test_offloaded_files import loaded_of, prediction
from tests.comfy_quants import WRITTEN, save_as
from tests.tiers import by_default
from xdit_backend.checkpoints.changes import change_weights
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.quantise import TYPES
from xdit_backend.protocol.segments import SegmentStore
from xdit_backend.protocol.specs import Change


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
        assert torch.equal(prediction(loaded, compile_backend="eager"), wanted)
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
