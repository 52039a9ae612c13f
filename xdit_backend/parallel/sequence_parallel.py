"""Unified sequence parallelism: Ulysses within Ring (USP, arXiv 2405.07719).

# B batch, N heads, T tokens, H head size
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..attention.backends import BackendUse, attend, attend_with_lse
from ..attention.block_sparse import SparseAttention, block_sparse_attention, block_sums, union_of, union_sums
from ..attention.log_sum_exp import merge_attention
from ..distributed.collectives import RingExchange, all_gather, all_to_all
from ..distributed.fp8_communication import all_gather_fp8, all_to_all_fp8, num_bytes, pack, unpack
from ..partition import shard_sizes
from ..protocol.specs import ALL, KEYS, WHOLE


@dataclass(frozen=True)
class Window:
    """Sliding-window attention: each query attends to keys at nearby token indices of one stream, whose keys are all
    present and in order."""

    reach: tuple[float, float]             # tokens before and after the query's
    first: int                             # token index of the first query

    def mask(self, num_queries, num_keys, device):
        """(1, 1, queries, keys) bool, True for keys within reach."""
        queries, (before, after) = torch.arange(self.first, self.first + num_queries, device=device), self.reach
        distances = torch.arange(num_keys, device=device) - queries[:, None]
        near = distances.abs() <= after if before == after else (distances >= -before) & (distances <= after)
        return near[None, None]


@dataclass(frozen=True)
class Attention:
    """Arguments of an attention over several ranks, without queries, keys and values."""

    sizes: list[int]                       # T of every sequence rank; may differ
    key_sizes: list[int] | None = None     # of keys and values; None: the same as `sizes`
    # (B, 1, 1, T of all ranks) bool in rank order, True for keys to attend to; None: all
    mask: torch.Tensor | None = None
    scale: float | None = None             # of the logits; None: torch's default
    backend: BackendUse = field(default_factory=BackendUse)
    exchange: str = WHOLE                  # communication dtype, of specs.EXCHANGES
    window: Window | None = None           # None: queries attend to all keys that the mask allows
    # (q, k, v of all tokens in rank order, of some heads) -> like q; replaces plain attention
    within: Callable | None = None
    sparse: SparseAttention | None = None  # None: dense

    def local(self, q_BNTH, k_BNTH, v_BNTH, mask, mesh, traffic):
        """Attention on this rank to keys that are all present. Every rank of the ring axis calls it."""
        if self.within is not None:
            return self.within(q_BNTH, k_BNTH, v_BNTH)
        if self.sparse is not None:
            return sparse_attention(q_BNTH, k_BNTH, v_BNTH, self, mesh, traffic)
        mask = self.near(q_BNTH, k_BNTH.shape[2], mask)
        return attend(q_BNTH, k_BNTH, v_BNTH, self.backend, mask, scale=self.scale)

    def near(self, q_BNTH, num_keys, mask):
        """Combine a mask of keys with the window's. q: from scatter_heads."""
        if self.window is None:
            return mask
        near = self.window.mask(q_BNTH.shape[2], num_keys, q_BNTH.device)
        return near if mask is None else near & mask


def usp_attention(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic):
    """Attention of this rank's queries over the tokens of all sequence ranks. Every rank of the ring and ulysses axes
    calls it.

    q, k, v: (B, N, T of this rank, H), with rotary embeddings applied; k and v may have fewer heads (grouped-query
    attention). Keys need no reordering of text and image shards. Returns (B, N, T of this rank, H).
    """
    if not any(attention.sizes):
        return q_BNTH
    (q_BNTH, k_BNTH, v_BNTH), scattered = scatter_heads(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic)
    if mesh.degrees["ring"] > 1:
        attend_in_ring = ring_attention if attention.sparse is None else sparse_attention
        out = attend_in_ring(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic)
    else:
        out = attention.local(q_BNTH, k_BNTH, v_BNTH, attention.mask, mesh, traffic)
    return gather_heads(out, scattered, mesh, traffic)


def all_keys(k_BNTH, v_BNTH, attention, mesh, traffic):
    """Keys and values of all ring ranks, from scatter_heads' results. Every rank of the ring axis calls it.
    attention: of the ring x ulysses ranks."""
    sizes = attention.key_sizes or attention.sizes
    if mesh.degrees["ring"] == 1 or not any(sizes):
        return k_BNTH, v_BNTH
    if attention.exchange != WHOLE:
        return all_gather_fp8(torch.stack([k_BNTH, v_BNTH]), _ring_sizes(sizes, mesh), mesh.ring_group, traffic)
    return all_gather(torch.stack([k_BNTH, v_BNTH]), _ring_sizes(sizes, mesh), 3, mesh.ring_group, traffic)


def _ring_sizes(sizes, mesh):
    degree = mesh.degrees["ulysses"]
    return [sum(sizes[rank * degree:][:degree]) for rank in range(mesh.degrees["ring"])]


