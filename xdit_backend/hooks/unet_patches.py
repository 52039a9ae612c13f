"""U-Net patches of ComfyUI's nodes: FreeU, HyperTile, Deep Shrink, and ControlNet residuals.

# B batch or images, C channels, H rows, W columns; N heads, T tokens, H head size of attention
"""
import functools

import torch
import torch.nn.functional as F

from ..partition import halved
from ..protocol.specs import Shrink


def free_u(hidden_BCHW, skip_BCHW, given):
    """The two, as ComfyUI's nodes change them before they are joined; none is written to. given: a specs.FreeU."""
    scales = given.scales.get(str(hidden_BCHW.shape[1]))
    if scales is None:
        return hidden_BCHW, skip_BCHW
    strength, weakness = scales
    half = hidden_BCHW.shape[1] // 2
    if given.by_mean:                                          # its second version
        mean = hidden_BCHW.mean(1, keepdim=True)
        low, high = (chosen(mean, (2, 3), keepdim=True) for chosen in (torch.amin, torch.amax))
        strength = (strength - 1) * ((mean - low) / (high - low)) + 1
    hidden = torch.cat([hidden_BCHW[:, :half] * strength, hidden_BCHW[:, half:]], 1)
    return hidden, _without_low(skip_BCHW, weakness)


def _without_low(skip_BCHW, scale):
    """The four lowest frequencies times scale."""
    frequencies = torch.fft.fftshift(torch.fft.fftn(skip_BCHW.float(), dim=(-2, -1)), dim=(-2, -1))
    row, column = (length // 2 for length in skip_BCHW.shape[-2:])
    frequencies[..., row - 1:row + 1, column - 1:column + 1] *= scale
    return torch.fft.ifftn(torch.fft.ifftshift(frequencies, dim=(-2, -1)), dim=(-2, -1)).real.to(skip_BCHW.dtype)


def attend_in_tiles(tile, query_BNTH, key_BNTH, value_BNTH, attend):
    """What attend(query, key, value) gives for each tile by itself, (B, N, T, H). tile: of specs.Branch.tiles."""
    rows, columns, height, width = tile
    batch, heads, _, size = query_BNTH.shape
    grid = query_BNTH.view(batch, heads, rows, height, columns, width, size)
    tiled = grid.permute(0, 2, 4, 1, 3, 5, 6).reshape(batch * rows * columns, heads, height * width, size)
    runs = [each.unflatten(2, (rows * columns, -1)).transpose(1, 2).flatten(0, 1) for each in (key_BNTH, value_BNTH)]
    out = attend(tiled, *runs).reshape(batch, rows, columns, heads, height, width, size)
    return out.permute(0, 3, 1, 4, 2, 5, 6).reshape(query_BNTH.shape)


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
