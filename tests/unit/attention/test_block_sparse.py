"""Block-sparse attention is that of its oracle, and the oracle that of comfy-kitchen where it is installed."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.support.sparse_oracle import sparse_oracle
from tests.support.tolerances import within
from xdit_backend.attention import block_sparse
from xdit_backend.attention.block_sparse import BlockLayout, SparseAttention, block_sparse_attention, block_sums
from xdit_backend.protocol.specs import SparseOptions

SOL, SLA = SparseOptions("sol-attn", tau=0.8), SparseOptions("sla", keep_percent=25.0)
SINKS = {"none": ((), ()), "keys": (range(70), ()), "rows": (range(70), range(64, 70))}


def tensors(num_tokens, dtype=torch.float64, num_queries=None):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, count, 16, dtype=torch.float64, generator=generator)
               for count in (num_queries or num_tokens, num_tokens, num_tokens))
    return (2 * q).to(dtype), (2 * k + 1).to(dtype), v.to(dtype)


def blocks_of(positions):
    return tuple((block, block + 1) for block in sorted({position // 64 for position in positions}))


def attended(q, k, v, options, sinks=(), dense_rows=(), queries=None, keys=None):
    """The operator on one rank. queries, keys: runs of their tokens; None: all from 0 on."""
    queries, keys = (BlockLayout(tuple(runs or [(0, tensor.shape[2])])) for runs, tensor in ((queries, q), (keys, k)))
    sparse = SparseAttention(options.method, options.tau, options.keep_percent / 100, (queries,), (keys,),
                             blocks_of(sinks), blocks_of(dense_rows))
    sums = [block_sums(layout.blocks(tensor)) for layout, tensor in ((queries, q), (keys, k), (keys, v))]
    return block_sparse_attention(q, sums, [(keys, k, v)], sparse, 0)


@pytest.mark.parametrize("options", [SOL, SLA], ids=["sol-attn", "sla"])
@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("num_tokens", [30, 64, 640, 701])
def test_block_sparse_attention_equals_the_oracle(num_tokens, sinks, options):
    keys, rows = SINKS[sinks]
    positions = torch.arange(num_tokens)

    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        q, k, v = tensors(num_tokens, dtype)
        out = attended(q, k, v, options, keys, rows)
        within((out - sparse_oracle(q, k, v, positions, positions, options, keys, rows)).abs().max(), tolerance)
    if num_tokens > 192:
        assert (out - F.scaled_dot_product_attention(q, k, v)).abs().max() > 0.1


RUNS = {"a patch": ([(100, 150)], None), "two streams": ([(600, 101), (0, 600)], [(600, 101), (0, 600)]),
        "with a gap": ([(0, 40), (130, 70)], [(0, 300), (450, 251)])}


def positions_of(runs):
    return torch.tensor([position for start, size in runs for position in range(start, start + size)])


@pytest.mark.parametrize("options", [SOL, SLA], ids=["sol-attn", "sla"])
@pytest.mark.parametrize("queries, keys", RUNS.values(), ids=RUNS)
def test_tokens_in_runs_equal_the_oracle(queries, keys, options):
    """Queries of a part of the sequence; streams in another order; blocks that have a part of their tokens."""
    keys = keys or [(0, 701)]
    (q, _, _), (_, k, v) = tensors(sum(size for _, size in queries)), tensors(sum(size for _, size in keys))

    out = attended(q, k, v, options, queries=queries, keys=keys)

    order = positions_of(keys).argsort()
    want = sparse_oracle(q, k[:, :, order], v[:, :, order], positions_of(queries), positions_of(keys)[order], options)
    within((out - want).abs().max(), 1e-12)


@pytest.mark.parametrize("options", [SOL, SLA], ids=["sol-attn", "sla"])
@pytest.mark.parametrize("num_tokens", [640, 701])
def test_gathered_keys_equal_the_oracle(monkeypatch, num_tokens, options):
    """As devices without FlexAttention compute them."""
    (q, k, v), positions = tensors(num_tokens), torch.arange(num_tokens)
    want = sparse_oracle(q, k, v, positions, positions, options)
    monkeypatch.setattr(block_sparse, "_by_row", block_sparse._gathered)

    within((attended(q, k, v, options) - want).abs().max(), 1e-12)
    monkeypatch.setattr(block_sparse, "MAX_GATHERED", 1)
    within((attended(q, k, v, options) - want).abs().max(), 1e-12)


@pytest.mark.parametrize("options", [SOL, SLA], ids=["sol-attn", "sla"])
@pytest.mark.parametrize("num_tokens", [640, 701])
def test_flex_attention_equals_the_gathered_keys(monkeypatch, num_tokens, options):
    from torch.nn.attention import flex_attention
    monkeypatch.setattr(flex_attention, "_WARNINGS_SHOWN", {"flex_attention"}, raising=False)
    q, k, v = tensors(num_tokens)
    want = attended(q, k, v, options)
    calls = []

    def uncompiled(*tensors, kernel_options, **others):
        calls.append(kernel_options)
        return flex_attention.flex_attention(*tensors, **others)
    monkeypatch.setattr(block_sparse, "runs_flex", lambda blocks: True)
    monkeypatch.setattr(block_sparse, "_compiled_flex", lambda: uncompiled)

    within((attended(q, k, v, options) - want).abs().max(), 1e-10)
    assert calls == [{"BLOCK_M": 64, "BLOCK_N": 64}]


def test_the_oracle_equals_comfy_kitchen():
    kitchen = pytest.importorskip("comfy_kitchen.backends.eager.sol_attn", reason="needs comfy-kitchen 0.2.40")
    for num_tokens, options, (keys, rows) in itertools.product((640, 701), (SOL, SLA), SINKS.values()):
        q, k, v = tensors(num_tokens, torch.float32)
        want = kitchen.sol_attn(*(each.transpose(1, 2) for each in (q, k, v)), tau=options.tau,
                                topk_ratio=options.keep_percent / 100 if options.method == "sla" else 0,
                                sink_blocks=[0, 2] if keys else None, sink_q=[1, 2] if rows else None).transpose(1, 2)

        positions = torch.arange(num_tokens)
        out = sparse_oracle(*(each.double() for each in (q, k, v)), positions, positions, options, keys, rows)
        within((out - want).abs().max(), 2e-5)


def test_blocks_that_no_query_selects_are_not_computed():
    layout = BlockLayout(((640, 128),))
    q, k, v = tensors(128)
    selected = torch.zeros(2, 3, 2, 2, dtype=torch.bool)

    assert block_sparse.attend_selected(layout.blocks(q), k, v, layout, selected, 1.0) is None
    selected[1, 2, 1, 0] = True
    out, lse = block_sparse.attend_selected(layout.blocks(q), k, v, layout, selected, 1.0)
    assert (lse[1, 2, 1] > -1e29).all() and (lse > -1e29).sum() == 64
    within((out[1, 2, 1] - F.scaled_dot_product_attention(q[1, 2, 64:], k[1, 2, :64], v[1, 2, :64], scale=1.0))
           .abs().max(), 1e-12)


def one_block_fewer(monkeypatch):
    select = SparseAttention.select

    def fewer(self, *arguments):
        logits, selected = select(self, *arguments)
        selected = selected.clone()
        selected[:, :, 3, selected[0, 0, 3].nonzero()[0]] = False
        return logits, selected
    monkeypatch.setattr(SparseAttention, "select", fewer)


def no_pooled_blocks(monkeypatch):
    pooled = block_sparse._pooled
    monkeypatch.setattr(block_sparse, "_pooled", lambda *arguments: (
        pooled(*arguments)[0], torch.full_like(pooled(*arguments)[1], block_sparse.NO_KEYS)))


def sinks_are_sparse(monkeypatch):
    within_ = block_sparse._within
    monkeypatch.setattr(block_sparse, "_within", lambda blocks, ranges: within_(blocks, ()))


def keys_are_not_centred(monkeypatch):
    plain = block_sparse.merge_attention
    monkeypatch.setattr(block_sparse, "merge_attention", lambda out, lse, *others: plain(out, lse + 1, *others))


@pytest.mark.parametrize("mutant", [one_block_fewer, no_pooled_blocks, sinks_are_sparse, keys_are_not_centred])
@pytest.mark.parametrize("options", [SOL, SLA], ids=["sol-attn", "sla"])
def test_the_oracle_notices_a_broken_operator(monkeypatch, mutant, options):
    keys, rows = SINKS["rows"]
    positions, (q, k, v) = torch.arange(701), tensors(701)
    want = sparse_oracle(q, k, v, positions, positions, options, keys, rows)
    mutant(monkeypatch)

    assert (attended(q, k, v, options, keys, rows) - want).abs().max() > 1e-3
