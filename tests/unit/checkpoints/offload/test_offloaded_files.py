"""Quantised weights come from host memory as they are held, and are unpacked where they are used: the same bits as from
the device, also with a LoRA on them."""

import dataclasses

import pytest
import torch

from tests.support.comfy_quants import WRITTEN, save_as
from tests.support.tiers import by_default
from tests.unit.checkpoints.quantisation.test_layerwise_casting import CPU, requested
from tests.unit.checkpoints.test_weight_deltas import PROJ, QKV, messages_of
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.checkpoints.offload.host_weights import HostCopies
from xdit_backend.checkpoints.offload.offload_plan import plan_weights, with_host_bytes
from xdit_backend.checkpoints.quantisation.quantise_on_load import TYPES
from xdit_backend.checkpoints.weight_deltas import change_weights
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import SINGLE
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.protocol.shared_memory import SegmentStore
from xdit_backend.protocol.specs import Change
from xdit_backend.worker.models import Loaded


def loaded_of(spec):
    return with_hooks(load(spec))


def load(spec, host_copies=None):
    """All weights in memory of this process: products of a file's map, which lies as it lies, may round otherwise."""
    return load_transformer(spec, CPU, host_copies=host_copies, chunk_bytes=2 ** 16)


def with_hooks(transformer):
    hooks = Hooks(transformer.model, transformer.family.plan, (), transformer.offloaded)
    return Loaded(transformer, hooks, torch.float32, range(0))


def prediction(loaded, **fields):
    latent, timestep, conditioning = requested(loaded.family, loaded.transformer.config)
    for _ in range(2):                                         # the second with what was fetched ahead
        output, _ = loaded.hooks.run(loaded.context(SINGLE, Traffic(), latent, timestep, conditioning, **fields))
    return output.clone()


@pytest.mark.parametrize("how", [*by_default(["scaled", "Q4_K", "nvfp4"], ["scaled", "Q4_K", "Q8_0", *WRITTEN]),
                                 *(pytest.param(how, marks=pytest.mark.quantisers) for how in ("int8", "nf4"))])
def test_quantised_weights_come_as_they_are_held(file_of, tmp_path, how):
    store, path = SegmentStore(), file_of("sd3") if how in TYPES else save_as(how, tmp_path, file_of("sd3"))
    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec("float32", "float32", quantisation=how if how in TYPES else "")
    plan, names = plan_weights(checkpoint.weight_table(spec), 1)
    try:
        with torch.inference_mode():
            whole, coming = (loaded_of(dataclasses.replace(spec, weights_memory=budget)) for budget in (0, 1))
            offloaded, before = coming.transformer.offloaded, prediction(whole)
            assert torch.equal(prediction(coming), before)
            # as few bytes as the file has, or as they were quantised to
            assert offloaded.blocks == plan.blocks and offloaded.host_bytes == plan.offloaded_bytes
            assert offloaded.host_bytes < 0.4 * sum(
                4 * linear.in_features * linear.out_features for linear in
                {coming.transformer.model.get_submodule(name.rpartition(".")[0]) for name in names
                 if name.endswith(".weight")} if isinstance(linear, torch.nn.Linear))
            rows = messages_of(store, (256, 2), (2, 256), (0, 256, 256))
            changes = {QKV: Change(None, (rows,), "float32", "float32"),
                       PROJ: Change(store.share(torch.randn(256, 256)), ())}
            for each in (whole, coming):
                change_weights(each.transformer, changes)
            changed = prediction(whole)
            assert torch.equal(prediction(coming), changed) and not torch.equal(changed, before)
            for each in (whole, coming):
                change_weights(each.transformer, dict.fromkeys(changes, Change(None, ())))
            assert torch.equal(prediction(coming), before)
    finally:
        store.close()


@pytest.mark.parametrize("how", by_default(["scaled", "Q4_K", "nvfp4", "mxfp8"],
                                           ["scaled", "Q4_K", *WRITTEN]))
def test_ranks_write_a_part_each_of_what_all_have_come_from_host_memory(file_of, tmp_path, how):
    """The first one has loaded the model before the second one has written anything."""
    checkpoint = open_checkpoint(save_as(how, tmp_path, file_of("sd3")))
    spec = checkpoint.spec("float32", "float32")
    shared = with_host_bytes(dataclasses.replace(spec, weights_memory=1), checkpoint.weight_table(spec))
    memory = torch.full((shared.host_bytes,), 255, dtype=torch.uint8)
    with torch.inference_mode():
        before = prediction(loaded_of(spec))
        for loaded in [load(shared, HostCopies(memory, rank, 2)) for rank in range(2)]:
            assert torch.equal(prediction(with_hooks(loaded)), before)
