"""Position of a block in its model, and wrappers for the forwards of blocks and of modules inside them."""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch

from ..distributed import custom_ops
from ..distributed.collectives import all_gather, all_reduce
from .token_shards_io import has_placeholder


class StageEnd(Exception):
    """Leaves a forward after the last block of this rank's stage. message: the tensor for the next stage."""

    def __init__(self, message):
        super().__init__()
        self.message = message


@dataclass(frozen=True)
class BlockPosition:
    """Position of a block in the model. list_: its BlockList of the plan."""

    index: int                     # over all lists
    list_: Any
    number: int                    # in its list
    starts: bool                   # whether streams are cut to shards before it
    ends: bool                     # whether they are joined after it

    @property
    def control(self):
        """Names of the insertion points after it, at which ControlNets and the like add residuals."""
        return [f"{name}.{self.number}" for name in (self.list_.control, self.list_.added) if name]

    @property
    def patched(self):
        """ComfyUI's name of the block in patches, for which ForwardContext.operations may have an operation."""
        return f"{self.list_.patched}_block.{self.number}"

    @property
    def path(self):
        """The block's path in ComfyUI's model, for which ForwardContext.operations may have a specs.Enhance."""
        return f"{self.list_.file_prefix}{self.number}"

    @property
    def with_image(self):
        """The streams that share a tensor with the image in the block's outputs."""
        return next(streams for streams in self.list_.returns if "image" in streams)

    def cut(self, tokens, needs_text, tensor, argument):
        """This rank's shard of an argument of the block. argument: its TokenArgument; None: not split. tokens: the
        forward's. needs_text: ModelPlan.needs_text."""
        if (argument is None or argument.ndim not in (None, tensor.ndim)
                or tensor.shape[argument.dim] == 1 != sum(map(tokens.held, argument.streams))):
            return tensor
        if self.has_placeholder(argument.streams, tokens, needs_text):
            return tensor.narrow(argument.dim, 0, 1)
        return tokens.take(tensor, argument.dim, argument.streams)

    def returned(self, shards):
        """The block's return value. shards: {streams: tensor}."""
        outputs = tuple(shards[streams] for streams in self.list_.returns)
        return outputs if len(outputs) > 1 else outputs[0]

    def has_placeholder(self, streams, tokens, needs_text):
        """True if the block's tensor of these streams is a placeholder token."""
        return streams in self.list_.streams.values() and has_placeholder(streams, tokens, needs_text)


def swap_batch_and_tokens(forward, position):
    """Wrap a block's forward to swap the first two dims of its hidden states, between (B, T, C) and (T, B, C)."""
    names = list(inspect.signature(forward).parameters)

    @functools.wraps(forward)
    def swapped(*args, **kwargs):
        arguments = {**dict(zip(names, args)), **kwargs}
        output = forward(**arguments | {name: arguments[name].transpose(0, 1) for name in position.list_.streams})
        return tuple(each.transpose(0, 1) for each in output) if isinstance(output, tuple) else output.transpose(0, 1)
    return swapped


def find_submodule(block, path):
    """A module inside a block, or the block itself for "."; None if this block lacks it."""
    if path == ".":
        return block
    return functools.reduce(lambda parent, name: getattr(parent, name, None), path.split("."), block)


def token_indices_of(context, streams, device):
    """(indices of this rank's tokens of these streams, (T,); number of all tokens), see ModelPlan.places."""
    tokens, start, own = context.tokens, 0, []
    for stream in streams:
        sizes = tokens.shards(stream)
        first = start + sum(sizes[:tokens.shard]) + (context.first_token if stream == "image" else 0)
        own.append(torch.arange(first, first + sizes[tokens.shard], device=device))
        start += context.num_image_tokens if stream == "image" else tokens.held(stream)
    return torch.cat(own), start


def one_key_per_group(module, query_BNTH, key_BNTH):
    """Undo the repetition of key (or value) heads that a module has done for grouped queries. The number of repeats is
    that of its linears, or n_rep of ComfyUI's classes with one linear for all three."""
    to_q, to_k = getattr(module, "to_q", None), getattr(module, "to_k", None)
    if key_BNTH.shape[1] != query_BNTH.shape[1]:
        return key_BNTH
    repeats = getattr(module, "n_rep", 1) if to_q is None or to_k is None else to_q.out_features // to_k.out_features
    return key_BNTH[:, ::max(1, repeats)]


def summed(forward, running):
    """Wrap a module's forward that sums over tokens: it gets a `total` argument, which adds up its sums over all ranks.
    running() -> the running ForwardContext, or None."""
    @functools.wraps(forward)
    def with_total(*args, **kwargs):
        context = running()
        if context is None or context.mesh.sequence_degree == 1:
            return forward(*args, **kwargs)
        total = custom_ops.sequence_sum if torch.compiler.is_compiling() else _sum_of_ranks
        return forward(*args, **kwargs, total=total)
    return with_total


def _sum_of_ranks(local):
    context = custom_ops.RUNNING.get().context()
    return all_reduce([local], context.mesh.sequence_group, context.traffic)[0]


def install_boundary_halos(model, plan, running):
    """Wrap the modules after the blocks that read one image row beyond a patch: they get the rows that the neighbouring
    patches had last. running: see `summed`."""
    for path, side in plan.boundary_halos.items():
        module = find_submodule(model, path)
        if module is not None:
            module.forward = _with_boundary_halos(module.forward, running, path, side)


def _with_boundary_halos(forward, running, path, side):
    """side: image rows per row of tokens."""
    @functools.wraps(forward)
    def with_neighbours(image_BCHW):
        context = running()
        if context is None or context.key_values is None:
            return forward(image_BCHW)
        above, below = context.key_values.neighbours(path, image_BCHW, side, context)
        if not above.shape[2] + below.shape[2]:
            return forward(image_BCHW)
        return forward(torch.cat([above, image_BCHW, below], 2)).narrow(2, above.shape[2], image_BCHW.shape[2])
    return with_neighbours


def with_halos(forward, running):
    """Wrap a module's forward that reads one image row beyond this rank's on either side. running: see `summed`."""
    @functools.wraps(forward)
    def haloed(image_BCHW):
        context = running()
        if context is None or context.mesh.sequence_degree == 1:
            return forward(image_BCHW)
        num_rows, rank, degree = image_BCHW.shape[2], context.mesh.sequence_rank, context.mesh.sequence_degree
        edges = torch.cat([image_BCHW[:, :, :1], image_BCHW[:, :, -1:]], 2)
        if torch.compiler.is_compiling():
            edges = custom_ops.sequence_rows(edges, degree)
        else:
            edges = all_gather(edges, [2] * degree, 2, context.mesh.sequence_group, context.traffic)
        # empty at the image's edges
        above, below = edges[:, :, :2 * rank][:, :, -1:], edges[:, :, 2 * rank + 2:][:, :, :1]
        return forward(torch.cat([above, image_BCHW, below], 2)).narrow(2, above.shape[2], num_rows)
    return haloed
