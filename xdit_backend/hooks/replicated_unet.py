"""Hooks on a U-shaped network that every rank runs unsplit: attention backend, compiled blocks, streamed weights and
ControlNet residuals. They are installed once on a loaded model of a ReplicatedPlan.
"""

import functools
import inspect
from contextlib import contextmanager

from ..distributed.custom_ops import running
from ..partition import unet_blocks
from .attention_dispatch import COMFYUIS, AttentionFunctions
from .compiled_blocks import CompiledBlocks
from .interleave import interleave


class ReplicatedHooks:
    """The hooks of one such model on this rank, and the context of the running forward."""

    num_blocks = 0

    def __init__(self, model, plan, offloaded=None, on_compile=lambda done, total: None):
        """offloaded: the blocks with streamed weights (offload/block_offload.py), or None. on_compile: see
        CompiledBlocks."""
        self.plan, self._model, self._context, self._offloaded = plan, model, None, offloaded
        assert not hasattr(model, "_has_hooks"), "the model has hooks already; a second set would call the first"
        model._has_hooks = True
        self.num_levels = plan.num_levels(model.config)
        self._num_points = len(plan.control(model.config))
        self._attention = AttentionFunctions(lambda: self._context, False)
        for module in model.modules():
            self._attention.function_overrides.install_if_used(module, COMFYUIS)
        blocks = list(map(model.get_submodule, unet_blocks(model)))
        self._compiled = CompiledBlocks(model, len(blocks), on_compile)
        for number, block in enumerate(blocks):
            block.forward = self._hook_block(block.forward, number)

    def run(self, context):
        """Run the model's forward for a context. Returns (output of the forward, None), like Hooks.run."""
        self._begin_blocks(1)
        with self._serving(context):
            return self._forward(context), None

    def run_in_turn(self, contexts):
        """Run several forwards interleaved: all run a block, whose weights are streamed, before any runs the next.
        Returns a list of `run`'s results."""
        self._begin_blocks(len(contexts))
        forwards = [functools.partial(self._forward, context) for context in contexts]
        return [(output, None) for output in interleave(forwards, contexts, self._serving, True)]

    def own_control(self, control, context):
        """This rank's part of ControlNet residuals: all."""
        return control

    def _forward(self, context):
        inputs, control = context.inputs, context.control
        if control:                                            # the forward pops residuals from the end of the list
            points = [f"input.{number}" for number in reversed(range(self._num_points))]
            taken = [control.take(point) if point in control else None for point in points]
            inputs = inputs | {"control": {"input": taken}}
        with running(self._attention):
            return self._model(**inputs, return_dict=False)[0]

    @contextmanager
    def _serving(self, context):
        """Context in which the model's forward runs for this ForwardContext."""
        self._context = context
        try:
            yield
        finally:
            self._context = None

    def _begin_blocks(self, num_forwards):
        if self._offloaded is not None:
            self._offloaded.begin(range(len(self._compiled.blocks)), num_forwards)

    def _hook_block(self, forward, number):
        """Hook a block, which the forward may run several times."""
        names = list(inspect.signature(forward).parameters)

        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            context = self._context
            if context is None:
                return forward(*args, **kwargs)
            if self._offloaded is not None:
                self._offloaded.enter(number)
            with context.traffic.at_block(f"{number + 1} of {len(self._compiled.blocks)}"):
                output = (self._compiled.run(number, forward, context, {**dict(zip(names, args)), **kwargs})
                          if context.compile_backend else forward(*args, **kwargs))
            if self._offloaded is not None:
                self._offloaded.leave(number)
                context.end_block(number)
            return output
        return hooked
