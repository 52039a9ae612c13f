"""Convolution, norm and attention of an image that is split among ranks, each rank computing its own rows.

A split is along rows (dim -2), columns (dim -1) or, without norms and attention, frames (dim -3). "Row" means an index
along that dim: a column is a row of a split along columns. Images are (B, C, H, W) or (B, C, F, H, W).
"""

# B batch, C channels, F frames, H rows, W columns, N heads, T tokens (rows x columns), G groups of a norm

from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, product

import torch
import torch.distributed as dist
from torch.nn.functional import conv2d, conv3d, pad, scaled_dot_product_attention

from ..protocol.errors import UnsupportedError
from .collectives import Traffic, all_gather, start_all_to_all
from .group_norm import global_moments


@dataclass(frozen=True)
class RowSplit:
    """Split of an image's rows among the ranks of a group: rank i has rows starts[i] to starts[i + 1] - 1."""

    starts: tuple[int, ...]
    group: object                          # None for a single rank
    traffic: Traffic
    dim: int = -2
    _fractions: dict = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_sizes(cls, sizes, group, traffic, dim=-2):
        return cls(tuple(accumulate(sizes, initial=0)), group, traffic, dim)

    def scaled(self, factor):
        return RowSplit(tuple(start * factor for start in self.starts), self.group, self.traffic, self.dim)

    @property
    def rank(self):
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def start(self):
        return self.starts[self.rank]

    @property
    def size(self):
        return self.sizes[self.rank]

    @property
    def sizes(self):
        return [end - start for start, end in zip(self.starts, self.starts[1:])]

    @property
    def num_rows(self):
        return self.starts[-1]

    @property
    def other_dim(self):
        """A dim that is not split."""
        return -2 if self.dim == -1 else -1

    def fractions(self, like):
        """Each rank's fraction of the rows, (ranks,), with the dtype and device of `like`. Cached, since the copy to a
        CUDA device synchronises."""
        key = like.dtype, like.device
        if key not in self._fractions:
            self._fractions[key] = like.new_tensor([size / self.num_rows for size in self.sizes])
        return self._fractions[key]

    def gather(self, tensor, sizes, dim):
        """Concatenate every rank's tensor along `dim`. sizes: of each rank there."""
        return tensor if len(sizes) == 1 else all_gather(tensor, sizes, dim, self.group, self.traffic)

    def moments(self, mean_BG, variance_BG):
        """See global_moments."""
        return global_moments(mean_BG, variance_BG, self)


@dataclass(frozen=True)
class Padding:
    """Rows that a convolution reads beyond the image's edges, and torch's name of the padding mode."""

    before: int
    after: int
    mode: str = "constant"


