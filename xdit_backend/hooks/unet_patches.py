"""U-Net patches of ComfyUI's nodes: ControlNet residuals, Deep Shrink, HyperTile, FreeU and blurred queries.

# B batch or images, C channels, H rows, W columns; N heads, T tokens, H head size of attention
"""
import functools
import math

import torch
import torch.nn.functional as F

from ..partition import halved
from ..protocol.specs import Shrink


class ControlBlocks:
    """Hooks that add ControlNet residuals to a U-Net's skips and middle block. Insertion points have ComfyUI's names,
    "input.4", "middle.0" or "output.4"."""

    def __init__(self, model, skips, running):
        """skips: of UNetPlan. running() -> the running ForwardContext, or None."""
        self._running = running
        outputs = _skip_outputs(model)
        assert len(outputs) == len(skips)
        levels = [level for _, level in skips]
        self._levels = {f"{side}.{number}": level for side in ("input", "output")
                        for number, level in enumerate(levels)} | {"middle.0": levels[-1]}
        for number, module in enumerate(outputs):
            module.forward = self._hook_output(module.forward, f"input.{number}")
        model.mid_block.forward = self._hook_output(model.mid_block.forward, "middle.0")
        end = len(skips)
        for block in model.up_blocks:
            start = end - len(block.resnets)
            block.forward = self._hook_skips(block.forward, [f"output.{number}" for number in range(start, end)])
            end = start

    def own(self, control, context):
        """This rank's rows of a ControlNet's output. control: {insertion point: (B or 1, C, H, W)}."""
        if context.bands is None:
            return control
        bands = {point: halved(context.bands, self._levels[point])[context.exchange.rank:][:2] for point in control}
        return {point: residual[:, :, slice(*bands[point])] for point, residual in control.items()}

    def _hook_output(self, forward, point):
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            output = forward(*args, **kwargs)
            if isinstance(output, tuple):
                return self._added(output[0], point), *output[1:]
            return self._added(output, point)
        return hooked

    def _hook_skips(self, forward, points):
        @functools.wraps(forward)
        def hooked(*args, res_hidden_states_tuple, **kwargs):
            skips = tuple(self._added(skip, point) for skip, point in zip(res_hidden_states_tuple, points))
            return forward(*args, res_hidden_states_tuple=skips, **kwargs)
        return hooked

    def _added(self, tensor_BCHW, point):
        """The tensor plus the residual of this insertion point, if any."""
        context = self._running()
        if context is None or point not in context.patches.control:
            return tensor_BCHW
        return (tensor_BCHW + context.patches.control.take(point)).to(tensor_BCHW.dtype)


class ShrinkBlocks:
    """Hooks of Deep Shrink on a U-Net (specs.Shrink): images are made smaller after a skip connection's output, or
    between it and the next module."""

    def __init__(self, model, running):
        """running() -> the running ForwardContext, or None."""
        self._running, readers = running, []
        for block in model.down_blocks:
            readers += [*block.resnets, *(block.downsamplers or ())]
        outputs = _skip_outputs(model)
        for number, (module, reader) in enumerate(zip(outputs, [*readers, model.mid_block])):
            module.forward = self._hook_skip(module.forward, number)
            reader.forward = self._hook_reader(reader.forward, number)
        end = len(outputs)
        for block in model.up_blocks:
            end -= len(block.resnets)
            block.forward = self._hook_up_block(block.forward, end - 1)

    def _hook_skip(self, forward, number):
        """Shrink the output of a module that is also a skip, and record the skip's size."""
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            output = forward(*args, **kwargs)
            if not self._settings():
                return output
            image, *rest = output if isinstance(output, tuple) else (output,)
            image = self._shrunk(image, number, False)
            self._running().state.skip_sizes[number] = image.shape[2:]
            return (image, *rest) if isinstance(output, tuple) else image
        return hooked

    def _hook_reader(self, forward, number):
        """Shrink the input of the module after a skip, but not the skip."""
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            if not self._settings():
                return forward(*args, **kwargs)
            return forward(self._shrunk(args[0], number, True), *args[1:], **kwargs)
        return hooked

    def _hook_up_block(self, forward, following):
        """Upsample the output of an up block to the size of the next block's first skip, of number `following`."""
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            if self._settings() and following >= 0:
                kwargs["upsample_size"] = self._running().state.skip_sizes[following]
            return forward(*args, **kwargs)
        return hooked

    def _settings(self):
        context = self._running()
        return () if context is None else [each for each in context.patches.free_u if isinstance(each, Shrink)]

    def _shrunk(self, image_BCHW, number, is_after_skip):
        for shrink in self._settings():
            if shrink.is_active and shrink.block == number and shrink.is_after_skip == is_after_skip:
                size = [round(length * (1.0 / shrink.factor)) for length in image_BCHW.shape[2:]]
                image_BCHW = F.interpolate(image_BCHW, size=size, mode=shrink.method)
        return image_BCHW


