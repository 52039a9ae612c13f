"""Unified sequence parallelism: Ulysses inside, Ring outside (USP, arXiv 2405.07719). Called by the attention hook.

PipeFusion and displaced patches take the same Attention, and begin and end as it does: scatter_heads and all_keys.

# B batch, N heads, T tokens, H head size
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..attention.backends import BackendUse, attend, attend_with_lse
from ..attention.log_sum_exp import merge_attention
from ..distributed.collectives import RingExchange, all_gather, all_to_all
from ..distributed.fp8_communication import all_gather_small, all_to_all_small, num_bytes, pack, unpack
from ..partition import shard_sizes
from ..protocol.specs import ALL, KEYS, WHOLE


@dataclass(frozen=True)
class Window:
    """Each query attends to the keys whose places are near its own. Keys are those of a whole stream, in its order."""

    reach: tuple[float, float]             # tokens before and after its own
    first: int                             # place of the first query

    def mask(self, num_queries, num_keys, device):
        """(1, 1, queries, keys), which may be attended to."""
        queries, (before, after) = torch.arange(self.first, self.first + num_queries, device=device), self.reach
        places = torch.arange(num_keys, device=device) - queries[:, None]
        near = places.abs() <= after if before == after else (places >= -before) & (places <= after)
        return near[None, None]


@dataclass(frozen=True)
class Attention:
    """What an attention by several ranks is given beside its queries, keys and values."""

    sizes: list[int]                       # T of every sequence rank; they may differ
    key_sizes: list[int] | None = None     # of keys and values, where they are not the tokens of the queries
    # (B, 1, 1, T of all ranks), which keys may be attended to, rank after rank; None: all
    mask: torch.Tensor | None = None
    scale: float | None = None             # of queries times keys; None: torch's
    backend: BackendUse = field(default_factory=BackendUse)
    exchange: str = WHOLE                  # in which form tensors travel, of exchanges.EXCHANGES
    window: Window | None = None           # None: queries attend to all keys that the mask lets them
    # (q, k, v of all tokens, rank after rank, of some heads) -> like q, in the place of attention. None: plain
    within: Callable | None = None

    def whole(self, q_BNTH, k_BNTH, v_BNTH, mask):
        """Plain attention to keys that are all here."""
        if self.within is not None:
            return self.within(q_BNTH, k_BNTH, v_BNTH)
        mask = self.near(q_BNTH, k_BNTH.shape[2], mask)
        return attend(q_BNTH, k_BNTH, v_BNTH, self.backend, mask, scale=self.scale)

    def near(self, q_BNTH, num_keys, mask):
        """The mask of keys, of those of the window alone. q: as scatter_heads gives them."""
        if self.window is None:
            return mask
        near = self.window.mask(q_BNTH.shape[2], num_keys, q_BNTH.device)
        return near if mask is None else near & mask


def usp_attention(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic):
    """Attention of this rank's queries over the tokens of all sequence ranks. Every rank of the axes calls it.

    q, k, v: (B, N, T of this rank, H), positions already applied; k and v may have fewer heads, one for a group of q's.
    The order of keys is irrelevant, so text and image shards need no rearranging. Returns (B, N, T of this rank, H).
    """
    if not any(attention.sizes):
        return q_BNTH
    (q_BNTH, k_BNTH, v_BNTH), scattered = scatter_heads(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic)
    if mesh.degrees["ring"] > 1:
        out = ring_attention(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic)
    else:
        out = attention.whole(q_BNTH, k_BNTH, v_BNTH, attention.mask)
    return gather_heads(out, scattered, mesh, traffic)


def all_keys(k_BNTH, v_BNTH, attention, mesh, traffic):
    """Keys and values of all ring ranks, from what scatter_heads gives. attention: of the ring x Ulysses ranks."""
    sizes = attention.key_sizes or attention.sizes
    if mesh.degrees["ring"] == 1 or not any(sizes):
        return k_BNTH, v_BNTH
    if attention.exchange != WHOLE:
        return all_gather_small(torch.stack([k_BNTH, v_BNTH]), _ring_sizes(sizes, mesh), mesh.ring_group, traffic)
    return all_gather(torch.stack([k_BNTH, v_BNTH]), _ring_sizes(sizes, mesh), 3, mesh.ring_group, traffic)


def _ring_sizes(sizes, mesh):
    degree = mesh.degrees["ulysses"]
    return [sum(sizes[rank * degree:][:degree]) for rank in range(mesh.degrees["ring"])]


def ring_attention(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic):
    """Attention over keys and values that go round the ring; each transfer runs while the block at hand is computed.

    q, k, v: of scatter_heads. Some ranks may start with no keys. The mask is over those of all ranks, and known to
    every rank. Ring Attention, arXiv 2310.01889. Returns like q.
    """
    degree, rank = mesh.degrees["ring"], mesh.ranks["ring"]
    sizes = _ring_sizes(attention.key_sizes or attention.sizes, mesh)
    mask = attention.near(q_BNTH, sum(sizes), attention.mask)
    masks = [None] * degree if mask is None else mask.split(sizes, 3)
    key_value = travels = torch.stack([k_BNTH, v_BNTH])
    is_small = attention.exchange != WHOLE
    if is_small:
        travels = pack([key_value], [True])
    out = lse = exchange = None
    for step in range(degree):
        if step + 1 < degree:
            arriving = sizes[(rank - step - 1) % degree]
            shape = (*key_value.shape[:3], arriving, key_value.shape[4])
            exchange = RingExchange(travels, (num_bytes([shape], [True], q_BNTH.dtype),) if is_small else shape,
                                    mesh.ring_group, traffic)
        if q_BNTH.shape[2] and key_value.shape[3]:
            block_out, block_lse = attend_with_lse(q_BNTH, key_value[0], key_value[1], attention.backend,
                                                   masks[(rank - step) % degree], attention.scale)
            if out is None:
                out, lse = block_out.to(torch.promote_types(block_out.dtype, torch.float32)), block_lse
            else:
                out, lse = merge_attention(out, lse, block_out, block_lse)
        if step + 1 < degree:
            travels = exchange.wait()
            key_value = unpack(travels, [shape], [True], q_BNTH.dtype)[0] if is_small else travels
    return q_BNTH if out is None else out.to(q_BNTH.dtype)


def head_shards(num_heads, num_key_heads, mesh):
    """[(query heads, key heads)] of each Ulysses rank, and how often each key head has to be repeated for that.

    Heads are shared out by the ranks' speeds. Where there are fewer key heads than query heads, each goes with its
    query heads; where ranks would have to share one, or cannot have as many, it is repeated only as often as they need
    to have their own.
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
    """How queries were shared out among the ranks of a Ulysses group."""

    heads: tuple                   # of each rank
    sizes: list                    # tokens of each
    is_small: bool                 # do they travel in 8 bits?


