"""A block's place in the model, and wrappers of forwards there. Used by transformer.py."""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch

from ..distributed import custom_ops
from ..distributed.collectives import all_gather, all_reduce
from .token_shards_io import has_placeholder


class StageEnd(Exception):
    """Leaves a forward after the last block of this rank's stage. message: for the next stage."""

    def __init__(self, message):
        super().__init__()
        self.message = message


@dataclass(frozen=True)
class BlockPosition:
    """A block's place in the model. list_: what the plan says of its list."""

    index: int                     # over all lists
    list_: Any
    number: int                    # in its list
    starts: bool                   # streams are cut before it
    ends: bool                     # and joined after it

    @property
    def control(self):
        """Where ControlNets and the like add something after it: names of places."""
        return [f"{name}.{self.number}" for name in (self.list_.control, self.list_.added) if name]

    @property
    def with_image(self):
        """The streams that are one tensor with the image's among what the block returns."""
        return next(streams for streams in self.list_.returns if "image" in streams)

    def cut(self, tokens, needs_text, tensor, argument):
        """This rank's part of an argument of the block, as a TokenArgument says (None: as it is). tokens: the
        forward's. needs_text: ModelPlan.needs_text."""
        if (argument is None or argument.ndim not in (None, tensor.ndim)
                or tensor.shape[argument.dim] == 1 != sum(map(tokens.held, argument.streams))):
            return tensor
        if self.has_placeholder(argument.streams, tokens, needs_text):
            return tensor.narrow(argument.dim, 0, 1)
        return tokens.take(tensor, argument.dim, argument.streams)

    def returned(self, shards):
        """What the block's forward returns. shards: {streams: tensor}."""
        outputs = tuple(shards[streams] for streams in self.list_.returns)
        return outputs if len(outputs) > 1 else outputs[0]

    def has_placeholder(self, streams, tokens, needs_text):
        """Has the block's tensor of these streams a token that stands in for them?"""
        return streams in self.list_.streams.values() and has_placeholder(streams, tokens, needs_text)


def _transposed(forward, place):
    """A block's forward whose hidden states are (T, B, C), of one whose are (B, T, C), or the other way round."""
    names = list(inspect.signature(forward).parameters)

    @functools.wraps(forward)
    def turned(*args, **kwargs):
        arguments = {**dict(zip(names, args)), **kwargs}
        output = forward(**arguments | {name: arguments[name].transpose(0, 1) for name in place.list_.streams})
        return tuple(each.transpose(0, 1) for each in output) if isinstance(output, tuple) else output.transpose(0, 1)
    return turned


def _inside(block, path):
    """A module inside a block, or the block itself; None where this block lacks it."""
    if path == ".":
        return block
    return functools.reduce(lambda parent, name: getattr(parent, name, None), path.split("."), block)


def places_of(context, streams, device):
    """(places of this rank's tokens of these streams, tokens of all), as ModelPlan.places says."""
    tokens, start, own = context.tokens, 0, []
    for stream in streams:
        sizes = tokens.shards(stream)
        first = start + sum(sizes[:tokens.shard]) + (context.first_token if stream == "image" else 0)
        own.append(torch.arange(first, first + sizes[tokens.shard], device=device))
        start += context.num_image_tokens if stream == "image" else tokens.held(stream)
    return torch.cat(own), start


def one_key_per_group(module, query_BNTH, key_BNTH):
    """Grouped queries: the keys (or values) before the module repeated them for the queries of each group. Classes of
    ComfyUI's with one matrix for all three say how often (n_rep)."""
    to_q, to_k = getattr(module, "to_q", None), getattr(module, "to_k", None)
    if key_BNTH.shape[1] != query_BNTH.shape[1]:
        return key_BNTH
    repeats = getattr(module, "n_rep", 1) if to_q is None or to_k is None else to_q.out_features // to_k.out_features
    return key_BNTH[:, ::max(1, repeats)]


def summed(forward, running):
    """A module's forward with a `total` argument that adds up its sums over the tokens of all ranks. running() -> the
    ForwardContext, if any."""
    @functools.wraps(forward)
    def with_total(*args, **kwargs):
        context = running()
        if context is None or context.mesh.sequence_degree == 1:
            return forward(*args, **kwargs)
        total = custom_ops.sequence_sum if torch.compiler.is_compiling() else _sum_of_ranks
        return forward(*args, **kwargs, total=total)
    return with_total


def _sum_of_ranks(part):
    context = custom_ops.RUNNING.get().context()
    return all_reduce([part], context.mesh.sequence_group, context.traffic)[0]


def place_edges(model, plan, running):
    """Have the modules after the blocks that read one row of the picture beyond a patch's read what its neighbours have
    given last. running: as `summed`'s."""
    for path, side in plan.boundary_halos.items():
        module = _inside(model, path)
        if module is not None:
            module.forward = _with_edges(module.forward, running, path, side)


def _with_edges(forward, running, path, side):
    """side: rows of the picture to a row of tokens."""
    @functools.wraps(forward)
    def edged(image_BCHW):
        context = running()
        if context is None or context.key_values is None:
            return forward(image_BCHW)
        above, below = context.key_values.neighbours(path, image_BCHW, side, context)
        if not above.shape[2] + below.shape[2]:
            return forward(image_BCHW)
        return forward(torch.cat([above, image_BCHW, below], 2)).narrow(2, above.shape[2], image_BCHW.shape[2])
    return edged


def with_halos(forward, running):
    """A module's forward that reads one row of the image beyond this rank's on either side. running: as `summed`'s."""
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
        # none at the picture's edges
        above, below = edges[:, :, :2 * rank][:, :, -1:], edges[:, :, 2 * rank + 2:][:, :, :1]
        return forward(torch.cat([above, image_BCHW, below], 2)).narrow(2, above.shape[2], num_rows)
    return haloed
