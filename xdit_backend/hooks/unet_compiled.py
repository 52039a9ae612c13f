"""Convolutions and group norms on a rank's rows, for compiled blocks of a U-Net.

A graph contains this rank's numbers of rows as constants; other ranks' rows come from custom ops
(distributed/custom_ops.py), which look up the running forward.

# B batch, C channels, H rows, W columns, G groups of a norm
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..distributed.custom_ops import moments_change, rows_around
from ..parallel import displaced
from ..partition import halved


@dataclass(frozen=True)
class GraphRows:
    """Split of the rows at every level, which is the same for all latents of one size."""

    starts: tuple[tuple[int, ...], ...]    # for each level: first row of each rank, then the number of rows
    rank: int

    @classmethod
    def of(cls, context, num_levels):
        """For a forward; None if every rank has all rows."""
        if context.bands is None:
            return None
        return cls(tuple(halved(context.bands, level) for level in range(num_levels)), context.exchange.rank)

    def convolve(self, module, name, level, input_BCHW, weight, bias):
        """This rank's rows of a Conv2d's output. name: of the module in its block."""
        (backend, _), (stride, _), (padding, across) = module.kernel_size, module.stride, module.padding
        rows = rows_around(input_BCHW, name, self.starts[level], self.rank, backend, stride, padding)
        return F.conv2d(rows, weight, bias, module.stride, (0, across), module.dilation, module.groups)

    def norm(self, module, name, level, input_BCHW):
        """This rank's rows of a GroupNorm's output, for an image or for frames, (B, C, F, H, W). Moments and
        normalisation are float32, or float64 if the input is. name: of the module in its block."""
        wide = input_BCHW.to(torch.promote_types(input_BCHW.dtype, torch.float32))
        grouped = wide.reshape(wide.shape[0], module.num_groups, -1)
        if wide.numel():
            variance_BG, mean_BG = torch.var_mean(grouped, 2, correction=0)
        else:
            variance_BG = mean_BG = grouped.new_zeros(grouped.shape[:2])
        own = torch.stack([mean_BG, variance_BG])
        change = moments_change(own, name)
        mean_BG, variance_BG = displaced.corrected_moments(own, change[:2], change[2], change[3])
        normed = (grouped - mean_BG[..., None]) * (variance_BG[..., None] + module.eps).rsqrt()
        normed = normed.reshape(wide.shape)
        if module.weight is not None:
            weight, bias = (each.to(input_BCHW.dtype).to(wide.dtype).view(-1, *[1] * (wide.ndim - 2))
                            for each in (module.weight, module.bias))
            normed = normed * weight + bias
        return normed.to(input_BCHW.dtype)
