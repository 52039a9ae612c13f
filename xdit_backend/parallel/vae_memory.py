"""Memory of a decode or encode by rows, determined on the meta device before it starts, and the block size that fits.
"""

import copy
import weakref
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..distributed.collectives import Traffic, all_gather
from ..memory.system_memory import available_memory
from ..partition import shard_sizes
from ..protocol.errors import ConfigError
from ..system import accelerator
from .vae_rows import SplitOptions, decode_rows, encode_rows, max_shards, split_dim

MARGIN = 1.1                   # factor on estimates: allocators round up, and libraries allocate workspaces
HEADROOM = 1.5                 # factor on estimates from which convolutions need no blocks, workspaces included
MIN_BLOCK_BYTES = 2 ** 25      # of input and output of one block; an eighth of all activations if that is more
MOST_TRIED = 16                # the largest size that fits is found to within this fraction of it
MIN_ROWS = 2                   # of the latent: reflection padding needs more than one row
CONVOLUTIONS = (torch.ops.aten.convolution, torch.ops.aten.conv2d, torch.ops.aten.conv3d)


class ActivationBytes(TorchDispatchMode):
    """While active, counts the memory of tensors that torch's operators return, until they are freed.

    Tensors that existed before and an operator's temporary memory are not counted. Also works on the meta device, where
    a complete decode takes a fraction of a second. `peak_bytes` is the maximum, `largest_row_bytes` the size of the
    input and output of one row (along row_dim) of the largest convolution, `num_convolutions` their number.
    """

    def __init__(self, row_dim=-2):
        super().__init__()
        self.row_dim = row_dim
        self.activation_bytes = self.peak_bytes = 0
        self.largest_row_bytes = self.num_convolutions = 0
        self._references = {}              # address of a storage -> number of live tensors that use it

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor, args)
        self.peak_bytes = max(self.peak_bytes, self.activation_bytes)
        if function.overloadpacket in CONVOLUTIONS:
            self._note_convolution(args[0], outputs)
        return outputs

    def _count(self, tensor, args):
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._references:
            inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
            if key in inputs:                                  # a view of what existed before
                return
            self._references[key] = 0
            self.activation_bytes += num_bytes
        self._references[key] += 1
        weakref.finalize(tensor, self._forget, key, num_bytes).atexit = False

    def _forget(self, key, num_bytes):
        self._references[key] -= 1
        if not self._references[key]:
            del self._references[key]
            self.activation_bytes -= num_bytes

    def _note_convolution(self, image, output):
        self.num_convolutions += 1
        input_bytes, output_bytes = (tensor.numel() * tensor.element_size() for tensor in (image, output))
        self.largest_row_bytes = max(self.largest_row_bytes, (input_bytes + output_bytes) // output.shape[self.row_dim])


class MemoryTraffic(TorchDispatchMode):
    """While active, counts the bytes that torch's operators read and write, and the halos that 3 x 3 convolutions would
    fetch from other ranks."""

    def __init__(self):
        super().__init__()
        self.moved_bytes = self.halo_bytes = self.exchanges = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if torch.is_tensor(output):
            if function.overloadpacket in CONVOLUTIONS:
                self.exchanges += args[1].shape[-1] > 1
                self.halo_bytes += (args[1].shape[-1] // 2) * args[0].nbytes // args[0].shape[-2]
            elif not output._is_view():
                self.exchanges += function.overloadpacket == torch.ops.aten.native_group_norm
                self.moved_bytes += 2 * output.nbytes
        return output


def work_of(meta_vae, shape, scale=1):
    """Work of decoding (scale 1) or encoding a tensor of this shape: {field of planner.vae_cost.Work: number}."""
    meta_input = torch.empty(shape, dtype=meta_vae.dtype, device="meta")
    with FlopCounterMode(display=False) as flops, MemoryTraffic() as moved:
        if scale == 1:
            decode_rows(meta_vae, meta_input)
        else:
            encode_rows(meta_vae, meta_input, scale)
    return {"flops": float(flops.get_total_flops()), "moved_bytes": float(moved.moved_bytes),
            "exchanges": float(moved.exchanges), "halo_bytes": float(moved.halo_bytes)}


@dataclass(frozen=True)
class Need:
    """Memory of the busiest rank, without the weights."""

    peak_bytes: int
    row_bytes: int                 # input and output of one row of the largest convolution
    num_convolutions: int          # number of calls of on_convolution


def meta_copy(vae):
    """Copy of a VAE on the meta device."""
    without_bytes = {id(tensor): type(tensor)(tensor.detach().to("meta"), False)
                     if isinstance(tensor, torch.nn.Parameter)
                     else tensor.to("meta") for tensor in (*vae.parameters(), *vae.buffers())}
    return copy.deepcopy(vae, without_bytes)


def need_of(meta_vae, shape, scale, num_ranks, unblocked=False, speeds=()):
    """The Need for decoding (scale 1) or encoding a tensor of this shape on this many ranks, from a run on the meta
    device.

    meta_vae: see meta_copy. scale: see encode_rows. unblocked: convolutions run in one block; otherwise in about eight,
    one of which is in peak_bytes. speeds: see SplitOptions.
    """
    shape = list(shape)
    dim = split_dim(meta_vae, shape, scale)
    own_size = max(shard_sizes(max_shards(shape, scale, dim), num_ranks, speeds, least=1))
    shape[dim] = 1 + own_size if dim == -3 else max(MIN_ROWS, own_size) * scale
    meta_input = torch.empty(shape, dtype=meta_vae.dtype, device="meta")
    num_rows = shape[dim] if scale == 1 else -(-shape[dim] // 8)
    convolutions = []
    blocked = {} if unblocked else {"dim": dim, "block_size": num_rows, "on_convolution": convolutions.append}
    options = SplitOptions(**blocked, on_frames=lambda share: None)            # frames leave the device as they finish
    with ActivationBytes(dim) as footprint:
        if scale == 1:
            decode_rows(meta_vae, meta_input, options=options)
        else:
            encode_rows(meta_vae, meta_input, scale, options=options)
    return Need(footprint.peak_bytes, footprint.largest_row_bytes,
                footprint.num_convolutions if unblocked else len(convolutions))


class RowPlanner:
    """Chooses how decode_rows and encode_rows run for one VAE, by size. Caches what it has computed for a size."""

    def __init__(self, vae):
        self._meta_vae, self._device, self._needs, self._work = meta_copy(vae), vae.device, {}, {}

    def plan(self, shape, scale, ranks, free_bytes, speeds=(), traffic=None):
        """Choose the block size to decode (scale 1) or encode with; returns (block_size, number of convolutions, speeds
        that determine each rank's rows: those passed, or () if only equal shares fit).

        Every rank calls it with the bytes that it may use, and all get the same result: block_size None, which is
        fastest, if convolutions fit unblocked, else the largest blocks that fit. Raises ConfigError on every rank if
        the busiest rank needs more than the least that a rank may use, naming the number of devices that would suffice.
        """
        free_bytes = least_free(free_bytes, ranks, self._device, traffic)
        num_ranks = self.num_working(shape, scale, ranks.count)
        speeds = speeds[:num_ranks]
        unblocked = self._need(shape, scale, num_ranks, True, speeds)
        if unblocked.peak_bytes * HEADROOM <= free_bytes:
            return None, unblocked.num_convolutions, speeds
        need = self._need(shape, scale, num_ranks, False, speeds)
        if need.peak_bytes * MARGIN > free_bytes and speeds:
            need, speeds = self._need(shape, scale, num_ranks), ()
        if need.peak_bytes * MARGIN > free_bytes:
            raise ConfigError(_does_not_fit(self._meta_vae, shape, scale, ranks.count, need, free_bytes))
        counted_bytes = need.peak_bytes // 8                   # the one block that is in the peak
        spare_bytes = int(free_bytes / MARGIN) - need.peak_bytes
        block_bytes = min(max(MIN_BLOCK_BYTES, counted_bytes), counted_bytes + spare_bytes)
        return max(1, block_bytes // need.row_bytes), need.num_convolutions, speeds

    def least_bytes(self, shape, scale, num_ranks):
        """Bytes that the busiest of these ranks must have free to decode or encode a tensor of this shape; with less,
        `plan` raises."""
        return int(self._need([1, *shape[1:]], scale, self.num_working(shape, scale, num_ranks)).peak_bytes * MARGIN)

    def unblocked_bytes(self, shape, scale, num_ranks):
        """Free bytes from which these ranks compute convolutions unblocked."""
        return int(self._need([1, *shape[1:]], scale, self.num_working(shape, scale, num_ranks), True).peak_bytes
                   * HEADROOM)

    def work(self, shape, scale):
        """Work of one item of a batch, see work_of."""
        shape = (1, *shape[1:])
        if (shape, scale) not in self._work:
            self._work[shape, scale] = work_of(self._meta_vae, shape, scale)
        return self._work[shape, scale]

    def num_working(self, shape, scale, num_ranks):
        """Number of these ranks that have rows to compute."""
        return min(num_ranks, max_shards(shape, scale, split_dim(self._meta_vae, shape, scale)))

    def _need(self, shape, scale, num_ranks, unblocked=False, speeds=()):
        key = (tuple(shape), scale, num_ranks, unblocked, speeds)
        if key not in self._needs:
            self._needs[key] = need_of(self._meta_vae, shape, scale, num_ranks, unblocked, speeds)
        return self._needs[key]


def _does_not_fit(meta_vae, shape, scale, num_ranks, need, free_bytes):
    what = (f"decoding a latent of {shape[-1]} x {shape[-2]}" if scale == 1
            else f"encoding {shape[-1]} x {shape[-2]} pixels")
    frames = f" and {shape[-3]} frames" if len(shape) == 5 else ""
    needed_bytes = need.peak_bytes * MARGIN
    # Memory is modelled as a constant plus a multiple of the rows.
    rows = max_shards(shape, scale, split_dim(meta_vae, shape, scale))
    own_rows = -(-rows // num_ranks)
    half = need_of(meta_vae, shape, scale, 2 * num_ranks)
    half_rows = -(-rows // (2 * num_ranks))
    row_bytes = (needed_bytes - half.peak_bytes * MARGIN) / max(1, own_rows - half_rows)
    rows_that_fit = own_rows - (needed_bytes - free_bytes) / row_bytes if row_bytes > 0 else 0
    largest = _largest_that_fits(meta_vae, shape, scale, num_ranks, free_bytes)
    hint = f"Use an image of at most {largest[0]} x {largest[1]} pixels" if largest else "Use a smaller image"
    if rows_that_fit >= 1:
        hint = f"{hint}, {-(-rows // int(rows_that_fit))} devices like these"
    return (f"{hint}, or VAE {'Decode' if scale == 1 else 'Encode'} (Tiled): {what}{frames} needs "
            f"{needed_bytes / 2**30:.1f} GB on each of {num_ranks} devices, and {free_bytes / 2**30:.1f} GB are free.")


def _largest_that_fits(meta_vae, shape, scale, num_ranks, free_bytes):
    """(width, height) in pixels of the largest image of about these proportions, with the same number of frames, that
    would fit; None if none does. Bisects the number of latent rows."""
    rows, columns = shape[-2] // scale, shape[-1] // scale
    fits, too_many = 0, rows
    while too_many - fits > max(1, fits // MOST_TRIED):
        tried = (fits + too_many) // 2
        sizes = [tried * scale, max(MIN_ROWS, columns * tried // rows) * scale]
        if need_of(meta_vae, [*shape[:-2], *sizes], scale, num_ranks).peak_bytes * MARGIN <= free_bytes:
            fits = tried
        else:
            too_many = tried
    if fits < MIN_ROWS:
        return None
    pixels = scale if scale > 1 else pixels_of(meta_vae, shape)
    return max(MIN_ROWS, columns * fits // rows) * pixels, fits * pixels


def pixels_of(meta_vae, shape):
    """Pixels along one side of a latent row, from a small decode."""
    meta_input = torch.empty((1, shape[1], *[1] * (len(shape) - 4), 8, 8), dtype=meta_vae.dtype, device="meta")
    return decode_rows(meta_vae, meta_input).tensor.shape[-2] // 8


def least_free(free_bytes, ranks, device, traffic=None):
    """The minimum over the ranks of the bytes that each may use; ranks on one device, or CPU workers on one machine,
    divide its free memory. Every rank calls it. traffic: counts the communication."""
    index = -1 if device.type == "cpu" else device.index or 0
    own = torch.tensor([[free_bytes, index]], dtype=torch.int64, device=device)
    everyone = all_gather(own, [1] * ranks.count, 0, ranks.first(ranks.count),
                          traffic or Traffic()) if ranks.count > 1 else own
    devices = list(zip(ranks.machines, everyone[:, 1].tolist(), strict=True))
    return min(free // devices.count(where) for free, where in zip(everyone[:, 0].tolist(), devices))


def free_bytes(device):
    """Bytes that this process may still use on a device; for CPUs the available system RAM, within a container's
    limit."""
    if device.type != "cpu":
        own = accelerator.module(device)
        free, _ = own.mem_get_info(device)
        return free + own.memory_reserved(device) - own.memory_allocated(device)
    return available_memory()[0]
