"""The seams: where a diffusers transformer's own, unmodified forward meets the parallel methods.

Placed once on a loaded model, as its plan says: tokens are cut to this rank's shard where they enter the blocks, attention
inside the listed modules is handed to a parallel method, and shards are joined after the last block.
"""

import functools
import inspect
from contextlib import contextmanager

import torch.nn.functional as F

from ..planner import check_shards
from ..protocol.errors import UnsupportedError
from .collectives import all_gather
from .mesh import SINGLE
from .tokens import Tokens
from .usp import usp_attention


class Seams:
    """The seams of one model on this rank, and the prediction they serve now."""

    def __init__(self, model, plan):
        self.plan = plan
        self._mesh, self._traffic, self._inputs, self._tokens, self._cuts = SINGLE, None, {}, None, {}
        blocks = [(block, list_) for list_ in plan.blocks for block in model.get_submodule(list_.name)]
        for index, (block, _) in enumerate(blocks):
            names = list(inspect.signature(block.forward).parameters)
            block.register_forward_pre_hook(functools.partial(self._cut, names, index == 0), with_kwargs=True)
            for name, streams in plan.attention.items():
                module = getattr(block, name, None)
                if module is not None:
                    module.forward = self._parallel_attention(module.forward, streams)
        blocks[-1][0].register_forward_hook(functools.partial(self._join, blocks[-1][1]))
        for name, (arguments, factor) in plan.exact.items():
            model.get_submodule(name).register_forward_pre_hook(functools.partial(self._unround, arguments, factor))

    @contextmanager
    def serving(self, mesh, traffic, inputs):
        """Run the model's forward with `inputs` under this to run it in parallel. Every rank of the sequence axes does."""
        self._mesh, self._traffic, self._inputs = mesh, traffic, inputs
        try:
            yield
        finally:
            self._mesh, self._traffic, self._inputs, self._tokens, self._cuts = SINGLE, None, {}, None, {}

    def _unround(self, arguments, factor, module, args):
        exact = [self._inputs[name] * factor for name in arguments if self._inputs.get(name) is not None]
        return (*exact, *args[len(exact):])

    def _cut(self, names, first, block, args, kwargs):
        if self._mesh.sequence_degree == 1:
            return None
        arguments = {**dict(zip(names, args)), **kwargs}
        if first:
            counts = {stream: arguments[name].shape[1] for name, stream in self.plan.streams.items()}
            check_shards(counts["image"], self._mesh.sequence_degree)
            self._tokens = Tokens(counts, self._mesh.sequence_degree, self._mesh.sequence_rank)
            for name, stream in self.plan.streams.items():
                arguments[name] = self._tokens.take(arguments[name], 1, (stream,)).contiguous()
        for name, argument in self.plan.tokens.items():
            if arguments.get(name) is not None:
                arguments[name] = self._cut_once(arguments[name], argument)
        return (), arguments

    def _cut_once(self, value, argument):
        """Cut an argument that every block gets anew, such as rotary tables, the first time it is seen."""
        if id(value) not in self._cuts:
            cut = tuple(self._tokens.take(item, argument.dim, argument.streams) for item in value) \
                if isinstance(value, (tuple, list)) else self._tokens.take(value, argument.dim, argument.streams)
            self._cuts[id(value)] = (value, cut)               # `value` is kept, so that its id stays its own
        return self._cuts[id(value)][1]

    def _join(self, list_, block, args, output):
        if self._mesh.sequence_degree == 1:
            return None
        outputs = list(output) if isinstance(output, tuple) else [output]
        index = list_.returns.index("image")
        outputs[index] = all_gather(outputs[index], self._tokens.sizes(("image",)), 1, self._mesh.sequence_group, self._traffic)
        return tuple(outputs) if isinstance(output, tuple) else outputs[0]

    def _parallel_attention(self, forward, streams):
        plain = F.scaled_dot_product_attention

        def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
            if attn_mask is not None or is_causal:
                raise UnsupportedError("This model masks its self-attention, which sequence parallelism does not support "
                                       "yet. Use cfg_degree instead of ulysses_degree and ring_degree.")
            sizes = self._tokens.sizes(streams)
            return usp_attention(query, key, value, sizes, self._mesh, plain, scale, self._traffic)

        @functools.wraps(forward)
        def scoped(*args, **kwargs):
            if self._mesh.sequence_degree == 1:
                return forward(*args, **kwargs)
            F.scaled_dot_product_attention = attention
            try:
                return forward(*args, **kwargs)
            finally:
                F.scaled_dot_product_attention = plain
        return scoped
