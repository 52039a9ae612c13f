"""MiniMax H3's times: the curve by which published files embed them, and the types that its modules compute in."""

import torch
from torch import nn


class TimeCurve(nn.Module):
    """What published files can have in the place of the embedding of times: points of its curve from time 0 to 1, as
    coordinates of what it spans."""

    def __init__(self, points, width):
        super().__init__()
        self.register_buffer("table", torch.zeros(points, width))

    def forward(self, times):
        """(M,) -> (M, width), float32."""
        place = times.clamp(0, 1) * (len(self.table) - 1)
        before = place.floor().long().clamp(max=len(self.table) - 2)
        return torch.lerp(self.table[before], self.table[before + 1], (place - before)[:, None])


class ComputesIn:
    """What diffusers' forward asks modules for the type that they compute in, where it is not that of their weights."""

    def __init__(self, dtype):
        self._dtype = dtype

    def get_hook(self, name):
        return self if name == "layerwise_casting" else None

    @property
    def compute_dtype(self):
        return self._dtype()
