"""Displaced patch parallelism (DistriFusion, arXiv 2402.19481): each rank has its part of the image, and the others' from the last call.

row_hooks.py puts it into U-Nets, hooks.py into transformers. docs/algorithms.md section 9.

# B batch, G groups of a norm, N heads, T tokens, H head size
"""

from dataclasses import dataclass, field

import torch

from .collectives import all_gather
from .exchange import Exchange
from .rows import RowSplit, overlap
from .usp import heads_apart, heads_together, repeat_heads


@dataclass(frozen=True)
class Mode:
    """One of the paper's ways to synchronise, after the warm-up.

    norms: moments of a group norm are "corrected" stale ones, "stale" ones with the own fresh, exchanged at "once", or the rank's "own".
    """

    norms: str = "corrected"
    is_stale: bool = True
    keeps: bool = True                     # are later calls told what this one has?


MODES = {"corrected_async_gn": Mode(), "stale_gn": Mode("stale"), "sync_gn": Mode("once"), "separate_gn": Mode("own"),
         "no_sync": Mode("own", keeps=False), "full_sync": Mode(is_stale=False)}


@dataclass(frozen=True)
class StaleSplit(RowSplit):
    """The rows of one layer's image on each rank, where the others' come from an exchange."""

    exchange: Exchange = field(kw_only=True)
    key: str = field(kw_only=True)         # the layer's

    def gather(self, tensor, sizes, dim):
        shapes = [_with_size(tensor.shape, dim, size) for size in sizes]
        parts = self.exchange.share(self.key, tensor, shapes)
        parts[self.rank] = tensor
        return torch.cat(parts, dim)

    def borrow(self, x, wanted):
        """As rows.start_borrowing. A rank tells all others the rows that any of them wants of it."""
        held, own = list(zip(self.starts, self.starts[1:])), self.rank
        lent = [sorted({row for other, want in enumerate(wanted) if other != rank for row in range(*overlap(*want, *held[rank]))})
                for rank in range(len(held))]
        told = _rows_of(x, [row - self.start for row in lent[own]], self.dim)
        known = self.exchange.share(self.key, told, [_with_size(x.shape, self.dim, len(rows)) for rows in lent])

        def piece(rank):
            first, end = (0, 0) if rank == own else overlap(*wanted[own], *held[rank])
            return known[rank].narrow(self.dim, lent[rank].index(first) if end > first else 0, end - first)
        return lambda: [piece(rank) for rank in range(len(held))]

    def shares(self, like):
        """As RowSplit's, kept for the run: a split is made anew for each layer and call, and CUDA waits for such a copy."""
        key = self.starts, like.dtype, like.device
        if key not in self.exchange.shares:
            self.exchange.shares[key] = super().shares(like)
        return self.exchange.shares[key]

    def moments(self, mean_BG, variance_BG):
        exchange, fresh = self.exchange, torch.stack([mean_BG, variance_BG])
        if exchange.norms == "own" and exchange.is_stale:
            return mean_BG, variance_BG
        if exchange.norms in ("corrected", "stale"):
            known = exchange.share(self.key, fresh, [fresh.shape] * exchange.num_ranks)
        else:
            known = exchange.gather(fresh)
        corrects = exchange.norms == "corrected"
        return estimated_moments(fresh, torch.stack(list(known)), self.rank, self.shares(fresh), corrects)


def estimated_moments(fresh, known, rank, shares, corrects=True):
    """Mean and biased variance of the whole image, each (B, G), from this rank's of now and every rank's of before.

    fresh: (2, B, G), mean and variance of this rank's rows. known: (ranks, 2, B, G). shares: part of the rows of each rank.
    The paper (section 4.3) adds this rank's change of E[x] and of E[x^2] to the stale ones of the image. Here without taking
    one large number from another: with stale E, V of the image and m, v of this rank's rows,
    V + v' - v + 2 (m' - m) (m - E). Where that is negative, the rank's own v' stands. corrects: False adds nothing, and takes this
    rank's part of the image's moments as of now.
    """
    if not corrects:
        known = known.clone()
        known[rank] = fresh
    means, variances = known.unbind(1)
    weights = shares[:, None, None]
    mean = (weights * means).sum(0)
    variance = (weights * (variances + (means - mean) ** 2)).sum(0)
    if not corrects:
        return mean, variance
    change = fresh[0] - means[rank]
    corrected = variance + (fresh[1] - variances[rank]) + 2 * change * (means[rank] - mean)
    return mean + change, torch.where(corrected < 0, fresh[1], corrected)


def displaced_attention(q_BNTH, k_BNTH, v_BNTH, sizes, context, key, attention, mask=None):
    """Attention of this rank's queries to keys and values of all ranks: of now within its own part, else as the exchange has them.

    Ulysses and Ring share out a rank's part of the tokens further; its keys and values are replicated along the ring axis, which
    then tells all of them. sizes: T of every sequence rank. key: (block, name and number of the attention).
    attention(q, k, v, attn_mask): plain attention. mask: (B, 1, 1, T of all ranks). Returns like q.
    """
    mesh, traffic, exchange = context.mesh, context.traffic, context.exchange
    each, degree = len(sizes) // exchange.num_ranks, mesh.degrees["ulysses"]
    parts = [sizes[rank * each:][:each] for rank in range(exchange.num_ranks)]
    own = parts[exchange.rank]
    region = own[mesh.ranks["ring"] * degree:][:degree]
    if degree > 1:
        (q_BNTH, k_BNTH, v_BNTH), heads = heads_apart(q_BNTH, k_BNTH, v_BNTH, region, mesh, traffic)
    fresh = torch.stack([k_BNTH, v_BNTH])
    if mesh.degrees["ring"] > 1:
        regions = [sum(own[rank * degree:][:degree]) for rank in range(mesh.degrees["ring"])]
        fresh = all_gather(fresh, regions, 3, mesh.ring_group, traffic)
    known = exchange.share(key, fresh, [_with_size(fresh.shape, 3, sum(part)) for part in parts])
    known[exchange.rank] = fresh
    out = attention(q_BNTH, *repeat_heads(q_BNTH, *torch.cat(known, 3)), attn_mask=mask)
    return heads_together(out, heads, region, mesh, traffic) if degree > 1 else out


def _rows_of(x, rows, dim):
    """A copy of some rows, which are in order. Where they are is said in numbers, not in a tensor, which CUDA would wait for."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1][1] = row + 1
        else:
            runs.append([row, row + 1])
    return torch.cat([x.narrow(dim, first, end - first) for first, end in runs or [[0, 0]]], dim)


def _with_size(shape, dim, size):
    shape = list(shape)
    shape[dim] = size
    return shape