def ring_attention(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic):
    """Ring Attention (arXiv 2310.01889): keys and values travel around the ring; each hop overlaps with the computation
    on the current block. Every rank of the ring axis calls it.

    q, k, v: from scatter_heads. Some ranks may start with no keys. The mask covers all ranks' keys, on every rank.
    Returns like q.
    """
    sizes = _ring_sizes(attention.key_sizes or attention.sizes, mesh)
    mask = attention.near(q_BNTH, sum(sizes), attention.mask)
    masks = [None] * len(sizes) if mask is None else mask.split(sizes, 3)
    out = lse = None
    for source, key_value in _ring_hops(k_BNTH, v_BNTH, sizes, attention, mesh, traffic):
        if q_BNTH.shape[2] and key_value.shape[3]:
            block_out, block_lse = attend_with_lse(q_BNTH, key_value[0], key_value[1], attention.backend,
                                                   masks[source], attention.scale)
            if out is None:
                out, lse = block_out.to(torch.promote_types(block_out.dtype, torch.float32)), block_lse
            else:
                out, lse = merge_attention(out, lse, block_out, block_lse)
    return q_BNTH if out is None else out.to(q_BNTH.dtype)


def _ring_hops(k_BNTH, v_BNTH, sizes, attention, mesh, traffic):
    """Yield (ring rank, its keys and values, (2, B, N, T, H)) of every ring rank, beginning with this one. The next
    ones arrive while the caller computes."""
    degree, rank = mesh.degrees["ring"], mesh.ranks["ring"]
    key_value = in_transit = torch.stack([k_BNTH, v_BNTH])
    is_fp8, dtype = attention.exchange != WHOLE, key_value.dtype
    if is_fp8:
        in_transit = pack([key_value], [True])
    for step in range(degree):
        if step + 1 < degree:
            arriving = sizes[(rank - step - 1) % degree]
            shape = (*key_value.shape[:3], arriving, key_value.shape[4])
            exchange = RingExchange(in_transit, (num_bytes([shape], [True], dtype),) if is_fp8 else shape,
                                    mesh.ring_group, traffic)
        yield (rank - step) % degree, key_value
        if step + 1 < degree:
            in_transit = exchange.wait()
            key_value = unpack(in_transit, [shape], [True], dtype)[0] if is_fp8 else in_transit


def sparse_attention(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic):
    """Block-sparse attention. Every rank of the ring axis calls it.

    The blocks are selected by the pooled queries and keys of all ring ranks, which are all-gathered. Keys and values
    then travel around the ring, unless all of them are here; each hop computes the selected blocks that it has.
    q, k, v: from scatter_heads. Returns like q.
    """
    sparse, rank, queries = attention.sparse, mesh.ranks["ring"], attention.sparse.queries
    is_ring = len(sparse.keys) > 1
    keys = sparse.keys[rank if is_ring else 0]
    of_queries = block_sums(queries[rank].blocks(q_BNTH))
    of_keys = [block_sums(keys.blocks(each)) for each in (k_BNTH, v_BNTH)]
    if len(queries) > 1:
        counts = [layout.num_blocks for layout in queries]
        pooled = torch.stack([of_queries, *(of_keys if is_ring else ())])
        of_ranks = all_gather(pooled, counts, 3, mesh.ring_group, traffic).split(counts, 3)
        of_queries, *gathered = union_sums(of_ranks, queries)
        of_queries, of_keys = queries[rank].take(of_queries, union_of(queries), 2), gathered or of_keys

    def hops():
        sizes = _ring_sizes(attention.sizes, mesh)
        for source, (k, v) in (_ring_hops(k_BNTH, v_BNTH, sizes, attention, mesh, traffic) if is_ring
                               else [(0, (k_BNTH, v_BNTH))]):
            yield sparse.keys[source], k, v

    return block_sparse_attention(q_BNTH, (of_queries, *of_keys), hops(), sparse, rank, attention.scale)


