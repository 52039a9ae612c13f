"""Patch-parallel VAE: every rank decodes or encodes some of the rows, columns or frames, exactly as the VAE itself.

diffusers' autoencoders run unmodified: while one runs, a few functions of torch.nn.functional work on this rank's rows
and fetch halos from other ranks (distributed/spatial_ops.py). Those that work by tiles have their tiles distributed
(vae_tiles.py).
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from diffusers.models.attention_processor import AttnProcessor2_0, FusedAttnProcessor2_0, SanaMultiscaleLinearAttention
from torch.nn.functional import conv2d, conv3d, interpolate
from torch.nn.functional import pad as torch_pad

from ..autoencoders import FAMILIES, family_of
from ..autoencoders.vae_family import TorchFunctions, replaced, torchs_own
from ..distributed.collectives import Traffic
from ..distributed.group_norm import group_norm_rows
from ..distributed.mesh import make_group
from ..distributed.spatial_ops import Convolution, Padding, RowSplit, attention_rows, conv_rows, linear_attention_rows
from ..partition import shard_sizes
from ..protocol.errors import UnsupportedError
from .vae_tiles import shared_tiles

NOT_FOLLOWED = "Use VAE Decode: a padding of this VAE is not followed by its convolution, so that it cannot be split."


@dataclass(frozen=True)
class Share:
    """Rows of an image or latent from one rank: `tensor`, which begins at index `start` of dim `dim` (-3, -2 or -1)."""

    tensor: torch.Tensor
    dim: int = -2
    start: int = 0


class Ranks:
    """The ranks of a process group, and the groups of its first ranks, which are created on demand and cached."""

    def __init__(self, group, machines=()):
        """machines: name of the machine of each rank of the world; (): all ranks are on one machine."""
        self._all, self._machines = dist.get_process_group_ranks(group), machines
        self._groups = {tuple(self._all): group}

    @property
    def count(self):
        return len(self._all)

    @property
    def machines(self):
        """Name of each rank's machine."""
        return [self._machines[rank] if self._machines else "" for rank in self._all]

    @property
    def is_member(self):
        """True if this process is one of the ranks."""
        return dist.get_rank() in self._all

    def only(self, count, start=0):
        """`count` of these ranks from `start` on. Every rank of the world calls it, in the same order."""
        some = copy.copy(self)
        some._all = self._all[start:start + count]
        some.first(count)
        return some

    def first(self, count):
        """Group of the first `count` ranks; None on the others. Every rank of the world calls it, in the same order."""
        some = tuple(self._all[:count])
        if some not in self._groups:
            self._groups[some] = make_group([some])
        return self._groups[some] if dist.get_rank() in some else None


@dataclass(frozen=True)
class SplitOptions:
    """Options of splitting an image among ranks, and the blocks in which a rank computes convolutions."""

    dim: int | None = None         # -3, -2 or -1: frames, rows or columns; None: from split_dim
    speeds: tuple = ()             # relative speeds of the ranks; (): identical
    block_size: int | tuple[int, int] | None = None            # see conv_rows; None: one block
    # (RowSplit), called before each convolution, or before some tiles, on all ranks that have rows; it may raise on all
    # of them to abort
    on_convolution: Callable[[RowSplit], object] | None = None
    # called by a decode with a Share of consecutive frames as they finish, where the family can
    # (VaeFamily.decode_frames), in place of a result; None: all frames are the result
    on_frames: Callable | None = None


@torch.inference_mode()
def decode_rows(vae, latent, ranks=None, traffic=None, options=SplitOptions()):
    """Decode this rank's rows of an image. Every rank of `ranks` calls it, with the same full latent.

    latent: (B, C, H, W), or (B, C, F, H, W) for a video. Returns a Share of (B, 3, H', W') or (B, 3, F', H', W');
    concatenated by rank, they are vae.decode(latent) as ComfyUI computes it (autoencoders/). With on_frames, a VAE that
    decodes frames in order hands them over as they finish, and the result is None. If there are more ranks
    than rows, the last ones get None; with tiles the fastest rank gets the complete result. Without ranks, or with one,
    it decodes the complete image. Raises UnsupportedError for a VAE that cannot be split exactly.
    """
    family = _family(vae)
    streams = options.on_frames is not None and family.decode_frames is not None and latent.ndim == 5
    run = partial(family.decode_frames if streams else family.decode, vae)
    return _run_split(vae, run, latent, 1, ranks, traffic, options if streams else replace(options, on_frames=None))


