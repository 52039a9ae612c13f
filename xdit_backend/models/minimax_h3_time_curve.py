"""MiniMax H3's timestep embedding: the curve that published files may have, and the compute dtypes of modules."""

import torch
from torch import nn


class TimeCurve(nn.Module):
    """A tabulated timestep embedding: points of its curve from time 0 to 1, as coordinates of the space that it
    spans."""

    def __init__(self, points, width):
        super().__init__()
        self.register_buffer("table", torch.zeros(points, width))

    def forward(self, times):
        """(M,) -> (M, width), float32."""
        position = times.clamp(0, 1) * (len(self.table) - 1)
        before = position.floor().long().clamp(max=len(self.table) - 2)
        return torch.lerp(self.table[before], self.table[before + 1], (position - before)[:, None])


class ComputesIn:
    """Reports a module's compute dtype to diffusers' forward, where it is not that of its weights."""

    def __init__(self, dtype):
        self._dtype = dtype

    def get_hook(self, name):
        return self if name == "layerwise_casting" else None

    @property
    def compute_dtype(self):
        return self._dtype()
