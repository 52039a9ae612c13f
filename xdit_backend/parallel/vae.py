"""Patch-parallel VAE decode: every rank decodes some rows of the picture, and the whole is exactly vae.decode's.

The worker calls decode_rows. diffusers' AutoencoderKL runs unmodified; while it decodes, five functions of
torch.nn.functional work on rows and fetch from the other ranks what a row needs of them (ALGORITHMS.md section 9).
"""

# B batch, C channels, H rows, W columns, N heads, T tokens (rows x columns of the latent), G groups of a norm

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import AutoencoderKL
from diffusers.models.attention_processor import AttnProcessor2_0, FusedAttnProcessor2_0

# The originals, bound before they are replaced.
from torch.nn.functional import conv2d, interpolate, scaled_dot_product_attention

from ..planner import shard_sizes
from ..protocol.errors import UnsupportedError
from .collectives import Traffic, all_gather, all_to_all


@torch.inference_mode()
def decode_rows(vae, latent_BCHW, group=None, traffic=None):
    """Decode this rank's rows of a picture. Every rank of `group` calls it, with the same whole latent.

    Returns the index of the first row and the rows, (B, 3, rows, W): put together by rank, they are vae.decode(latent).
    A rank has no rows where there are more ranks than rows of the latent. Without a group, or alone in it, a rank
    decodes the whole picture. Raises UnsupportedError for a VAE that cannot be split exactly.
    """
    if group is None or dist.get_world_size(group) == 1:
        return 0, vae.decode(latent_BCHW, return_dict=False)[0]
    _check(vae)
    sizes = shard_sizes(latent_BCHW.shape[-2], dist.get_world_size(group))
    split = RowSplit.of_sizes(sizes, group, traffic or Traffic())
    rows = latent_BCHW.narrow(-2, split.start, split.size)
    with _replaced(**_row_functions(split, latent_BCHW.shape[-1])):
        picture = vae.decode(rows, return_dict=False)[0]
    return split.start * (picture.shape[-1] // latent_BCHW.shape[-1]), picture


@dataclass(frozen=True)
class RowSplit:
    """Which rows of an image each rank of a group holds: rank i those from starts[i] to starts[i + 1] - 1."""

    starts: tuple[int, ...]
    group: object
    traffic: Traffic

    @classmethod
    def of_sizes(cls, sizes, group, traffic):
        return cls(tuple(accumulate(sizes, initial=0)), group, traffic)

    def scaled(self, factor):
        return RowSplit(tuple(start * factor for start in self.starts), self.group, self.traffic)

    @property
    def rank(self):
        return dist.get_rank(self.group)

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


def output_starts(starts, kernel, stride, padding):
    """First output row of each rank, and the number of them all: an output row is its input row's rank's.

    Output row o reads from input row o * stride - padding on, and belongs to the rank that holds row o * stride.
    """
    num_rows = (starts[-1] + 2 * padding - kernel) // stride + 1
    return [min(-(-start // stride), num_rows) for start in starts[:-1]] + [num_rows]


def input_rows(first, end, num_rows, kernel, stride, padding):
    """What output rows first ... end - 1 read: zero rows above, first and end of the image's rows, zero rows below."""
    if first >= end:
        return 0, 0, 0, 0
    top = first * stride - padding
    bottom = (end - 1) * stride - padding + kernel
    above = max(0, min(bottom, 0) - top)
    below = max(0, bottom - max(top, num_rows))
    return above, min(max(top, 0), num_rows), min(max(bottom, 0), num_rows), below


def conv2d_rows(x_BCHW, weight, bias, stride, padding, dilation, groups, split):
    """torch's conv2d of the whole image, for the output rows of this rank. Every rank of the split calls it.

    stride, padding and dilation are pairs (rows, columns). Ranks hold the output as output_starts says.
    """
    assert x_BCHW.shape[-2] == split.size, f"{x_BCHW.shape[-2]} rows, the split says {split.size}"
    if dilation[0] != 1:
        raise UnsupportedError(f"A convolution with dilation={dilation} along rows cannot be split. Use VAE Decode.")
    along_rows = (weight.shape[-2], stride[0], padding[0])
    out_starts = output_starts(split.starts, *along_rows)
    needs = [input_rows(first, end, split.num_rows, *along_rows) for first, end in zip(out_starts, out_starts[1:])]
    rows_BCHW = _with_halo(x_BCHW, needs, split)
    if out_starts[split.rank] == out_starts[split.rank + 1]:
        reach = dilation[1] * (weight.shape[-1] - 1) + 1
        num_columns = (x_BCHW.shape[-1] + 2 * padding[1] - reach) // stride[1] + 1
        return x_BCHW.new_empty(x_BCHW.shape[0], weight.shape[0], 0, num_columns)
    return conv2d(rows_BCHW, weight, bias, stride, (0, padding[1]), dilation, groups)


def _with_halo(x_BCHW, needs, split):
    """The rows this rank's convolution reads: borrowed, its own, and zeros beyond the image's edge."""
    above, first, end, below = needs[split.rank]
    pieces = borrow_rows(x_BCHW, [(first, end) for _, first, end, _ in needs], split)
    low, high = _overlap(first, end, split.start, split.start + split.size)
    pieces[split.rank] = x_BCHW.narrow(-2, max(low - split.start, 0), high - low)
    if above or below:
        batch, channels, _, num_columns = x_BCHW.shape
        pieces = [x_BCHW.new_zeros(batch, channels, above, num_columns), *pieces,
                  x_BCHW.new_zeros(batch, channels, below, num_columns)]
    pieces = [piece for piece in pieces if piece.shape[-2]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [x_BCHW[..., :0, :]], -2)


def borrow_rows(x_BCHW, wanted, split):
    """Fetch the rows wanted[rank] = (first, end) that other ranks hold; returns one tensor for each rank of the group.

    The plan tells every rank what all others want, however many ranks away, so that one exchange does it.
    """
    batch, channels, _, num_columns = x_BCHW.shape
    held = list(zip(split.starts, split.starts[1:]))
    nothing = x_BCHW[..., :0, :]
    if all(_overlap(*want, *own) == want for want, own in zip(wanted, held)):
        return [nothing] * len(held)
    lent, borrowed_shapes = [], []
    for rank in range(len(held)):
        first, end = _overlap(*wanted[rank], *held[split.rank])
        lent.append(nothing if rank == split.rank else x_BCHW.narrow(-2, max(first - split.start, 0), end - first))
        first, end = _overlap(*wanted[split.rank], *held[rank])
        borrowed_shapes.append((batch, channels, 0 if rank == split.rank else end - first, num_columns))
    return all_to_all(lent, borrowed_shapes, split.group, split.traffic)


def _overlap(first, end, other_first, other_end):
    low = max(first, other_first)
    return (low, min(end, other_end)) if low < min(end, other_end) else (0, 0)


def group_norm_rows(x, num_groups, weight, bias, eps, split):
    """torch's group norm with the statistics of the whole image. Every rank of the split calls it.

    x: (B, C, ...), this rank's rows in any order. Statistics are float32, or float64 if x is.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    mean_BG, variance_BG = global_moments(*_moments(wide, num_groups), split)
    channels = x.shape[1] // num_groups
    scale_BC = torch.rsqrt(variance_BG + eps).repeat_interleave(channels, 1)
    if weight is not None:
        scale_BC = scale_BC * weight
    trailing = (...,) + (None,) * (x.dim() - 2)
    # The mean first: x * scale and mean * scale would cancel where the mean is large.
    y = (wide - mean_BG.repeat_interleave(channels, 1)[trailing]).mul_(scale_BC[trailing])
    if bias is not None:
        y.add_(bias[trailing])
    return y.to(x.dtype)


def _moments(x, num_groups):
    """Mean and biased variance of each group, (B, G). Zeros where there are no rows."""
    batch, channels = x.shape[:2]
    if x.numel() == 0:
        return x.new_zeros(batch, num_groups), x.new_zeros(batch, num_groups)
    # The norm's own kernel finds both in one pass: 14 times faster on a CPU than torch.var_mean.
    size = x[0, 0].numel()
    _, mean_BG, deviation_BG = torch.ops.aten.native_group_norm(x, None, None, batch, channels, size, num_groups, 0.0)
    return mean_BG, deviation_BG ** -2


def global_moments(mean_BG, variance_BG, split):
    """Combine each rank's mean and variance into those of the whole image.

    Chan, Golub and LeVeque 1979: the ranks' own variances and the spread of their means, weighted by their shares
    of the rows. Sums of squares would cancel where the mean is large.
    """
    moments = torch.stack([mean_BG, variance_BG])[None]
    means, variances = all_gather(moments, [1] * len(split.sizes), 0, split.group, split.traffic).unbind(1)
    shares = means.new_tensor([size / split.num_rows for size in split.sizes])[:, None, None]
    mean_BG = (shares * means).sum(0)
    return mean_BG, (shares * (variances + (means - mean_BG) ** 2)).sum(0)


def attention_rows(query_BNTH, key_BNTH, value_BNTH, sizes, split, **options):
    """Attention of this rank's tokens to the tokens of all ranks, which hold `sizes` of them. Every rank calls it."""
    assert query_BNTH.shape[-2] == sizes[split.rank], f"{query_BNTH.shape[-2]} tokens, the split says {sizes}"
    key_BNTH, value_BNTH = all_tokens(torch.stack([key_BNTH, value_BNTH]), sizes, split)
    if query_BNTH.shape[-2] == 0:
        return query_BNTH
    return scaled_dot_product_attention(query_BNTH, key_BNTH, value_BNTH, **options)


def all_tokens(tensor, sizes, split):
    return all_gather(tensor, sizes, -2, split.group, split.traffic)


def _row_functions(split, latent_width):
    """What takes the place of torch.nn.functional's functions while rows are decoded.

    Only rows are split, and a decoder enlarges both sides alike: the width of a tensor tells its scale and with it the
    rows each rank holds, on a rank without rows too.
    """

    def row_conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        scaled = split.scaled(input.shape[-1] // latent_width)
        return conv2d_rows(input, weight, bias, _pair(stride), _pair(padding), _pair(dilation), groups, scaled)

    def row_group_norm(input, num_groups, weight=None, bias=None, eps=1e-5):
        return group_norm_rows(input, num_groups, weight, bias, eps, split)

    def row_pad(input, pad, mode="constant", value=None):
        raise UnsupportedError(f"{mode} padding by {tuple(pad)} cannot be split, only zero padding inside a "
                               f"convolution. Use VAE Decode.")

    def row_interpolate(input, size=None, scale_factor=None, mode="nearest", *rest, **options):
        whole = scale_factor is not None and all(float(factor).is_integer() for factor in _pair(scale_factor))
        if mode != "nearest" or not whole:
            raise UnsupportedError(f"Upsampling with mode={mode}, size={size}, scale_factor={scale_factor} cannot be "
                                   f"split, only nearest by a whole factor. Use VAE Decode.")
        if input.shape[-2] == 0:
            return input.new_empty(*input.shape[:-1], input.shape[-1] * int(_pair(scale_factor)[1]))
        return interpolate(input, scale_factor=scale_factor, mode=mode)

    def row_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        if attn_mask is not None or is_causal:
            raise UnsupportedError("Masked attention in a VAE cannot be split. Use VAE Decode.")
        sizes = [size * latent_width for size in split.sizes]
        return attention_rows(query, key, value, sizes, split, dropout_p=dropout_p, **options)

    return {
        "conv2d": row_conv2d,
        "group_norm": row_group_norm,
        "pad": row_pad,
        "interpolate": row_interpolate,
        "scaled_dot_product_attention": row_attention,
    }


@contextmanager
def _replaced(**functions):
    originals = {name: getattr(F, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(F, name, function)
        yield
    finally:
        for name, original in originals.items():
            setattr(F, name, original)


def _check(vae):
    if not isinstance(vae, AutoencoderKL):
        raise UnsupportedError(f"{type(vae).__name__} cannot be decoded by rows, only AutoencoderKL. Use VAE Decode.")
    if vae.use_tiling:
        raise UnsupportedError("Tiling is on, which blends tiles, and rows are exact. Call vae.disable_tiling() first.")
    for name, processor in vae.attn_processors.items():
        if not isinstance(processor, (AttnProcessor2_0, FusedAttnProcessor2_0)):
            raise UnsupportedError(f"{name} is {type(processor).__name__}, which does not use torch's attention and "
                                   f"would see this rank's rows only. Use AttnProcessor2_0.")


def _pair(value):
    if isinstance(value, str):
        raise UnsupportedError(f'A convolution with padding="{value}" cannot be split. Use VAE Decode.')
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)
