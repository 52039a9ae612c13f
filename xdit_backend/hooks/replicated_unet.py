"""Hooks on a U-shaped network that every rank runs whole: attention by the kernel that was asked for, blocks that are
compiled or whose weights come from host memory, and what ControlNets give.

As unet.py for U-Nets whose rows can be shared out. Installed once on a loaded model of a ReplicatedPlan.
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
    """The hooks of one such model on this rank, and the forward they serve now."""

    num_blocks = 0

    def __init__(self, model, plan, offloaded=None, on_compile=lambda done, total: None):
        """offloaded: the blocks whose weights come from host memory (offload/block_offload.py), if there are such.
        on_compile: of CompiledBlocks."""
        self.plan, self._model, self._context, self._offloaded = plan, model, None, offloaded
        assert not hasattr(model, "_has_hooks"), "this model has its hooks; placed twice, they would ask each other"
        model._has_hooks = True
        self.num_levels = plan.num_levels(model.config)
        self._num_places = len(plan.control(model.config))
        self._attention = AttentionFunctions(lambda: self._context, False)
        for module in model.modules():
            self._attention.function_overrides.place_in(module, COMFYUIS)
        blocks = list(map(model.get_submodule, unet_blocks(model)))
        self._compiled = CompiledBlocks(model, len(blocks), on_compile)
        for number, block in enumerate(blocks):
            block.forward = self._hook_block(block.forward, number)

    def run(self, context):
        """Run the model's forward as the context says. Returns (output of the forward, None), as Hooks does."""
        self._begin_blocks(1)
        with self._serving(context):
            return self._forward(context), None

    def run_in_turn(self, contexts):
        """As `run` for each of several forwards, of which all run a block before one runs the next: its weights come
        from host memory."""
        self._begin_blocks(len(contexts))
        forwards = [functools.partial(self._forward, context) for context in contexts]
        return [(output, None) for output in interleave(forwards, contexts, self._serving, True)]

    def own_control(self, control, context):
        """Of what a ControlNet gives, what this rank adds: all."""
        return control

    def _forward(self, context):
        inputs, control = context.inputs, context.control
        if control:                                            # of the list, the forward takes the last one first
            places = [f"input.{number}" for number in reversed(range(self._num_places))]
            taken = [control.take(place) if place in control else None for place in places]
            inputs = inputs | {"control": {"input": taken}}
        with running(self._attention):
            return self._model(**inputs, return_dict=False)[0]

    @contextmanager
    def _serving(self, context):
        """The model's forward runs as the context says while under this."""
        self._context = context
        try:
            yield
        finally:
            self._context = None

    def _begin_blocks(self, num_forwards):
        if self._offloaded is not None:
            self._offloaded.begin(range(len(self._compiled.blocks)), num_forwards)

    def _hook_block(self, forward, number):
        """A block, which the forward may run several times."""
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
