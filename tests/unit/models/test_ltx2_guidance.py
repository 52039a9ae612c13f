"""Self-attention of LTX-2 that gives its values in some blocks equals diffusers' own perturbed attention."""

import functools

import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2PerturbedAttnProcessor

import tests.support.reusing_backend  # noqa: F401
from tests.support.model_zoo import example
from tests.support.ranks import run_ranks
from tests.support.tolerances import InDouble, within
from tests.unit.parallel.test_tensor_parallel import on_shares
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import SINGLE, build_mesh
from xdit_backend.hooks.forward_context import ModelPatches
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.protocol.specs import ForwardOptions, Layout

EXACT, BLOCK = 1e-12, 1
OPERATIONS = {f"double_block.{BLOCK}": "values"}


def perturbed():
    """(example, diffusers' result with perturbed attention in a block, the largest difference that this makes)."""
    one = example("LTX-2")
    before, block, perturb = one.run(), one.model.transformer_blocks[BLOCK], LTX2PerturbedAttnProcessor()
    kept = [(attention, attention.processor) for attention in (block.attn1, block.audio_attn1)]
    for attention, _ in kept:
        attention.processor = functools.partial(perturb, all_perturbed=True)
    wanted = one.run()
    for attention, processor in kept:
        attention.processor = processor
    return one, wanted, largest(wanted, before)


def largest(found, wanted):
    return max((mine - want).abs().max().item() for mine, want in zip(found, wanted, strict=True))


def run_with_values(one, hooks, mesh, compile_backend=""):
    context = one.loaded(hooks).context(mesh, Traffic(), one.latent, one.timestep, one.conditioning,
                                        patches=ModelPatches(operations=OPERATIONS),
                                        options=ForwardOptions(compile_backend=compile_backend))
    return one.family.prediction(hooks.run(context)[0], one.latent)


@pytest.mark.parametrize("compile_backend", ["", "reusing"])
def test_one_device_equals_perturbed_attention(compile_backend):
    torch._dynamo.reset()
    one, wanted, of_block = perturbed()

    within(largest(run_with_values(one, Hooks(one.model, one.family.plan), SINGLE, compile_backend), wanted), EXACT)
    assert of_block > 1e-3


def on_rank(rank, world_size, layout):
    with torch.no_grad(), InDouble():
        one, wanted, _ = perturbed()
        if layout.tensor_degree > 1:
            mesh, hooks, _ = on_shares(one, layout, world_size)
        else:
            mesh, hooks = build_mesh(layout, world_size), Hooks(one.model, one.family.plan)
        return largest(run_with_values(one, hooks, mesh), wanted)


@pytest.mark.parametrize("layout", [Layout(ulysses_degree=2), Layout(ring_degree=2), Layout(tensor_degree=2)], ids=str)
def test_ranks_equal_perturbed_attention(layout):
    within(max(run_ranks(on_rank, 2, layout)), EXACT)
