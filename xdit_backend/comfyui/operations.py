"""What ComfyUI's classes are built of: torch's own layers, with what these classes ask of ComfyUI's beside. Handed to
them as their `operations` by native_models.py."""

import torch


class RMSNorm(torch.nn.RMSNorm):
    """Has what comfy.ops.cast_bias_weight reads, by which blocks take the weight for a kernel of their own."""

    bias = None
    weight_function = bias_function = ()


class Embedding(torch.nn.Embedding):
    def forward(self, input, out_dtype=None):
        found = super().forward(input)
        return found if out_dtype is None else found.to(out_dtype)


def __getattr__(name):
    return getattr(torch.nn, name)
