"""Custom ops of compiled blocks, opaque to torch.compile: a graph contains their inputs and output shapes only.

They look up the running forward's context at run time, so that all blocks of a model share one graph.

# B batch, N heads, T tokens, H head size
"""

from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from ..protocol.op_registration import operator
from .collectives import all_gather, largest, start_all_reduce
from .spatial_ops import Padding, num_rows_read

# per thread, and per forward of those interleaved in it: an object with `context()`, the ForwardContext, and
# `attention_of_graph`, attention under that forward's parallel method; for a U-Net also `split_of_graph`, the
# StaleSplit of a layer of the running block by the layer's name in the block
RUNNING: ContextVar = ContextVar("xdit_running")


@contextmanager
def running(functions):
    """Context in which the custom ops use this object, see RUNNING."""
    before = RUNNING.set(functions)
    try:
        yield
    finally:
        RUNNING.reset(before)


@operator
def attention(query_BNTH: Tensor, key_BNTH: Tensor, value_BNTH: Tensor, mask: Tensor | None, name: str,
              is_causal: bool, scale: float | None) -> Tensor:
    """Scaled dot-product attention under the running forward's parallel method.

    name: of the attention in its block if its tokens may be sharded, else "".
    Returns (B, N, T, H) in the memory layout of (B, T, N, H), as models and CUDA kernels have it.
    """
    out = RUNNING.get().attention_of_graph(query_BNTH, key_BNTH, value_BNTH, mask, name, is_causal, scale)
    if out.data_ptr() in (query_BNTH.data_ptr(), key_BNTH.data_ptr(), value_BNTH.data_ptr()):
        out = out.clone()                                      # a custom op must not return an input
    return out.transpose(1, 2).contiguous().transpose(1, 2)


@attention.register_fake
def _(query_BNTH, key_BNTH, value_BNTH, mask, name, is_causal, scale):
    batch, num_heads, num_tokens, _ = query_BNTH.shape
    return query_BNTH.new_empty(batch, num_tokens, num_heads, value_BNTH.shape[3]).transpose(1, 2)


@operator
def chosen_output(tensor: Tensor, name: str) -> Tensor:
    """Output, shaped like the tensor, of a module with data-dependent control flow. name: of the module in its
    block."""
    return RUNNING.get().context().state.graph_breaks[name](tensor).contiguous()


@chosen_output.register_fake
def _(tensor, name):
    return tensor.new_empty(tensor.shape)


@operator
def tensor_sums(tensors: list[Tensor]) -> list[Tensor]:
    """Sum tensors over the tensor ranks, in one collective. Every rank of the tensor axis calls it."""
    context = RUNNING.get().context()
    own = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    sums = start_all_reduce(own, context.mesh.tensor_group, context.traffic)()
    return [each.clone() for each in sums] if len(sums) > 1 else sums          # several are views of one tensor


@tensor_sums.register_fake
def _(tensors):
    return [tensor.new_empty(tensor.shape) for tensor in tensors]


@operator
def largest_of_ranks(tensor: Tensor, axis: str) -> Tensor:
    """Element-wise maximum over the ranks of an axis, "tensor" or "sequence". Every rank of the axis calls it."""
    context = RUNNING.get().context()
    return largest(tensor.clone(memory_format=torch.contiguous_format), getattr(context.mesh, f"{axis}_group"),
                   context.traffic)


@largest_of_ranks.register_fake
def _(tensor, axis):
    return tensor.new_empty(tensor.shape)


@operator
def sequence_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over the sequence ranks. Every sequence rank calls it."""
    context = RUNNING.get().context()
    return start_all_reduce([tensor.clone(memory_format=torch.contiguous_format)], context.mesh.sequence_group,
                            context.traffic)()[0]


@sequence_sum.register_fake
def _(tensor):
    return tensor.new_empty(tensor.shape)


@operator
def sequence_rows(rows_BCHW: Tensor, degree: int) -> Tensor:
    """Concatenate the rows of all sequence ranks, which have equally many: (B, C, degree * H, W); of audio (B, C, T),
    (B, C, degree * T). Every sequence rank calls it."""
    context = RUNNING.get().context()
    return all_gather(rows_BCHW, [rows_BCHW.shape[2]] * degree, 2, context.mesh.sequence_group,
                      context.traffic).contiguous()


@sequence_rows.register_fake
def _(rows_BCHW, degree):
    batch, channels, rows, *columns = rows_BCHW.shape
    return rows_BCHW.new_empty(batch, channels, degree * rows, *columns)


@operator
def tensor_gathered(tensor: Tensor, sizes: list[int]) -> Tensor:
    """Concatenate the tensor ranks' tensors along the last dim. Every rank of the tensor axis calls it. sizes: of each
    rank."""
    context = RUNNING.get().context()
    return all_gather(tensor, sizes, tensor.ndim - 1, context.mesh.tensor_group, context.traffic).contiguous()


@tensor_gathered.register_fake
def _(tensor, sizes):
    return tensor.new_empty(*tensor.shape[:-1], sum(sizes))


@operator
def rows_around(rows_BCHW: Tensor, name: str, starts: list[int], rank: int, kernel: int, stride: int,
                padding: int) -> Tensor:
    """Rows that this rank's output rows of a convolution read: its own, halos of other ranks, and zeros beyond the
    image. name: of the layer in its block. starts: of the split, see spatial_ops.RowSplit."""
    around = RUNNING.get().split_of_graph(name).around(rows_BCHW, kernel, stride, Padding(padding, padding))
    return around.contiguous()


@rows_around.register_fake
def _(rows_BCHW, name, starts, rank, kernel, stride, padding):
    batch, channels, _, columns = rows_BCHW.shape
    num_rows = num_rows_read(starts, rank, kernel, stride, Padding(padding, padding))
    return rows_BCHW.new_empty(batch, channels, num_rows, columns)


@operator
def moments_change(moments_2BG: Tensor, name: str) -> Tensor:
    """Change from mean and biased variance of each group over this rank's rows to those over the image, (4, B, G): see
    StaleSplit.change. name: of the norm in its block."""
    return RUNNING.get().split_of_graph(name).change(moments_2BG)


@moments_change.register_fake
def _(moments_2BG, name):
    return moments_2BG.new_empty(4, *moments_2BG.shape[1:])
