"""The `operations` for ComfyUI's model classes: torch's layers, with the extensions of ComfyUI's that the classes
use."""

import torch


class RMSNorm(torch.nn.RMSNorm):
    """Has the attributes that comfy.ops.cast_bias_weight reads, which blocks with fused kernels call."""

    bias = None
    weight_function = bias_function = ()


class Embedding(torch.nn.Embedding):
    def forward(self, input, out_dtype=None):
        found = super().forward(input)
        return found if out_dtype is None else found.to(out_dtype)


def __getattr__(name):
    return getattr(torch.nn, name)
