"""Displaced patch parallelism (DistriFusion, arXiv 2402.19481): each rank computes a band of rows of the image and uses
the other ranks' activations of the previous call. docs/design/displaced.md.

# B batch, G groups of a norm, N heads, T tokens, H head size, L layers
"""

from dataclasses import dataclass, field, replace

import torch

from ..distributed.spatial_ops import RowSplit, input_rows, output_starts, overlap
from ..protocol.errors import UnsupportedError
from .displaced_exchange import Exchange
from .sequence_parallel import all_keys, gather_heads, scatter_heads


@dataclass(frozen=True)
class StaleSplit(RowSplit):
    """RowSplit of one layer whose remote rows come from an Exchange. Cached for the run."""

    exchange: Exchange = field(kw_only=True)
    key: str = field(kw_only=True)         # the layer's key in the exchange
    _read: list = field(default_factory=list, compare=False, repr=False)       # cached result of `_reading`

    @property
    def rank(self):
        return self.exchange.rank

    def around(self, x, backend, stride, padding):
        """Input of this rank's output rows of a convolution, with zeros for its Padding beyond the image, in one copy.

        x: (B, C, H, W), this rank's rows. A rank sends to all others every row that any of them reads.
        """
        if not self._read:
            self._read.append(self._reading(x, backend, stride, padding))
        runs, shapes, segments = self._read[0]
        sent = torch.cat([x[:, :, first:end] for first, end in runs], 2)
        known = self.exchange.share(self.key, sent, shapes)
        known[self.rank] = x
        return torch.cat([zeros if rank is None else known[rank][:, :, first:end]
                          for rank, first, end, zeros in segments], 2)

    def _reading(self, x, backend, stride, padding):
        """(runs of this rank's rows that others read, shapes of what each rank sends, segments of this rank's input).

        A segment: (rank, first, end) of rows that the rank sends, or of x for this rank, and None; or (None, 0, 0,
        zeros).
        """
        ranges, own = list(zip(self.starts, self.starts[1:])), self.rank
        firsts = output_starts(self.starts, backend, stride, padding)
        reads = [input_rows(first, end, self.num_rows, backend, stride, padding)
                 for first, end in zip(firsts, firsts[1:])]
        sent = [sorted({row for other, (_, low, high, _) in enumerate(reads) if other != rank
                        for row in range(*overlap(low, high, *rows))})
                for rank, rows in enumerate(ranges)]
        above, low, high, below = reads[own]
        segments = []
        for rank, rows in enumerate(ranges):
            first, end = overlap(low, high, *rows)
            if first < end:
                start = ranges[rank][0] if rank == own else first - sent[rank].index(first)
                segments.append((rank, first - start, end - start, None))
        zeros = [x.new_zeros(_with_size(x.shape, 2, count)) for count in (above, below)]
        segments = [(None, 0, 0, zeros[0])] * bool(above) + segments + [(None, 0, 0, zeros[1])] * bool(below)
        return _runs([row - self.start for row in sent[own]]), [
            _with_size(x.shape, 2, len(rows)) for rows in sent], segments

    def fractions(self, like):
        """As RowSplit's, cached for all layers of a level, since the copy to a CUDA device synchronises."""
        key = self.starts, like.dtype, like.device
        if key not in self.exchange.fractions:
            self.exchange.fractions[key] = super().fractions(like)
        return self.exchange.fractions[key]

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
        return image_moments(torch.stack(list(known)), self.fractions(fresh)).unbind()

    def change(self, fresh):
        """Arguments of corrected_moments after `fresh` that give the image's moments, as one tensor, (4, B, G), for
        compiled blocks, which compute the correction themselves. The exchange sends a copy of `fresh`."""
        exchange = self.exchange
        if exchange.norms == "corrected" and exchange.is_stale:
            exchange.share(self.key, fresh.clone(), [fresh.shape] * exchange.num_ranks)
            difference, mean_before, offset = self._correction(fresh)
        else:
            difference = torch.stack(self.moments(*fresh.unbind())) - fresh
            mean_before, offset = fresh[0], torch.zeros_like(fresh[0])
        return torch.cat([difference, mean_before[None], offset[None]])

    def _correction(self, like):
        """Result of correction_of, computed at once for all norms of a bucket, which saves many small kernels."""
        exchange = self.exchange
        if self.key not in exchange.derived:
            layers = exchange.same_shaped(self.key)
            known = torch.stack([moments for by_rank in layers.values() for moments in by_rank])
            known = known.view(len(layers), -1, *like.shape)
            fractions = torch.stack([exchange.layers[key].fractions(like) for key in layers])
            found = correction_of(image_moments(known.movedim(1, 0), fractions.T).movedim(1, 0), known[:, self.rank])
            exchange.derived.update(zip(layers, zip(*found)))
        return exchange.derived[self.key]