def head_shards(num_heads, num_key_heads, mesh):
    """Heads of each Ulysses rank: ([(query heads, key heads)] by rank, number of repeats of each key head).

    Heads are split in proportion to the ranks' speeds. With grouped queries a key head goes with its query heads. If
    ranks would have to share a key head, or heads cannot be split as required, key heads are repeated as often as
    necessary and no more.
    """
    degree, speeds = mesh.degrees["ulysses"], mesh.ulysses_speeds
    if not speeds:
        repeats = math.lcm(degree, num_key_heads) // num_key_heads
        return [(num_heads // degree, num_key_heads * repeats // degree)] * degree, repeats
    repeats = 1 if num_key_heads >= degree else num_heads // num_key_heads
    groups = shard_sizes(num_key_heads * repeats, degree, speeds, least=1)
    return [(count * num_heads // num_key_heads // repeats, count) for count in groups], repeats


@dataclass(frozen=True)
class ScatteredHeads:
    """The distribution of query heads over a Ulysses group by scatter_heads."""

    heads: tuple                   # number of heads of each rank
    sizes: list                    # number of tokens of each rank
    is_fp8: bool                 # whether they are sent in fp8


def scatter_heads(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic):
    """Ulysses all-to-all (arXiv 2309.14509): from all heads of this rank's tokens to this rank's heads of the group's
    tokens. Every rank of the ulysses axis calls it.

    attention: of the ring x ulysses ranks. Keys and values with other sizes take a second all-to-all. Returns (q, k, v)
    and the argument of gather_heads, which is None if the degree is 1.
    """
    degree = mesh.degrees["ulysses"]
    if degree == 1:
        return (q_BNTH, k_BNTH, v_BNTH), None
    start = mesh.ranks["ring"] * degree
    sizes, key_sizes = (each and each[start:][:degree] for each in (attention.sizes, attention.key_sizes))
    heads_of_ranks, repeats = head_shards(q_BNTH.shape[1], k_BNTH.shape[1], mesh)
    if repeats > 1:
        k_BNTH, v_BNTH = k_BNTH.repeat_interleave(repeats, 1), v_BNTH.repeat_interleave(repeats, 1)
    of_queries, of_keys = zip(*heads_of_ranks)
    are_fp8 = [attention.exchange == ALL, attention.exchange in (KEYS, ALL)]
    queries, others = [(q_BNTH, of_queries)], [(k_BNTH, of_keys), (v_BNTH, of_keys)]
    if key_sizes is None:
        tensors = _all_to_all_heads(queries + others, sizes, mesh, traffic,
                                    [are_fp8[0], are_fp8[1], are_fp8[1]])
    else:
        tensors = (_all_to_all_heads(queries, sizes, mesh, traffic, are_fp8[:1])
                   + _all_to_all_heads(others, key_sizes, mesh, traffic, are_fp8[1:] * 2))
    return tensors, ScatteredHeads(of_queries, sizes, are_fp8[0])


def _all_to_all_heads(tensors, sizes, mesh, traffic, are_fp8):
    """All-to-all of several tensors at once. tensors: [((B, N, T of this rank, H), number of heads of each rank of the
    group)]. sizes: T of each rank. are_fp8: whether each tensor is sent in fp8."""
    batch, _, num_tokens, head_size = tensors[0][0].shape
    counts, own = [sum(chunks) for chunks in zip(*(heads for _, heads in tensors))], mesh.ranks["ulysses"]
    if not any(sizes):
        return [tensor[:, :heads[own]] for tensor, heads in tensors]
    if any(are_fp8):
        by_rank = zip(*(tensor.split(heads, 1) for tensor, heads in tensors))
        shapes = [[(batch, heads[own], size, head_size) for _, heads in tensors] for size in sizes]
        arrived = all_to_all_fp8(list(by_rank), shapes, are_fp8, mesh.ulysses_group, traffic)
        return [torch.cat(chunks, 2) for chunks in zip(*arrived)]
    if mesh.ulysses_speeds:
        send = torch.cat([chunk for chunks in zip(*(tensor.transpose(0, 1).split(heads) for tensor, heads in tensors))
                          for chunk in chunks])
    else:
        send = tensors[0][0].new_empty(sum(counts), batch, num_tokens, head_size)
        views = send.unflatten(0, (len(counts), counts[0])).split([heads[0] for _, heads in tensors], 1)
        for view, (tensor, heads) in zip(views, tensors):
            # (B, D * N, T, H) -> (D, N, B, T, H), D ranks
            view.copy_(tensor.unflatten(1, (len(heads), heads[0])).permute(1, 2, 0, 3, 4))
    received = all_to_all(send.split(counts), [(counts[own], batch, size, head_size) for size in sizes],
                          mesh.ulysses_group, traffic, send)
    return [chunk.transpose(0, 1) for chunk in torch.cat(received, 2).split([heads[own] for _, heads in tensors])]


def gather_heads(out_BNTH, scattered, mesh, traffic):
    """Inverse of scatter_heads: from this rank's heads of the group's tokens to all heads of its own tokens. Every rank
    of the ulysses axis calls it. scattered: from scatter_heads."""
    if scattered is None:
        return out_BNTH
    batch, _, _, head_size = out_BNTH.shape
    sizes = scattered.sizes
    shapes = [(batch, count, sizes[mesh.ranks["ulysses"]], head_size) for count in scattered.heads]
    if scattered.is_fp8:
        arrived = all_to_all_fp8([[chunk] for chunk in out_BNTH.split(sizes, 2)], [[shape] for shape in shapes],
                                   [True], mesh.ulysses_group, traffic)
        return torch.cat([chunk for chunk, in arrived], 1)
    return torch.cat(all_to_all(out_BNTH.split(sizes, 2), shapes, mesh.ulysses_group, traffic), 1)
