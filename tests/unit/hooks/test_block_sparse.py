"""Block-sparse attention under every sequence method is that of one device, for families of every order of streams."""

from dataclasses import replace

import pytest
import torch

import xdit_backend.parallel.sequence_parallel as usp
from tests.support.model_zoo import example
from tests.support.pipefusion_oracle import StaleModel
from tests.support.ranks import run_ranks
from tests.support.tolerances import within
from tests.unit.hooks.test_hooks import serving
from xdit_backend.attention import block_sparse
from xdit_backend.attention.block_sparse import SparseAttention
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import build_mesh, with_speeds
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.parallel import sparse_layout
from xdit_backend.protocol.specs import ForwardOptions, Layout, SparseOptions

EXACT = 1e-12
SOL = SparseOptions("sol-attn", tau=0.5, min_tokens=0)
SLA = SparseOptions("sla", keep_percent=20.0, min_tokens=0)
OPTIONS = {"sol-attn": SOL, "sla": SLA, "dense blocks": SparseOptions("sol-attn", tau=0.5, min_tokens=0,
                                                                      dense_blocks=(0,)),
           "sparse conditioning": SparseOptions("sla", keep_percent=20.0, min_tokens=0, sink_conditioning="off"),
           "sparse rows": SparseOptions("sla", keep_percent=20.0, min_tokens=0, sink_conditioning="exact_kv")}
LAYOUTS = {"one": Layout(), "ulysses2": Layout(ulysses_degree=2), "ring2": Layout(ring_degree=2),
           "ring3": Layout(ring_degree=3), "ring2-ulysses2": Layout(ring_degree=2, ulysses_degree=2)}
SHAPES = {"Wan": {"rows": 18, "columns": 16, "frames": 5, "batch": 2},
          "HunyuanVideo": {"rows": 18, "columns": 16, "frames": 5, "num_text_tokens": 70},
          "LTX-2": {"rows": 11, "columns": 9, "frames": 5},
          "MiniMax H3": {"rows": 18, "columns": 16, "frames": 5, "num_text_tokens": 70, "audio": 40}}


def num_ranks(layout):
    return layout.ring_degree * layout.ulysses_degree


def difference(rank, world_size, name, layout, options, mutant=None, speeds=(), counted=False):
    """Largest difference between the parallel prediction and the oracle's; with `counted`, of the oracle's and a dense
    forward's, and the number of sparse attentions."""
    torch.set_grad_enabled(False)
    if mutant is not None:
        MUTANTS[mutant]()
    mesh = with_speeds(build_mesh(layout, world_size), speeds)
    one = example(name, **SHAPES[name])
    dense = one.run_parts() if counted else None
    oracle = StaleModel(one, sparse=options)
    want = [oracle.predict(one.latent, one.timestep), *oracle.others]
    one = example(name, **SHAPES[name])
    hooks = Hooks(one.model, one.family.plan)
    context = one.loaded(hooks).context(mesh, Traffic(), one.latent, one.timestep, one.conditioning,
                                        options=ForwardOptions(sparse=options))
    with serving(hooks, context):
        found = one.run_parts()
    error = max((part - wanted).abs().max().item() for part, wanted in zip(found, want, strict=True))
    if not counted:
        return error
    return (error, max((part - wanted).abs().max().item() for part, wanted in zip(dense, want)),
            context.backend.counts[f"sparse ({options.method})"])


@pytest.mark.parametrize("name, layout", [
    *(("Wan", layout) for layout in LAYOUTS), ("HunyuanVideo", "one"), ("HunyuanVideo", "ring2-ulysses2"),
    ("HunyuanVideo", "ring3"), ("LTX-2", "ulysses2"), ("LTX-2", "ring3"), ("MiniMax H3", "one"),
    ("MiniMax H3", "ring2-ulysses2"), ("MiniMax H3", "ring3")])
@pytest.mark.parametrize("options", ["sol-attn", "sla"])
def test_block_sparse_attention_equals_one_device(on_shared_ranks, name, layout, options):
    """Uneven shards, which blocks straddle; text before and after the image; two images."""
    results = on_shared_ranks(difference, lambda name, layout, options: num_ranks(LAYOUTS[layout]),
                              lambda name, layout, options: (name, LAYOUTS[layout], OPTIONS[options], None, (), True))

    within(max(error for error, _, _ in results), EXACT)
    assert min(from_dense for _, from_dense, _ in results) > 1e-6 and min(count for _, _, count in results) > 0