def scatter_heads(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic):
    """Ulysses all-to-all (arXiv 2309.14509): from all heads of this rank's tokens to its heads of the group's tokens.

    attention: of the ring x Ulysses ranks. Keys and values of other sizes travel in an exchange of their own. Returns
    (q, k, v) and what gather_heads is to know, None where there is nothing to gather.
    """
    degree = mesh.degrees["ulysses"]
    if degree == 1:
        return (q_BNTH, k_BNTH, v_BNTH), None
    start = mesh.ranks["ring"] * degree
    sizes, key_sizes = (each and each[start:][:degree] for each in (attention.sizes, attention.key_sizes))
    shares, repeats = head_shards(q_BNTH.shape[1], k_BNTH.shape[1], mesh)
    if repeats > 1:
        k_BNTH, v_BNTH = k_BNTH.repeat_interleave(repeats, 1), v_BNTH.repeat_interleave(repeats, 1)
    of_queries, of_keys = zip(*shares)
    are_small = [attention.exchange == ALL, attention.exchange in (KEYS, ALL)]
    queries, others = [(q_BNTH, of_queries)], [(k_BNTH, of_keys), (v_BNTH, of_keys)]
    if key_sizes is None:
        tensors = _apart(queries + others, sizes, mesh, traffic, [are_small[0], are_small[1], are_small[1]])
    else:
        tensors = (_apart(queries, sizes, mesh, traffic, are_small[:1])
                   + _apart(others, key_sizes, mesh, traffic, are_small[1:] * 2))
    return tensors, ScatteredHeads(of_queries, sizes, are_small[0])


def _apart(tensors, sizes, mesh, traffic, are_small):
    """tensors: [((B, N, T of this rank, H), how many heads each rank of the group has)], which travel together.
    sizes: T of each of it. are_small: which tensors travel in 8 bits."""
    batch, _, num_tokens, head_size = tensors[0][0].shape
    counts, own = [sum(parts) for parts in zip(*(heads for _, heads in tensors))], mesh.ranks["ulysses"]
    if not any(sizes):
        return [tensor[:, :heads[own]] for tensor, heads in tensors]
    if any(are_small):
        pieces = zip(*(tensor.split(heads, 1) for tensor, heads in tensors))
        shapes = [[(batch, heads[own], size, head_size) for _, heads in tensors] for size in sizes]
        arrived = all_to_all_small(list(pieces), shapes, are_small, mesh.ulysses_group, traffic)
        return [torch.cat(parts, 2) for parts in zip(*arrived)]
    if mesh.ulysses_speeds:
        send = torch.cat([part for parts in zip(*(tensor.transpose(0, 1).split(heads) for tensor, heads in tensors))
                          for part in parts])
    else:
        send = tensors[0][0].new_empty(sum(counts), batch, num_tokens, head_size)
        places = send.unflatten(0, (len(counts), counts[0])).split([heads[0] for _, heads in tensors], 1)
        for place, (tensor, heads) in zip(places, tensors):
            # B D N T H -> D N B T H
            place.copy_(tensor.unflatten(1, (len(heads), heads[0])).permute(1, 2, 0, 3, 4))
    received = all_to_all(send.split(counts), [(counts[own], batch, size, head_size) for size in sizes],
                          mesh.ulysses_group, traffic, send)
    return [part.transpose(0, 1) for part in torch.cat(received, 2).split([heads[own] for _, heads in tensors])]


def gather_heads(out_BNTH, scattered, mesh, traffic):
    """From this rank's heads of the group's tokens to all heads of its own tokens. scattered: of scatter_heads."""
    if scattered is None:
        return out_BNTH
    batch, _, _, head_size = out_BNTH.shape
    sizes = scattered.sizes
    shapes = [(batch, count, sizes[mesh.ranks["ulysses"]], head_size) for count in scattered.heads]
    if scattered.is_small:
        arrived = all_to_all_small([[part] for part in out_BNTH.split(sizes, 2)], [[shape] for shape in shapes], [True],
                                   mesh.ulysses_group, traffic)
        return torch.cat([part for part, in arrived], 1)
    return torch.cat(all_to_all(out_BNTH.split(sizes, 2), shapes, mesh.ulysses_group, traffic), 1)
