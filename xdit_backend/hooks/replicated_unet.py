"""Hooks on a U-shaped network that every rank runs unsplit: attention backend, compiled blocks, streamed weights and
ControlNet residuals. They are installed once on a loaded model of a ReplicatedPlan.
"""

import functools
import inspect

from ..distributed.custom_ops import running
from ..partition import unet_blocks
from .attention_dispatch import COMFYUIS, AttentionFunctions
from .model_hooks import ModelHooks


class ReplicatedHooks(ModelHooks):
    """The hooks of one such model on this rank."""

    def __init__(self, model, plan, splits=(), offloaded=None, on_compile=lambda done, total: None):
        """Arguments as of ModelHooks."""
        assert not splits, "U-shaped networks are not sharded"
        super().__init__(model, plan, list(map(model.get_submodule, unet_blocks(model))), offloaded, on_compile)
        self._num_points = len(plan.control(model.config))
        self._attention = AttentionFunctions(lambda: self._context, False)
        for module in model.modules():
            self._attention.function_overrides.install_if_used(module, COMFYUIS)
        for number, block in enumerate(self._blocks):
            block.forward = self._hook_block(block.forward, number)

    def _forward(self, context):
        inputs, control = context.inputs, context.patches.control
        if control:                                            # the forward pops residuals from the end of the list
            points = [f"input.{number}" for number in reversed(range(self._num_points))]
            taken = [control.take(point) if point in control else None for point in points]
            inputs = inputs | {"control": {"input": taken}}
        with running(self._attention):
            return self._model(**inputs, return_dict=False)[0], None

    def _hook_block(self, forward, number):
        """Hook a block, which the forward may run several times."""
        names = list(inspect.signature(forward).parameters)

        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            context = self._context
            if context is None:
                return forward(*args, **kwargs)
            with (self._weights_resident(context, number),
                  context.traffic.at_block(f"{number + 1} of {len(self._blocks)}")):
                if context.options.compile_backend:
                    return self._compiled.run(number, forward, context, {**dict(zip(names, args)), **kwargs})
                return forward(*args, **kwargs)
        return hooked
