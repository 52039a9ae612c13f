"""Base class of the hooks of a loaded model: it runs forwards, alone or interleaved, in their ForwardContext."""

import functools
from contextlib import contextmanager

from .compiled_blocks import CompiledBlocks
from .interleave import interleave


class ModelHooks:
    """The hooks of one model on this rank, and the context of the running forward.

    Subclasses install hooks in their constructor and define `_forward`.
    """

    num_blocks = 0                         # blocks that pipeline stages divide

    def __init__(self, model, plan, blocks, offloaded, on_compile):
        """blocks: the modules that are compiled and whose weights are streamed. offloaded: those with streamed weights
        (offload/block_offload.py), or None. on_compile: see CompiledBlocks.

        Subclasses take `splits` of the weights too, if they are sharded (checkpoints/tensor_sharding.py).
        """
        self.plan, self._model, self._context, self._offloaded = plan, model, None, offloaded
        assert not hasattr(model, "_has_hooks"), "the model has hooks already; a second set would call the first"
        model._has_hooks = True
        self._blocks = blocks
        self._compiled = CompiledBlocks(model, len(blocks), on_compile)

    def run(self, context):
        """Run the model's forward for a context. Every rank of the sequence axes, and of the displaced axis, calls it.

        Returns (output of the forward, None) on the last stage, else (None, message for the next stage, one flat
        tensor). With bands, the output is this rank's rows.
        """
        self._begin_blocks([context])
        with self.serving(context):
            return self._forward(context)

    def run_in_turn(self, contexts):
        """Run several forwards interleaved: during the all-reduces of one, the next computes; with streamed weights all
        run a block before any runs the next. Returns a list of `run`'s results."""
        self._begin_blocks(contexts)
        forwards = [functools.partial(self._forward, context) for context in contexts]
        return interleave(forwards, contexts, self.serving, self._offloaded is not None)

    @contextmanager
    def serving(self, context):
        """Context in which the model's forward runs for this ForwardContext."""
        self._context = context
        try:
            yield
        finally:
            self._context = None

    def _forward(self, context):
        """Run the model's forward within `serving`; returns what `run` returns."""
        raise NotImplementedError

    def own_control(self, control, context):
        """This rank's part of ControlNet residuals: all of them, if tokens and rows are not split."""
        return control

    def bands_of(self, exchange, num_rows, mesh):
        """ForwardContext.bands of a latent with so many rows; None if rows are not split."""
        return None

    def message_units(self, block):
        """Streams of each tensor in the message that one stage sends to the next before `block`."""
        return []

    def _blocks_of(self, context):
        """Numbers of the blocks that a forward runs."""
        return range(len(self._blocks))

    def _begin_blocks(self, contexts):
        if self._offloaded is not None:
            for context in contexts:
                context.weights_streamed = True
            self._offloaded.begin(self._blocks_of(contexts[0]), len(contexts))

    @contextmanager
    def _weights_resident(self, context, number):
        """Context in which a block runs and its streamed weights are on the device."""
        if self._offloaded is None:
            yield
            return
        self._offloaded.enter(number)
        yield
        self._offloaded.leave(number)
        if context is not None:
            context.end_block(number)