@torch.inference_mode()
def encode_rows(vae, image, scale, ranks=None, traffic=None, options=SplitOptions()):
    """Encode this rank's rows of an image. Every rank of `ranks` calls it, with the same full image.

    image: (B, C, H, W) or (B, C, F, H, W) on any device; only this rank's rows are copied to the VAE's device. H and W
    are multiples of `scale`, the pixels along one side of a latent row. Returns a Share of the mean that vae.encode
    returns.
    """
    assert all(size % scale == 0 for size in image.shape[-2:]), f"{tuple(image.shape)} is no multiple of {scale}"

    def encode(rows):
        return _family(vae).encode(vae, rows.to(vae.device, vae.dtype))

    return _run_split(vae, encode, image, scale, ranks, traffic, replace(options, on_frames=None))


def split_dim(vae, shape, scale):
    """The dim to split: the longest, whose halos are the smallest; frames only for VAEs that can be split along them.

    shape, scale: of the tensor to decode (scale 1) or encode.
    """
    rows, columns = shape[-2:]
    if scale == 1 and _family(vae).by_frames and shape[-3] - 1 > max(rows, columns):
        return -3
    return -1 if columns > rows else -2


def max_shards(shape, scale, dim):
    """Largest number of shards of `dim`: rows of the latent, or frames after its first."""
    return shape[-3] - 1 if dim == -3 else shape[dim] // scale


def _run_split(vae, run, image, scale, ranks, traffic, options):
    """Run a VAE on this rank's rows of `image`, an image or latent with `scale` rows per row of the latent."""
    run, num_ranks = partial(_run, vae, run), ranks.count if ranks else 1
    if _family(vae).tiles:
        return _by_tiles(vae, run, image, ranks, traffic, options)
    dim = options.dim or split_dim(vae, image.shape, scale)
    count = max_shards(image.shape, scale, dim)
    if num_ranks == 1 and options.block_size is None:
        split = RowSplit.of_sizes([count], None, traffic or Traffic(), dim)
        with TorchFunctions(**_with_callback(options.on_convolution, split)):
            return _shared(run, image, Share, options)
    _check(vae)
    num_ranks = min(num_ranks, count)
    group = ranks and ranks.first(num_ranks)
    if ranks and group is None:
        return None
    split = RowSplit.of_sizes(shard_sizes(count, num_ranks, options.speeds[:num_ranks], least=1), group,
                              traffic or Traffic(), dim)
    if dim == -3:
        return _by_frames(vae, run, image, split, options)
    return _by_rows(vae, run, image, scale, split, options)


def _by_tiles(vae, run, image, ranks, traffic, options):
    """Every rank runs on the complete `image` but computes only its tiles; the fastest has the result."""
    num_ranks = ranks.count if ranks else 1
    group = ranks and ranks.first(num_ranks)
    if ranks and group is None:
        return None
    split = RowSplit.of_sizes([1] * num_ranks, group, traffic or Traffic())
    with shared_tiles(vae, _family(vae).tiles, split, options.speeds, options.on_convolution) as has_all:
        result = run(image)
    return Share(result) if has_all else None


def _run(vae, run, *arguments):
    """Call `run`. If it raises, clear the frames that a video VAE has cached for its next chunk."""
    try:
        return run(*arguments)
    except BaseException:
        if hasattr(vae, "clear_cache"):
            vae.clear_cache()
        raise


def _with_callback(on_convolution, split):
    """torch's convolutions, preceded by a call of on_convolution."""
    def after(convolution):
        def with_callback(*args, **kwargs):
            on_convolution(split)
            return convolution(*args, **kwargs)
        return with_callback
    return {} if on_convolution is None else {"conv2d": after(conv2d), "conv3d": after(conv3d)}