def _skip_outputs(model):
    """The modules of diffusers' U-Net whose outputs are its skips, in order."""
    modules = [model.conv_in]
    for block in model.down_blocks:
        modules += [*(getattr(block, "attentions", None) or block.resnets), *(block.downsamplers or ())]
    return modules


def as_large(hidden_BCHW, skip_BCHW, shrink):
    """(hidden, skip) before they are joined, with Deep Shrink: hidden is resized to the skip's size if their numbers of
    rows differ. shrink: a specs.Shrink."""
    if hidden_BCHW.shape[2] != skip_BCHW.shape[2]:
        hidden_BCHW = F.interpolate(hidden_BCHW, size=skip_BCHW.shape[2:], mode=shrink.back)
    return hidden_BCHW, skip_BCHW


def free_u(hidden_BCHW, skip_BCHW, settings):
    """(hidden, skip) before they are joined, changed as by ComfyUI's FreeU nodes, not in place. settings: a
    specs.FreeU."""
    scales = settings.scales.get(str(hidden_BCHW.shape[1]))
    if scales is None:
        return hidden_BCHW, skip_BCHW
    strength, weakness = scales
    half = hidden_BCHW.shape[1] // 2
    if settings.by_mean:                                       # FreeU_V2
        mean = hidden_BCHW.mean(1, keepdim=True)
        low, high = (chosen(mean, (2, 3), keepdim=True) for chosen in (torch.amin, torch.amax))
        strength = (strength - 1) * ((mean - low) / (high - low)) + 1
    hidden = torch.cat([hidden_BCHW[:, :half] * strength, hidden_BCHW[:, half:]], 1)
    return hidden, _scale_low_frequencies(skip_BCHW, weakness)


def _scale_low_frequencies(skip_BCHW, scale):
    """Multiply the four lowest frequencies by scale."""
    frequencies = torch.fft.fftshift(torch.fft.fftn(skip_BCHW.float(), dim=(-2, -1)), dim=(-2, -1))
    row, column = (length // 2 for length in skip_BCHW.shape[-2:])
    frequencies[..., row - 1:row + 1, column - 1:column + 1] *= scale
    return torch.fft.ifftn(torch.fft.ifftshift(frequencies, dim=(-2, -1)), dim=(-2, -1)).real.to(skip_BCHW.dtype)


def blurred(query_BNTH, blur):
    """Queries of all tokens of an image for Smoothed Energy Guidance (Hong 2024, arXiv 2408.00760). blur: a
    specs.Blur."""
    batch, heads, tokens, size = query_BNTH.shape
    if blur.sigma < 0:
        return query_BNTH.mean(2, keepdim=True).expand_as(query_BNTH)
    aspect = blur.columns / blur.rows
    rows = round((tokens / aspect) ** 0.5) if aspect >= 1 else tokens // round((tokens * aspect) ** 0.5)
    image = query_BNTH.transpose(2, 3).reshape(batch, heads * size, rows, -1)
    columns = image.shape[3]
    taps = min(math.ceil(6 * blur.sigma) // 2 * 2 + 1, columns + 1 - columns % 2)     # an odd number
    offsets = torch.arange(taps, device=image.device) - taps // 2
    weights = torch.exp(-0.5 * (offsets / blur.sigma) ** 2)
    weights = (weights / weights.sum()).to(image.dtype)
    kernel = (weights[:, None] * weights).expand(image.shape[1], 1, -1, -1)
    image = F.conv2d(F.pad(image, [taps // 2] * 4, mode="reflect"), kernel, groups=image.shape[1])
    return image.reshape(batch, heads, size, tokens).transpose(2, 3)


def attend_in_tiles(tile, query_BNTH, key_BNTH, value_BNTH, attend):
    """HyperTile: attention within each tile of the image, (B, N, T, H). tile: of specs.Branch.tiles.
    attend(query, key, value) -> like query."""
    rows, columns, height, width = tile
    batch, heads, _, size = query_BNTH.shape
    grid = query_BNTH.view(batch, heads, rows, height, columns, width, size)
    tiled = grid.permute(0, 2, 4, 1, 3, 5, 6).reshape(batch * rows * columns, heads, height * width, size)
    runs = [each.unflatten(2, (rows * columns, -1)).transpose(1, 2).flatten(0, 1) for each in (key_BNTH, value_BNTH)]
    out = attend(tiled, *runs).reshape(batch, rows, columns, heads, height, width, size)
    return out.permute(0, 3, 1, 4, 2, 5, 6).reshape(query_BNTH.shape)
