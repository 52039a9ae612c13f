"""Ulysses, Ring and their product are attention: exact in float64, also for uneven shards and very large logits."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.fake_cuda import CUDA, fake_cuda_device
from tests.support.ranks import run_ranks
from tests.support.tolerances import within
from xdit_backend.attention.backends import attention_with_lse
from xdit_backend.attention.log_sum_exp import merge_attention
from xdit_backend.distributed.collectives import RingExchange, Traffic, all_gather, all_to_all
from xdit_backend.distributed.mesh import build_mesh, with_speeds
from xdit_backend.parallel.sequence_parallel import Attention, usp_attention
from xdit_backend.partition import shard_sizes, shard_start
from xdit_backend.protocol.specs import Layout

HEADS, HEAD_SIZE = 12, 8


def tensors(num_tokens, scale=1.0, key_heads=HEADS):
    generator = torch.Generator().manual_seed(0)

    def make(heads):
        return torch.randn(2, heads, num_tokens, HEAD_SIZE, dtype=torch.float64, generator=generator)

    return make(HEADS) * scale, make(key_heads) * scale, make(key_heads)


def difference(rank, world_size, layout, num_tokens, scale, key_heads, speeds=()):
    q, k, v = tensors(num_tokens, scale, key_heads)
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=key_heads != HEADS)
    mesh = with_speeds(build_mesh(layout, world_size), speeds)
    sizes = shard_sizes(num_tokens, world_size, mesh.sequence_speeds, least=1)
    mine = slice(shard_start(num_tokens, world_size, mesh.sequence_rank, mesh.sequence_speeds, least=1), None)
    mine = slice(mine.start, mine.start + sizes[mesh.sequence_rank])
    out = usp_attention(q[:, :, mine], k[:, :, mine], v[:, :, mine], Attention(sizes), mesh, Traffic())
    return (out - want[:, :, mine]).abs().max().item()


@pytest.mark.parametrize("ring, ulysses", [(1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("num_tokens", [24, 29])
def test_usp_equals_attention(ring, ulysses, num_tokens):
    layout = Layout(ring_degree=ring, ulysses_degree=ulysses)

    within(max(run_ranks(difference, ring * ulysses, layout, num_tokens, 1.0, HEADS)), 1e-12)


@pytest.mark.parametrize("ring, ulysses, key_heads, speeds", [
    (1, 2, HEADS, (3, 1)), (1, 3, HEADS, (1, 100, 7)), (2, 2, HEADS, (9, 1, 4, 2)), (2, 1, 3, (1, 5)),
    (1, 2, 3, (5, 1)),
    (1, 4, 3, (1, 2, 3, 4)), (1, 2, 6, (5, 1))])
def test_usp_of_unlike_ranks_equals_attention(ring, ulysses, key_heads, speeds):
    """Tokens and heads by speed; fewer key heads than query heads, than ranks too."""
    layout = Layout(ring_degree=ring, ulysses_degree=ulysses)

    within(max(run_ranks(difference, ring * ulysses, layout, 29, 1.0, key_heads, speeds)), 1e-12)


def test_ring_equals_attention_for_very_large_logits():
    within(max(run_ranks(difference, 3, Layout(ring_degree=3), 25, 8.0, HEADS)), 1e-12)


def test_usp_repeats_grouped_keys():
    within(max(run_ranks(difference, 4, Layout(ring_degree=2, ulysses_degree=2), 24, 1.0, 3)), 1e-12)


def test_merge_equals_attention_over_the_union():
    q, k, v = tensors(20)
    first, second = attention_with_lse(q, k[:, :, :7], v[:, :, :7]), attention_with_lse(q, k[:, :, 7:], v[:, :, 7:])

    out, lse = merge_attention(*first, *second)

    whole, whole_lse = attention_with_lse(q, k, v)
    within((out - whole).abs().max(), 1e-12)
    within((lse - whole_lse).abs().max(), 1e-12)


def rounding(rank, world_size, dtype):
    """(Ring's, attention's) distance from attention in float64, of tensors that are rounded alike."""
    q, k, v = (tensor.to(dtype) for tensor in tensors(256))
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    mesh, own = build_mesh(Layout(ring_degree=world_size), world_size), 256 // world_size
    mine = slice(rank * own, (rank + 1) * own)
    out = usp_attention(q[:, :, mine], k[:, :, mine], v[:, :, mine], Attention([own] * world_size), mesh, Traffic())
    whole = F.scaled_dot_product_attention(q, k, v)[:, :, mine]
    return [(each.double() - want[:, :, mine]).norm().item() for each in (out, whole)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ring_in_half_precision_is_as_exact_as_attention(dtype):
    """Blocks are added up in float32, however many there are."""
    for ring, whole in run_ranks(rounding, 4, dtype):
        within(ring / whole, 1.25)


def test_a_merge_moves_18_bytes_a_number(monkeypatch):
    """Of a block in bfloat16: it is read and made float32 (6), and then there are it,
    what was there before and what comes of them."""
    with fake_cuda_device(monkeypatch) as work_of:
        out, lse, block_out, block_lse = (torch.empty(1, 24, 256, size, dtype=dtype, device=CUDA) for size, dtype in (
            (128, torch.float32), (1, torch.float32), (128, torch.bfloat16), (1, torch.float32)))
        work = work_of(merge_attention, out, lse, block_out, block_lse)

    assert work.kernels == 5 and 18 <= work.moved_bytes / out.numel() < 18.5 and work.waits == []


def collectives(rank, world_size):
    """On groups that do not hold rank 0 as well."""
    mesh = build_mesh(Layout(ring_degree=2, ulysses_degree=2), world_size)
    traffic = Traffic()
    mine = torch.full((rank + 1, 2), float(rank))
    peers = [0, 2] if rank in (0, 2) else [1, 3]
    gathered = all_gather(mine, [peer + 1 for peer in peers], 0, mesh.ring_group, traffic)
    gathered_bytes = traffic.sent_bytes
    exchanged = all_to_all([torch.full((rank + 1,), 10.0 * rank + peer) for peer in peers],
                           [(peer + 1,) for peer in peers], mesh.ring_group, traffic)
    arrived = RingExchange(torch.full((rank + 1,), float(rank)), (peers[0] + peers[1] - rank + 1,), mesh.ring_group,
                           traffic).wait()
    return gathered.tolist(), gathered_bytes, [part.tolist() for part in exchanged], arrived.tolist()


def test_collectives_in_groups_with_uneven_sizes():
    results = run_ranks(collectives, 4)

    for rank, (gathered, gathered_bytes, exchanged, arrived) in enumerate(results):
        peers = [0, 2] if rank in (0, 2) else [1, 3]
        assert gathered == [[float(peer)] * 2 for peer in peers for _ in range(peer + 1)]
        assert gathered_bytes == (max(peers) + 1) * 2 * 4
        assert exchanged == [[10.0 * peer + rank] * (peer + 1) for peer in peers]
        other = peers[1] if rank == peers[0] else peers[0]
        assert arrived == [float(other)] * (other + 1)


def sent_bytes(rank, world_size, layout, num_tokens):
    q, k, v = tensors(num_tokens)
    mesh, traffic = build_mesh(layout, world_size), Traffic()
    size = num_tokens // world_size
    mine = slice(mesh.sequence_rank * size, (mesh.sequence_rank + 1) * size)
    usp_attention(q[:, :, mine], k[:, :, mine], v[:, :, mine], Attention([size] * world_size), mesh, traffic)
    return traffic.sent_bytes


@pytest.mark.parametrize("ring, ulysses", [(2, 1), (1, 2), (2, 2), (1, 4)])
def test_traffic_is_the_formula(ring, ulysses):
    """docs/design/layouts.md: Ulysses 4 B (S/D) h (U-1)/U, Ring 2 B (S/R) (h/U) (R-1) elements a rank."""
    tokens, h, batch = 24, HEADS * HEAD_SIZE, 2
    expected = 4 * batch * tokens / (ring * ulysses) * h * (ulysses - 1) / ulysses \
        + 2 * batch * tokens / ring * h / ulysses * (ring - 1)

    assert set(run_ranks(sent_bytes, ring * ulysses, Layout(ring_degree=ring, ulysses_degree=ulysses),
                         tokens)) == {expected * 8}