@pytest.mark.parametrize("options", ["dense blocks", "sparse conditioning", "sparse rows"])
def test_options_of_block_sparse_attention_equal_one_device(options):
    within(max(run_ranks(difference, 2, "HunyuanVideo", LAYOUTS["ring2"], OPTIONS[options])), EXACT)


def test_ranks_of_different_speeds_equal_one_device():
    within(max(run_ranks(difference, 4, "MiniMax H3", LAYOUTS["ring2-ulysses2"], SOL, None, (9, 1, 4, 2))), EXACT)


def test_short_sequences_are_dense():
    options = SparseOptions("sla", min_tokens=10 ** 6)

    assert run_ranks(difference, 2, "Wan", LAYOUTS["ring2"], options, None, (), True) == [(pytest.approx(0, abs=EXACT),
                                                                                          0, 0)] * 2


def in_float32(rank, world_size, layout):
    """(largest error of this rank's queries, bytes that it sends), of plain tensors with the prefix as a sink."""
    from tests.support.sparse_oracle import sparse_oracle
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 1000, 16, generator=generator) for _ in range(3))
    mesh, traffic, positions = build_mesh(layout, world_size), Traffic(), torch.arange(1000)
    own, size = mesh.sequence_rank, 1000 // world_size
    of_ring = 1000 // layout.ring_degree
    layouts = tuple(block_sparse.BlockLayout(((start, of_ring),)) for start in range(0, 1000, of_ring))
    sparse = SparseAttention("sol-attn", 1.0, 0.1, layouts, layouts, ((0, 2),), ((1, 2),))
    mine = slice(own * size, own * size + size)
    out = usp.usp_attention(q[:, :, mine], k[:, :, mine], v[:, :, mine],
                            usp.Attention([size] * world_size, sparse=sparse), mesh, traffic)
    want = sparse_oracle(q, k, v, positions, positions, SparseOptions("sol-attn", tau=1.0), range(128), range(64, 128))
    return (out - want[:, :, mine]).abs().max().item(), traffic.sent_bytes


def test_pooled_blocks_are_all_that_is_sent_in_addition():
    """Under Ring, queries, keys and values of nine blocks in float32; nothing under Ulysses."""
    for layout, more in ((LAYOUTS["ring2"], 3 * 4 * 16 * 9 * 4), (LAYOUTS["ulysses2"], 0)):
        results = run_ranks(in_float32, 2, layout)
        within(max(error for error, _ in results), 1e-5)
        dense = (2 if more else 4 / 2) * 4 * 500 * 16 * 4
        assert [num_bytes for _, num_bytes in results] == [dense + more] * 2


def one_block_fewer():
    select = SparseAttention.select

    def fewer(self, *arguments):
        logits, selected = select(self, *arguments)
        selected = selected.clone()
        selected[..., 2] = False
        return logits, selected
    SparseAttention.select = fewer


def a_hop_is_skipped():
    hops = usp._ring_hops
    usp._ring_hops = lambda *arguments: (hop for index, hop in enumerate(list(hops(*arguments))) if index != 1)


def the_prefix_is_sparse():
    make = sparse_layout._sparse
    sparse_layout._sparse = lambda *arguments: replace(make(*arguments), exact_keys=(), exact_rows=())


def own_blocks_are_selected_from():
    """Each rank selects by its own pooled keys alone."""
    union_sums = usp.union_sums
    usp.union_sums = lambda sums, layouts: union_sums([sums[0], *(each * 0 for each in sums[1:])], layouts)


def ranks_do_not_add_up_their_blocks():
    """The blocks that two ranks share have the sums of one of them."""
    usp.union_sums = lambda sums, layouts: _last_wins(sums, layouts)


def _last_wins(sums, layouts):
    found = block_sparse.union_sums([each.clone() for each in sums], layouts)
    for each, layout in zip(sums, layouts):
        first, count = layout.spans[0]
        found[..., first:first + count, :] = each[..., :count, :]
    return found


MUTANTS = {function.__name__: function for function in (
    one_block_fewer, a_hop_is_skipped, the_prefix_is_sparse, own_blocks_are_selected_from,
    ranks_do_not_add_up_their_blocks)}


@pytest.mark.parametrize("mutant, name", [
    ("one_block_fewer", "Wan"), ("a_hop_is_skipped", "Wan"), ("the_prefix_is_sparse", "HunyuanVideo"),
    ("own_blocks_are_selected_from", "Wan"), ("ranks_do_not_add_up_their_blocks", "Wan")])
def test_exactness_notices_broken_block_sparse_attention(mutant, name):
    assert max(run_ranks(difference, 2, name, LAYOUTS["ring2"], SLA, mutant)) > 1e-6