def _by_rows(vae, run, image, scale, split, options):
    own = split.scaled(scale)
    latent_across = image.shape[split.other_dim] // scale
    functions = _RowFunctions(split, latent_across, options)
    with ExitStack() as stack:
        stack.enter_context(TorchFunctions(**functions.by_name()))
        for module in vae.modules():
            if isinstance(module, SanaMultiscaleLinearAttention):
                stack.enter_context(replaced(module, **_linear_attention(split, module.eps)))
            elif _family(vae).over_frames(module):
                stack.enter_context(replaced(module, forward=partial(_with_own_keys, module.forward)))
        share = _shared(run, image.narrow(split.dim, own.start, own.size), lambda result: Share(
            result, split.dim, split.start * result.shape[split.other_dim] // latent_across), options)
    if functions.waiting:
        raise UnsupportedError(NOT_FOLLOWED)
    return share


def _shared(run, image, share_of, options):
    """The Share of what `run` returns for an image or, with on_frames, of what it emits."""
    if options.on_frames is None:
        return share_of(run(image))
    run(image, lambda frames: options.on_frames(share_of(frames)))
    return None


def _by_frames(vae, run, image, split, options):
    """Decode this rank's frames, with all their rows. split: of the latent's frames after the first, which is on the
    first rank.

    A video has one frame for the latent's first and several for each further one, and modules treat the first frame
    differently. Therefore each rank puts one frame first, at every scale: the first rank the first frame, others the
    one before their own, whose output nothing reads and which is removed at the end.
    """
    lead = int(split.rank > 0)
    with TorchFunctions(conv3d=_frame_convolution(split, vae.config.decoder_causal, options)):
        result = run(image.narrow(-3, split.start, 1 + split.size))
    times = (result.shape[-3] - 1) // split.size
    return Share(result[:, :, lead:], -3, lead * (1 + split.start * times))


def _frame_convolution(split, causal, options):
    def frame_conv(input, *arguments, **kwargs):
        """Convolve after LTX's modules have repeated the outermost frames; other ranks' frames replace those."""
        convolution = Convolution(*arguments, **kwargs)
        num_repeated = convolution.weight.shape[-3] - 1
        before = num_repeated if causal else num_repeated // 2
        lead, num_frames = int(split.rank > 0), input.shape[-3] - num_repeated
        further = split.scaled((num_frames - 1) // split.size)
        own_split = RowSplit((0, *(1 + start for start in further.starts[1:])), split.group, split.traffic, -3)
        own = input.narrow(-3, before + lead, num_frames - lead)
        if options.on_convolution is not None:
            options.on_convolution(split)
        out = conv_rows(own, convolution, own_split, Padding(before, num_repeated - before, "replicate"),
                        options.block_size)
        return torch.cat([out[:, :, :1], out], -3) if lead else out
    return frame_conv


@dataclass(frozen=True)
class _RowFunctions:
    """Replacements of torch.nn.functional's functions while rows are decoded or encoded.

    Only one dim is split, and a VAE scales both by the same factor: the size of the other dim gives the scale, and with
    it each rank's rows.
    """

    split: RowSplit                # of the latent
    latent_across: int             # size of its other dim
    options: SplitOptions
    waiting: list = field(default_factory=list)                # padding that `pad` has left to the next convolution

    def by_name(self):
        return {"conv2d": self.convolution, "conv3d": self.convolution, "group_norm": self.group_norm, "pad": self.pad,
                "interpolate": self.interpolate, "scaled_dot_product_attention": self.attention}

    def _scaled(self, x):
        return self.split.scaled(x.shape[self.split.other_dim] // self.latent_across)

    def convolution(self, input, *arguments, **kwargs):
        convolution, split, edges = Convolution(*arguments, **kwargs), self._scaled(input), None
        if self.waiting:
            padded, split, edges = self.waiting.pop()
            if not _same_images(input, padded) or convolution.padding[split.dim]:
                raise UnsupportedError(NOT_FOLLOWED)
        if self.options.on_convolution is not None:
            self.options.on_convolution(self.split)
        return conv_rows(input, convolution, split, edges, self.options.block_size)

    def group_norm(self, input, num_groups, weight=None, bias=None, eps=1e-5):
        return group_norm_rows(input, num_groups, weight, bias, eps, self.split)

    def pad(self, input, pad, mode="constant", value=None):
        """Pad the unsplit dims now, and leave the split one to the next convolution."""
        here = 2 * (-self.split.dim - 1)                       # torch counts pairs from the last dim
        before, after = tuple(pad[here:here + 2]) or (0, 0)
        if min(before, after) < 0 or (before or after) and value:
            raise UnsupportedError(f"Use VAE Decode: {mode} padding by {tuple(pad)} with {value} cannot be split.")
        others = (*pad[:here], 0, 0, *pad[here + 2:])
        padded = torch_pad(input, others, mode, value) if any(others) else input
        if before or after:
            self.waiting.append((padded, self._scaled(input), Padding(before, after, mode)))
        return padded

    def interpolate(self, input, size=None, scale_factor=None, mode="nearest", *rest, **options):
        factors = _pair(scale_factor) if size is None else [new / old for new, old in zip(size[-2:], input.shape[-2:])]
        if mode not in ("nearest", "nearest-exact") or not all(float(factor).is_integer() for factor in factors):
            raise UnsupportedError(f"Use VAE Decode: upsampling with mode={mode}, size={size}, "
                                   f"scale_factor={scale_factor} cannot be split, only nearest by a whole factor.")
        return interpolate(input, size=size, scale_factor=scale_factor, mode=mode)

    def attention(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        if attn_mask is not None or is_causal:
            raise UnsupportedError("Use VAE Decode: masked attention in a VAE cannot be split.")
        num_frames = query.shape[-2] // (self.split.size * self.latent_across)
        sizes = [size * self.latent_across * num_frames for size in self.split.sizes]
        return attention_rows(query, key, value, sizes, self.split, dropout_p=dropout_p, **options)


def _same_images(tensor, other):
    """True if the tensors are the same or differ only in the order of their images (of channels, frames), the first
    being the same."""
    if tensor is other or tensor.is_meta:
        return True
    # compares bytes, since NaN is not equal to itself
    first, other_first = (each[(0,) * (each.dim() - 2)].contiguous().view(torch.uint8) for each in (tensor, other))
    return tensor.numel() == other.numel() and torch.equal(first, other_first)


def _with_own_keys(forward, *args, **kwargs):
    """Run a module's forward whose attention needs no tokens of other ranks."""
    with torchs_own("scaled_dot_product_attention"):
        return forward(*args, **kwargs)


def _linear_attention(split, eps):
    """Replacements for the two methods of Sana's attention, for few and for many tokens, which give the same result."""
    def attend(query, key, value):
        with torch._C.DisableTorchFunction():                  # linear_attention_rows calls torch's own pad
            return linear_attention_rows(query, key, value, eps, split)
    return {"apply_linear_attention": attend, "apply_quadratic_attention": attend}


def _family(vae):
    family = family_of(vae)
    if family is None:
        names = ", ".join(family.autoencoder for family in FAMILIES.values())
        raise UnsupportedError(f"Use VAE Decode: {type(vae).__name__} cannot be split by rows, only {names}.")
    return family


def _check(vae):
    if getattr(vae, "use_tiling", False):
        raise UnsupportedError("Call vae.disable_tiling() first: tiling is enabled, and decoding by rows is exact, "
                               "unlike blended tiles.")
    for name, processor in getattr(vae, "attn_processors", {}).items():
        if not isinstance(processor, (AttnProcessor2_0, FusedAttnProcessor2_0)):
            raise UnsupportedError(f"Use AttnProcessor2_0: {name} is {type(processor).__name__}, which does not use "
                                   "torch's attention and would see this rank's rows only.")


def _pair(value):
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)
