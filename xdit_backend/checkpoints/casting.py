"""Weights that are held in another type than a model computes in, such as float8: cast where they are used, as ComfyUI does it.

Placed by the loader on each rank, before the hooks.
"""

import functools

import torch.nn.functional as F
from torch import nn


def cast_at_use(model, dtype):
    """Let every module compute in `dtype` with parameters that are held in other types, and go on holding them so.

    A cast lives while its own module runs; no module casts those of another. What the hooks evaluate once a step is cast once.
    """
    for module in model.modules():
        names = [name for name, parameter in module.named_parameters(recurse=False)
                 if parameter.is_floating_point() and parameter.dtype != dtype and not parameter.is_meta]
        if names:
            module.forward = _linear(module) if type(module) is nn.Linear else _casting(module, names, dtype)


def _linear(module):
    @functools.wraps(module.forward)
    def linear(tensor):
        if tensor.numel() == 0:                                # text, after the first patch
            return tensor.new_empty((*tensor.shape[:-1], module.out_features))
        bias = None if module.bias is None else module.bias.to(tensor.dtype)
        return F.linear(tensor, module.weight.to(tensor.dtype), bias)
    return linear


def _casting(module, names, dtype):
    forward = module.forward

    @functools.wraps(forward)
    def casting(*args, **kwargs):
        held = {name: module._parameters[name] for name in names}
        module._parameters.update({name: parameter.to(dtype) for name, parameter in held.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(held)
    return casting