def image_moments(known, fractions):
    """Mean and biased variance of the complete image, (2, B, G) or, for several norms, (2, L, B, G).

    known: (ranks, 2, B, G) or (ranks, L, 2, B, G), of each rank's rows. fractions: each rank's fraction of the rows,
    (ranks,) or (ranks, L).
    """
    means, variances = known.unbind(-3)
    weights = fractions[..., None, None]
    mean = (weights * means).sum(0)
    deviation = means - mean
    return torch.stack([mean, (weights * torch.addcmul(variances, deviation, deviation)).sum(0)])


def correction_of(stale, before):
    """Arguments of corrected_moments after `fresh`: (difference, mean_before, offset).

    stale, before: (..., 2, B, G), mean and variance of the image and of this rank's rows, in the previous call.
    """
    difference = stale - before
    return difference, before[..., 0, :, :], -difference[..., 0, :, :]


def corrected_moments(fresh, difference, mean_before, offset):
    """Mean and biased variance of the complete image, each (B, G), corrected by the change of this rank's rows.

    fresh: (2, B, G), current mean and variance of this rank's rows. The others: from correction_of.
    The paper (section 4.3) adds this rank's change of E[x] and of E[x^2] to the image's stale ones. This form avoids
    the cancellation of large numbers: with stale E, V of the image and m, v of this rank's rows,
    V + v' - v + 2 (m' - m) (m - E). Where that is negative, the rank's own v' is used.
    """
    own_mean, own_variance = fresh.unbind()
    mean, variance = (fresh + difference).unbind()
    variance = torch.addcmul(variance, own_mean - mean_before, offset, value=2)
    return mean, torch.where(variance < 0, own_variance, variance)


def displaced_attention(q_BNTH, k_BNTH, v_BNTH, attention, context, key):
    """Attention of this rank's queries to keys and values of all ranks: fresh within its displaced rank, else from the
    exchange. Every sequence rank calls it.

    Ulysses and Ring split a displaced rank's tokens further; its keys and values are all-gathered along the ring axis.
    attention: a sequence_parallel.Attention. key: (block, name and number of the attention). Returns like q.
    """
    mesh, traffic, exchange = context.mesh, context.traffic, context.exchange
    sizes, key_sizes = attention.sizes, attention.key_sizes
    if not any(sizes):
        return q_BNTH
    each = len(sizes) // exchange.num_ranks
    by_rank = [(key_sizes or sizes)[rank * each:][:each] for rank in range(exchange.num_ranks)]
    own = replace(attention, sizes=sizes[exchange.rank * each:][:each], key_sizes=key_sizes and by_rank[exchange.rank])
    (q_BNTH, k_BNTH, v_BNTH), scattered = scatter_heads(q_BNTH, k_BNTH, v_BNTH, own, mesh, traffic)
    k_BNTH, v_BNTH = all_keys(k_BNTH, v_BNTH, own, mesh, traffic)
    every = keys_and_values(k_BNTH, v_BNTH, [sum(sizes_of_rank) for sizes_of_rank in by_rank], exchange, key)
    return gather_heads(attention.local(q_BNTH, *every, attention.mask, mesh, traffic), scattered, mesh, traffic)


def keys_and_values(k_BNTH, v_BNTH, sizes, exchange, key):
    """Keys and values of all ranks: this rank's as passed, the others' stale or extrapolated, from the exchange.
    sizes: tokens of each rank."""
    shapes = [(2, *_with_size(k_BNTH.shape, 2, size)) for size in sizes]
    known = exchange.share(key, (k_BNTH, v_BNTH), shapes, drifts=True)
    before, after = known[:exchange.rank], known[exchange.rank + 1:]
    return [torch.cat([*(both[index] for both in before), own, *(both[index] for both in after)], 2)
            for index, own in enumerate((k_BNTH, v_BNTH))]


def of_all_rows(key_BNTH, value_BNTH, split, is_masked):
    """Keys and values of all rows of a split, from this rank's. Raises UnsupportedError if they are masked."""
    if is_masked:
        raise UnsupportedError("Use cfg_degree: this model masks its self-attention, which displaced_degree does not "
                               "support.")
    width = key_BNTH.shape[2] // split.size
    return keys_and_values(key_BNTH, value_BNTH, [size * width for size in split.sizes], split.exchange, split.key)


def _runs(rows):
    """Ranges (first, end) of consecutive rows; [[0, 0]] if there are none. rows: ascending.

    Slicing with integers instead of indexing with a tensor avoids a device synchronisation.
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
