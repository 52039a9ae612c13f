"""Kohya's Deep Shrink: from a block on the way down on, a U-Net goes on with a smaller image; the way up makes it as
large as each skip. Called by unet.py, on whole images.

# B batch, C channels, H rows, W columns
"""

import functools

import torch.nn.functional as F

from ..protocol.specs import Shrink


class ShrinkBlocks:
    """The places of one U-Net, which it has hooks at. running() -> the ForwardContext that runs, if any."""

    def __init__(self, model, running):
        self._running, makers, readers = running, [model.conv_in], []
        for block in model.down_blocks:
            makers += [*(getattr(block, "attentions", None) or block.resnets), *(block.downsamplers or ())]
            readers += [*block.resnets, *(block.downsamplers or ())]
        for number, (maker, reader) in enumerate(zip(makers, [*readers, model.mid_block])):
            maker.forward = self._hook_skip(maker.forward, number)
            reader.forward = self._hook_reader(reader.forward, number)
        end = len(makers)
        for block in model.up_blocks:
            end -= len(block.resnets)
            block.forward = self._hook_way_up(block.forward, end - 1)

    def _shrunk(self, image_BCHW, number, is_after_skip):
        for given in self._given():
            if given.is_active and given.block == number and given.is_after_skip == is_after_skip:
                size = [round(length * (1.0 / given.factor)) for length in image_BCHW.shape[2:]]
                image_BCHW = F.interpolate(image_BCHW, size=size, mode=given.method)
        return image_BCHW

    def _given(self):
        context = self._running()
        return () if context is None else [given for given in context.free_u if isinstance(given, Shrink)]

    def _hook_skip(self, forward, number):
        """What is kept for the way up, and its size."""
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            output = forward(*args, **kwargs)
            if not self._given():
                return output
            image, *rest = output if isinstance(output, tuple) else (output,)
            image = self._shrunk(image, number, False)
            self._running().skip_sizes[number] = image.shape[2:]
            return (image, *rest) if isinstance(output, tuple) else image
        return hooked

    def _hook_reader(self, forward, number):
        """What goes on with what is kept."""
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            if not self._given():
                return forward(*args, **kwargs)
            return forward(self._shrunk(args[0], number, True), *args[1:], **kwargs)
        return hooked

    def _hook_way_up(self, forward, following):
        """It ends as large as the skip that follows."""
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            if self._given() and following >= 0:
                kwargs["upsample_size"] = self._running().skip_sizes[following]
            return forward(*args, **kwargs)
        return hooked


def as_large(hidden_BCHW, skip_BCHW, given):
    """The two, of which the first is made as large as the second where it has other rows, as ComfyUI's node asks."""
    if hidden_BCHW.shape[2] != skip_BCHW.shape[2]:
        hidden_BCHW = F.interpolate(hidden_BCHW, size=skip_BCHW.shape[2:], mode=given.back)
    return hidden_BCHW, skip_BCHW
