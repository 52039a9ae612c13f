"""Displaced patch parallelism (DistriFusion, arXiv 2402.19481): each rank computes its part of the image, and uses the
others' parts as they were in the last call.

hooks/unet.py puts it into U-Nets, hooks/transformer.py into transformers. docs/design/displaced.md.

# B batch, G groups of a norm, N heads, T tokens, H head size
"""

from dataclasses import dataclass, field, replace

import torch

from ..distributed.spatial_ops import RowSplit, input_rows, output_starts, overlap
from ..protocol.errors import UnsupportedError
from .displaced_exchange import Exchange
from .sequence_parallel import all_keys, gather_heads, scatter_heads


@dataclass(frozen=True)
class StaleSplit(RowSplit):
    """The rows of one layer's image on each rank, where the others' come from an exchange. Kept for the
    run."""

    exchange: Exchange = field(kw_only=True)
    key: str = field(kw_only=True)         # the layer's
    _read: list = field(default_factory=list, compare=False, repr=False)       # what `around` has found for this layer

    @property
    def rank(self):
        return self.exchange.rank

    def around(self, x, backend, stride, padding):
        """The rows that this rank's part of a convolution reads, with zeros for its Padding beyond the image, in one
        copy.

        x: (B, C, H, W), this rank's rows. A rank sends all others the rows that any of them reads.
        """
        if not self._read:
            self._read.append(self._reading(x, backend, stride, padding))
        runs, shapes, pieces = self._read[0]
        sent = torch.cat([x[:, :, first:end] for first, end in runs], 2)
        known = self.exchange.share(self.key, sent, shapes)
        known[self.rank] = x
        return torch.cat([zeros if rank is None else known[rank][:, :, first:end]
                          for rank, first, end, zeros in pieces], 2)

    def _reading(self, x, backend, stride, padding):
        """(runs of this rank's rows that others read, shapes of what each rank sends, pieces of what this rank reads).

        A piece: (rank, first and end of the rows of what it sends; of x for this rank, None), or (None, 0, 0, rows of
        zeros).
        """
        held, own = list(zip(self.starts, self.starts[1:])), self.rank
        firsts = output_starts(self.starts, backend, stride, padding)
        reads = [input_rows(first, end, self.num_rows, backend, stride, padding)
                 for first, end in zip(firsts, firsts[1:])]
        sent = [sorted({row for other, (_, low, high, _) in enumerate(reads) if other != rank
                        for row in range(*overlap(low, high, *rows))})
                for rank, rows in enumerate(held)]
        above, low, high, below = reads[own]
        pieces = []
        for rank, rows in enumerate(held):
            first, end = overlap(low, high, *rows)
            if first < end:
                start = held[rank][0] if rank == own else first - sent[rank].index(first)
                pieces.append((rank, first - start, end - start, None))
        zeros = [x.new_zeros(_with_size(x.shape, 2, count)) for count in (above, below)]
        pieces = [(None, 0, 0, zeros[0])] * bool(above) + pieces + [(None, 0, 0, zeros[1])] * bool(below)
        return _runs([row - self.start for row in sent[own]]), [
            _with_size(x.shape, 2, len(rows)) for rows in sent], pieces

    def shares(self, like):
        """As RowSplit's, of all layers of a level: CUDA waits for such a copy."""
        key = self.starts, like.dtype, like.device
        if key not in self.exchange.shares:
            self.exchange.shares[key] = super().shares(like)
        return self.exchange.shares[key]

    def moments(self, mean_BG, variance_BG):
        exchange = self.exchange
        if exchange.norms == "own" and exchange.is_stale:
            return mean_BG, variance_BG
        fresh = torch.stack([mean_BG, variance_BG])
        if exchange.norms in ("corrected", "stale"):
            known = exchange.share(self.key, fresh, [fresh.shape] * exchange.num_ranks)
            if exchange.norms == "corrected" and exchange.is_stale:
                return corrected_moments(fresh, *self._correction(fresh))
            known[self.rank] = fresh
        else:
            known = exchange.gather(fresh)
        return image_moments(torch.stack(list(known)), self.shares(fresh)).unbind()

    def change(self, fresh):
        """What corrected_moments is given beside `fresh` for the moments of the image, as one tensor, (4, B, G). Of a
        graph, which computes with it; the exchange sends a copy of `fresh`."""
        exchange = self.exchange
        if exchange.norms == "corrected" and exchange.is_stale:
            exchange.share(self.key, fresh.clone(), [fresh.shape] * exchange.num_ranks)
            difference, mean_before, offset = self._correction(fresh)
        else:
            difference = torch.stack(self.moments(*fresh.unbind())) - fresh
            mean_before, offset = fresh[0], torch.zeros_like(fresh[0])
        return torch.cat([difference, mean_before[None], offset[None]])

    def _correction(self, like):
        """See correction_of; found at once for all norms that arrive together: many small steps would cost more."""
        exchange = self.exchange
        if self.key not in exchange.derived:
            layers = exchange.same_shaped(self.key)
            known = torch.stack([part for parts in layers.values() for part in parts])
            known = known.view(len(layers), -1, *like.shape)
            shares = torch.stack([exchange.layers[key].shares(like) for key in layers])
            found = correction_of(image_moments(known.movedim(1, 0), shares.T).movedim(1, 0), known[:, self.rank])
            exchange.derived.update(zip(layers, zip(*found)))
        return exchange.derived[self.key]


