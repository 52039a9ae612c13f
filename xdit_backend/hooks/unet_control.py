"""Where ComfyUI's U-Net adds what a ControlNet gives: to the output of each block on the way down and of the middle
one, and to each skip where it is taken up. Called by unet.py; around compiled blocks, never in their graphs.
"""

import functools

from ..partition import halved


class ControlBlocks:
    """The places of one U-Net, which it has hooks at. running() -> the ForwardContext that runs, if any."""

    def __init__(self, model, skips, running):
        """skips: of UNetPlan."""
        self._running = running
        makers = [model.conv_in]
        for block in model.down_blocks:
            makers += [*(getattr(block, "attentions", None) or block.resnets), *(block.downsamplers or ())]
        assert len(makers) == len(skips)
        levels = [level for _, level in skips]
        self._levels = {f"{side}.{number}": level for side in ("input", "output")
                        for number, level in enumerate(levels)} | {"middle.0": levels[-1]}
        for number, module in enumerate(makers):
            module.forward = self._hook_output(module.forward, f"input.{number}")
        model.mid_block.forward = self._hook_output(model.mid_block.forward, "middle.0")
        end = len(skips)
        for block in model.up_blocks:
            start = end - len(block.resnets)
            block.forward = self._hook_skips(block.forward, [f"output.{number}" for number in range(start, end)])
            end = start

    def own(self, control, context):
        """Of what a ControlNet gives, {place: (B or 1, C, H, W)}, this rank's rows."""
        if context.bands is None:
            return control
        bands = {place: halved(context.bands, self._levels[place])[context.exchange.rank:][:2] for place in control}
        return {place: added[:, :, slice(*bands[place])] for place, added in control.items()}

    def _hook_output(self, forward, place):
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            output = forward(*args, **kwargs)
            if isinstance(output, tuple):
                return self._added(output[0], place), *output[1:]
            return self._added(output, place)
        return hooked

    def _hook_skips(self, forward, places):
        @functools.wraps(forward)
        def hooked(*args, res_hidden_states_tuple, **kwargs):
            skips = tuple(self._added(skip, place) for skip, place in zip(res_hidden_states_tuple, places))
            return forward(*args, res_hidden_states_tuple=skips, **kwargs)
        return hooked

    def _added(self, tensor_BCHW, place):
        """The tensor with what is to be added at this place."""
        context = self._running()
        if context is None or place not in context.control:
            return tensor_BCHW
        return (tensor_BCHW + context.control.take(place)).to(tensor_BCHW.dtype)