def output_starts(starts, kernel, stride, padding):
    """First output row of each rank, and their total number.

    Output row o reads input rows from o * stride - padding.before on, and belongs to the rank of input row o * stride.
    """
    num_rows = num_outputs(starts[-1], kernel, stride, padding)
    return [min(-(-start // stride), num_rows) for start in starts[:-1]] + [num_rows]


def num_outputs(num_rows, kernel, stride, padding):
    return (num_rows + padding.before + padding.after - kernel) // stride + 1


def input_rows(first, end, num_rows, kernel, stride, padding):
    """Input of output rows first ... end - 1: (zero rows above, first, end of the image's rows, zero rows below)."""
    if first >= end:
        return 0, 0, 0, 0
    top = first * stride - padding.before
    bottom = (end - 1) * stride - padding.before + kernel
    above = max(0, min(bottom, 0) - top)
    below = max(0, bottom - max(top, num_rows))
    return above, min(max(top, 0), num_rows), min(max(bottom, 0), num_rows), below


def num_rows_read(starts, rank, kernel, stride, padding):
    """Number of rows that a rank reads for its output rows of a convolution, including zeros beyond the image."""
    firsts = output_starts(starts, kernel, stride, padding)
    above, low, high, below = input_rows(firsts[rank], firsts[rank + 1], starts[-1], kernel, stride, padding)
    return above + high - low + below


@dataclass(frozen=True)
class Convolution:
    """Arguments of torch's conv2d and conv3d without the input, in their order and with their defaults."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    stride: int | tuple[int, ...] = 1      # these three are expanded to one number per dim of the image
    padding: int | tuple[int, ...] = 0
    dilation: int | tuple[int, ...] = 1
    groups: int = 1

    def __post_init__(self):
        for name in ("stride", "padding", "dilation"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise UnsupportedError(f'Use VAE Decode: a convolution with {name}="{value}" cannot be split.')
            each = tuple(value) if isinstance(value, (tuple, list)) else (value,) * self.num_dims
            object.__setattr__(self, name, each)

    @property
    def num_dims(self):
        return self.weight.dim() - 2

    def reach(self, dim, edges=None):
        """(kernel size, stride, Padding) along a dim. edges: the Padding if it is not zeros as in `padding`."""
        return self.weight.shape[dim], self.stride[dim], edges or Padding(self.padding[dim], self.padding[dim])

    def run(self, x, padded):
        """Convolve x. padded: {dim: rows of zeros that torch pads}, if different from `padding`."""
        padding = list(self.padding)
        for dim, rows in padded.items():
            padding[dim] = rows
        convolve = {2: conv2d, 3: conv3d}[self.num_dims]
        return convolve(x, self.weight, self.bias, self.stride, tuple(padding), self.dilation, self.groups)


def conv_rows(x, convolution, split, edges=None, block_size=None):
    """Output rows of this rank of torch's conv2d or conv3d of the complete image. Every rank of the split calls it.

    x: this rank's rows. edges: the Padding along the split, if it is not zeros as in the Convolution.
    block_size: computes the output in blocks, so that halos and padding are copied for one block at a time: a number of
    rows of the split, or (rows, columns) of the image; None: at once. The output is split as in output_starts.
    Raises UnsupportedError for a dilated kernel.
    """
    dim, other = split.dim, split.other_dim
    assert x.shape[dim] == split.size, f"{x.shape[dim]} rows, the split says {split.size}"
    if convolution.dilation[-2:] != (1, 1):
        raise UnsupportedError(f"Use VAE Decode: a convolution with dilation={convolution.dilation} cannot be split.")
    along, num_across = convolution.reach(dim, edges), num_outputs(x.shape[other], *convolution.reach(other))
    out_starts = output_starts(split.starts, *along)
    needs = [input_rows(first, end, split.num_rows, *along) for first, end in zip(out_starts, out_starts[1:])]
    arrive = start_borrowing(x, [(first, end) for _, first, end, _ in needs], split)
    first, end = out_starts[split.rank], out_starts[split.rank + 1]
    if block_size is None and _is_centered(*along) and split.size > 2 * along[2].before:
        # While halos arrive, convolve this rank's rows as if they were the image; output rows at edges that need halos
        # are recomputed.
        out = convolution.run(x, {dim: along[2].before})
        tiles = [(rows, (0, num_across)) for rows in _edges(first, end, out_starts[-1], along[2])]
    else:
        out, tiles = None, _tiles(first, end, num_across, dim, block_size)
    chunks = arrive()
    if first == end:
        return _no_rows(x, convolution, num_across, dim, other)
    chunks[split.rank] = x
    first_rows = [max(needs[split.rank][1], start) for start in split.starts[:-1]]
    first_rows[split.rank] = split.start
    output_of = partial(_output_of, convolution, along, split, chunks, first_rows)
    if out is None and len(tiles) == 1:
        return output_of(tiles[0])
    return _with_tiles(out, tiles, output_of, split, (first, end), num_across)


def _output_of(convolution, along, split, chunks, first_rows, tile):
    """Output of one tile: rows first to end - 1 of tile[0], columns of tile[1].

    along: the convolution's reach along the split. chunks: each rank's rows of the image, starting at first_rows.
    """
    dim, other, columns = split.dim, split.other_dim, chunks[split.rank].shape[split.other_dim]
    above, low, high, below = input_rows(*tile[0], split.num_rows, *along)
    rows = _rows_between(low, high, chunks, first_rows, dim)
    left, start, stop, right = input_rows(*tile[1], columns, *convolution.reach(other))
    rows = rows.narrow(other, start, stop - start) if stop - start < columns else rows
    padded = {dim: 0, other: 0}
    if left == right == convolution.padding[other]:            # all columns: torch pads without a copy
        padded[other], left, right = left, 0, 0
    if above or below:
        rows = pad(rows, pad_argument(rows.dim(), {dim: (above, below)}), along[2].mode)
    if left or right:
        rows = pad(rows, pad_argument(rows.dim(), {other: (left, right)}))
    return convolution.run(rows, padded)


def _with_tiles(out, tiles, output_of, split, own_rows, num_across):
    """This rank's output with these tiles computed. out: the output without them; None: allocate it.
    own_rows: (first, end) of this rank's output rows."""
    dim, other, (first, end) = split.dim, split.other_dim, own_rows
    for tile in tiles:
        tile_out = output_of(tile)
        if out is None:
            shape = list(tile_out.shape)
            shape[dim], shape[other] = end - first, num_across
            out = tile_out.new_empty(shape)
        (low, high), (start, stop) = tile
        out.narrow(dim, low - first, high - low).narrow(other, start, stop - start).copy_(tile_out)
        del tile_out                                           # before the next one is allocated
    return out


def _is_centered(kernel, stride, padding):
    """True if an output row reads as many input rows before its own as after it."""
    return stride == 1 and padding.before == padding.after == (kernel - 1) / 2


def _edges(first, end, num_outputs, padding):
    """Ranges among outputs first ... end - 1 that read rows of other ranks, or padding other than zeros."""
    not_zeros = padding.mode != "constant"
    return [rows for rows, is_edge in (((first, first + padding.before), first > 0 or not_zeros),
                                       ((end - padding.after, end), end < num_outputs or not_zeros))
            if is_edge and padding.before]


def _tiles(first, end, num_across, dim, block_size):
    """Tiles in which outputs first ... end - 1 are computed: pairs of (first, end), along the split and across it."""
    if block_size is None:
        return [((first, end), (0, num_across))]
    if isinstance(block_size, int):
        along_size, across_size = block_size, num_across
    else:
        along_size, across_size = block_size if dim == -2 else reversed(block_size)
    return list(product(
        [(low, min(low + along_size, end)) for low in range(first, end, along_size)],
        [(low, min(low + across_size, num_across)) for low in range(0, num_across, across_size)]))


def _rows_between(first, end, chunks, first_rows, dim):
    """Rows first ... end - 1 of the image, from chunks that start at first_rows."""
    found = []
    for chunk, start in zip(chunks, first_rows):
        low, high = overlap(first, end, start, start + chunk.shape[dim])
        if low < high:
            found.append(chunk.narrow(dim, low - start, high - low))
    if not found:
        return chunks[0].narrow(dim, 0, 0)
    return found[0] if len(found) == 1 else torch.cat(found, dim)


def pad_argument(num_dims, pairs):
    """torch's pad argument for an image of num_dims dims, from {dim: (before, after)} with negative dims."""
    return tuple(count for dim in range(-1, 1 - num_dims, -1) for count in pairs.get(dim, (0, 0)))


def _no_rows(x, convolution, num_across, dim, other):
    """Empty output of a convolution, for a rank without output rows."""
    frames = [num_outputs(x.shape[-3], *convolution.reach(-3))] if x.dim() == 5 else []
    shape = [x.shape[0], convolution.weight.shape[0], *frames, 0, 0]
    shape[other] = num_across
    return x.new_empty(shape)


def start_borrowing(x, wanted, split):
    """Begin to fetch rows of other ranks. Every rank of the split calls it.

    wanted: (first, end) for each rank, known to all ranks. Rows may be several ranks away; one all-to-all fetches all.
    Returns a function that waits and returns one tensor per rank of the group.
    """
    ranges = list(zip(split.starts, split.starts[1:]))
    nothing = x.narrow(split.dim, 0, 0)
    if all(overlap(*want, *own) == want for want, own in zip(wanted, ranges)):
        return lambda: [nothing] * len(ranges)
    sent, receive_shapes = [], []
    for rank in range(len(ranges)):
        first, end = overlap(*wanted[rank], *ranges[split.rank])
        sent.append(nothing if rank == split.rank else x.narrow(split.dim, max(first - split.start, 0), end - first))
        first, end = overlap(*wanted[split.rank], *ranges[rank])
        shape = list(x.shape)
        shape[split.dim] = 0 if rank == split.rank else end - first
        receive_shapes.append(shape)
    return start_all_to_all(sent, receive_shapes, split.group, split.traffic)


def overlap(first, end, other_first, other_end):
    low = max(first, other_first)
    return (low, min(end, other_end)) if low < min(end, other_end) else (0, 0)


def attention_rows(query_BNTH, key_BNTH, value_BNTH, sizes, split, **options):
    """Attention of this rank's tokens to the tokens of all ranks. Every rank of the split calls it.

    sizes: number of tokens of each rank. With split columns the keys are not in the image's order, which does not
    matter to attention. options: of torch's scaled_dot_product_attention.
    """
    assert query_BNTH.shape[-2] == sizes[split.rank], f"{query_BNTH.shape[-2]} tokens, the split says {sizes}"
    key_BNTH, value_BNTH = all_tokens(torch.stack([key_BNTH, value_BNTH]), sizes, split)
    return scaled_dot_product_attention(query_BNTH, key_BNTH, value_BNTH, **options)


def all_tokens(tensor, sizes, split):
    return split.gather(tensor, sizes, -2)


def linear_attention_rows(query_BNHT, key_BNHT, value_BNHT, eps, split):
    """Linear attention (Katharopoulos et al. 2020, equation 5) of this rank's tokens to all ranks' tokens.

    Every rank of the split calls it.
    A token's result is its query times the sum of value times key over all tokens, divided by its query times the sum
    of the keys. The ranks add up these sums, (B, N, H + 1, H) float32, whatever the number of tokens. Queries and keys
    must not be negative.
    """
    query, key, value = (tensor.to(torch.float32) for tensor in (query_BNHT, key_BNHT, value_BNHT))
    sums_BNHH = pad(value, (0, 0, 0, 1), value=1) @ key.transpose(-1, -2)
    out = all_sums(sums_BNHH, split) @ query
    return (out[:, :, :-1] / (out[:, :, -1:] + eps)).to(value_BNHT.dtype)


def all_sums(tensor, split):
    """Sum of every rank's tensor, added in the same order on all ranks."""
    return split.gather(tensor[None], [1] * len(split.sizes), 0).sum(0)
