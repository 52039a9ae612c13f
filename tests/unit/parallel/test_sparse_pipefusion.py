"""Block-sparse attention under PipeFusion selects by stale and extrapolated keys as its oracle does."""

from dataclasses import replace

import pytest
import torch

from tests.support.model_zoo import example
from tests.support.pipefusion_oracle import simulate
from tests.support.ranks import run_ranks
from tests.support.tolerances import within
from tests.unit.parallel.test_pipefusion import Pipeline, cuts
from xdit_backend.parallel import pipefusion, sparse_layout
from xdit_backend.protocol.specs import Layout, SparseOptions

EXACT = 1e-12
SIGMAS = [1.0, 0.75, 0.5, 0.25]
SHAPES = {"Wan": {"rows": 14, "columns": 16, "frames": 5},
          "HunyuanVideo": {"rows": 14, "columns": 16, "frames": 5, "num_text_tokens": 70}}
SOL = SparseOptions("sol-attn", tau=0.5, min_tokens=0)
SLA = SparseOptions("sla", keep_percent=20.0, min_tokens=0)


def sampled(rank, world_size, name, layout, sparse, num_patches, warmup_steps, extrapolation=0.0, mutant=None):
    """(latent of this rank, the oracle's)."""
    if mutant is not None:
        MUTANTS[mutant]()
    with torch.no_grad():
        one = example(name, **SHAPES[name])
        pipeline = Pipeline(rank, world_size, one, layout, extrapolation=extrapolation, sparse=sparse)
        latent = one.latent
        patches = cuts(one, num_patches, layout.ring_degree * layout.ulysses_degree)
        found = pipeline.sample(patches, warmup_steps, patches[0][0].dim, SIGMAS)
        if pipeline.link:
            pipeline.link.drain()
        other = replace(one, latent=latent, model=example(name, **SHAPES[name]).model)
        rows = [(patch.start, patch.start + count) for patch, count in patches]
        return found, simulate(other, rows, warmup_steps, SIGMAS, patches[0][0].dim, extrapolation, sparse)


@pytest.mark.parametrize("name, layout, sparse, num_patches, warmup_steps, extrapolation", [
    ("Wan", Layout(pipefusion_degree=2), SOL, 2, 1, 0.6), ("Wan", Layout(pipefusion_degree=2), SLA, 2, 0, 0.0),
    ("Wan", Layout(pipefusion_degree=2, ring_degree=2), SOL, 2, 1, 0.0),
    ("HunyuanVideo", Layout(pipefusion_degree=2), SLA, 2, 1, 0.6),
    ("HunyuanVideo", Layout(pipefusion_degree=2), SOL, 1, 0, 0.0),
    ("HunyuanVideo", Layout(pipefusion_degree=2, ulysses_degree=2), SOL, 2, 0, 0.0)], ids=str)
def test_sparse_patches_equal_the_oracle(name, layout, sparse, num_patches, warmup_steps, extrapolation):
    num_ranks = layout.pipefusion_degree * layout.ring_degree * layout.ulysses_degree

    for found, want in run_ranks(sampled, num_ranks, name, layout, sparse, num_patches, warmup_steps, extrapolation):
        within((found - want).abs().max(), EXACT)


def keys_begin_with_the_patch():
    plain = sparse_layout.layout_of
    pipefusion.layout_of = lambda shards, counts, first_token: plain(shards, counts, 64)


def patches_are_dense():
    plain = pipefusion.patch_attention
    import xdit_backend.hooks.attention_dispatch as module
    module.patch_attention = lambda q, k, v, attention, context, layer: plain(
        q, k, v, attention if context.patch is None else replace(attention, sparse=None), context, layer)


MUTANTS = {function.__name__: function for function in (keys_begin_with_the_patch, patches_are_dense)}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_oracle_notices_broken_sparse_patches(mutant):
    results = run_ranks(sampled, 2, "Wan", Layout(pipefusion_degree=2), SLA, 2, 1, 0.0, mutant)

    assert max((found - want).abs().max() for found, want in results) > 1e-6