def image_moments(known, shares):
    """Mean and biased variance of the whole image, (2, B, G) or, of several norms, (2, L, B, G).

    known: (ranks, 2, B, G) or (ranks, L, 2, B, G), of each rank's rows. shares: part of the rows of each rank, (ranks,)
    or (ranks, L).
    """
    means, variances = known.unbind(-3)
    weights = shares[..., None, None]
    mean = (weights * means).sum(0)
    spread = means - mean
    return torch.stack([mean, (weights * torch.addcmul(variances, spread, spread)).sum(0)])


def correction_of(stale, before):
    """What corrected_moments is given beside what is fresh.

    stale, before: (..., 2, B, G), mean and variance of the image, and of this rank's rows, in the last call.
    """
    difference = stale - before
    return difference, before[..., 0, :, :], -difference[..., 0, :, :]


def corrected_moments(fresh, difference, mean_before, offset):
    """Mean and biased variance of the whole image, each (B, G), with what has changed of this rank's rows.

    fresh: (2, B, G), mean and variance of this rank's rows now. The others: of correction_of.
    The paper (section 4.3) adds this rank's change of E[x] and of E[x^2] to the stale ones of the image. Here without
    taking one large number from another: with stale E, V of the image and m, v of this rank's rows,
    V + v' - v + 2 (m' - m) (m - E). Where that is negative, the rank's own v' stands.
    """
    own_mean, own_variance = fresh.unbind()
    mean, variance = (fresh + difference).unbind()
    variance = torch.addcmul(variance, own_mean - mean_before, offset, value=2)
    return mean, torch.where(variance < 0, own_variance, variance)


def displaced_attention(q_BNTH, k_BNTH, v_BNTH, attention, context, key):
    """Attention of this rank's queries to keys and values of all ranks: of now within its own part, else as the
    exchange has them.

    Ulysses and Ring share out a rank's part of the tokens further; its keys and values are replicated along the ring
    axis, which then sends all of them. attention: a sequence_parallel.Attention. key: (block, name and number of the
    attention). Returns like q.
    """
    mesh, traffic, exchange = context.mesh, context.traffic, context.exchange
    sizes, key_sizes = attention.sizes, attention.key_sizes
    if not any(sizes):
        return q_BNTH
    each = len(sizes) // exchange.num_ranks
    parts = [(key_sizes or sizes)[rank * each:][:each] for rank in range(exchange.num_ranks)]
    own = replace(attention, sizes=sizes[exchange.rank * each:][:each], key_sizes=key_sizes and parts[exchange.rank])
    (q_BNTH, k_BNTH, v_BNTH), scattered = scatter_heads(q_BNTH, k_BNTH, v_BNTH, own, mesh, traffic)
    k_BNTH, v_BNTH = all_keys(k_BNTH, v_BNTH, own, mesh, traffic)
    every = keys_and_values(k_BNTH, v_BNTH, [sum(part) for part in parts], exchange, key)
    return gather_heads(attention.whole(q_BNTH, *every, attention.mask), scattered, mesh, traffic)


def keys_and_values(k_BNTH, v_BNTH, sizes, exchange, key):
    """Keys and values of all ranks, which have `sizes` tokens: this rank's as they are given, the others' as the
    exchange has them or foretells them."""
    shapes = [(2, *_with_size(k_BNTH.shape, 2, size)) for size in sizes]
    known = exchange.share(key, (k_BNTH, v_BNTH), shapes, drifts=True)
    before, after = known[:exchange.rank], known[exchange.rank + 1:]
    return [torch.cat([*(part[index] for part in before), own, *(part[index] for part in after)], 2)
            for index, own in enumerate((k_BNTH, v_BNTH))]


def of_all_rows(key_BNTH, value_BNTH, split, is_masked):
    """Keys and values of all rows of a split, from those of this rank's. Raises UnsupportedError for masks."""
    if is_masked:
        raise UnsupportedError("Use cfg_degree: this model masks its self-attention, which displaced_degree does not "
                               "support.")
    width = key_BNTH.shape[2] // split.size
    return keys_and_values(key_BNTH, value_BNTH, [size * width for size in split.sizes], split.exchange, split.key)


def _runs(rows):
    """Rows, which are in order, as (first, end) of those that follow one another; one that is empty where there are
    none.

    Where they are is said in numbers, not in a tensor, which CUDA would wait for.
    """
    runs: list[list[int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1][1] = row + 1
        else:
            runs.append([row, row + 1])
    return runs or [[0, 0]]


def _with_size(shape, dim, size):
    shape = list(shape)
    shape[dim] = size
    return shape
