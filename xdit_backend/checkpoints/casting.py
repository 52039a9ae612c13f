"""Weights that are held otherwise than a model computes, such as in float8, or quantised: cast where they are used, as
ComfyUI does it.

Placed by the loader on each rank, before the hooks.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from . import kitchen
from .layers import Layer
from .packed import SCALED, unpacked


class Casts:
    """The weights of a model in the type it computes in, made where they are used, and some of them kept.

    A cast lives while its own module runs, and no module casts those of another. PipeFusion runs every module once for
    each patch: while `keep` holds, casts stay for the patches that follow, from the first module on, as far as there is
    room. Casting is exact in one direction, and who changes weights drops the casts, so nothing else changes.
    """

    def __init__(self):
        self._kept, self._spare_bytes = {}, None

    @property
    def are_kept(self):
        return self._spare_bytes is not None

    @property
    def num_bytes(self):
        """Bytes of the casts that are kept."""
        return sum(cast.nbytes for _, cast in self._kept.values())

    def keep(self, spare_bytes):
        """From now on, keep casts of so many bytes; until `drop`."""
        self._spare_bytes = spare_bytes

    def drop(self):
        """Keep none any more."""
        self._kept, self._spare_bytes = {}, None

    def of(self, parameter, dtype, cast_to=torch.Tensor.to):
        """The parameter in this type. cast_to(parameter, dtype) makes it."""
        if torch.compiler.is_compiling():                      # a graph is of every block's
            return cast_to(parameter, dtype)
        key = id(parameter), dtype
        if key in self._kept:
            return self._kept[key][1]
        cast = cast_to(parameter, dtype)
        if self.are_kept and cast.nbytes <= self._spare_bytes and cast is not parameter:
            self._kept[key] = parameter, cast                  # the parameter, so that its id stays its own
            self._spare_bytes -= cast.nbytes
        return cast


def cast_at_use(model, dtype, casts, fast=False):
    """Let every module compute in `dtype` with parameters that are held in other types, and go on holding them so.

    casts: the model's Casts. What the hooks evaluate once a step is cast once. fast: multiply an nn.Linear that is held
    in float8_e4m3fn as it is, with inputs that are rounded to that, where the device can.
    """
    wide = getattr(model, "wide_modules", ())                  # which are given float32, and compute in it
    for path, module in model.named_modules():
        names = [name for name, parameter in module.named_parameters(recurse=False) if path not in wide
                 and parameter.is_floating_point() and parameter.dtype != dtype and not parameter.is_meta]
        if names:
            module.forward = (_linear(module, casts) if type(module) is nn.Linear
                              else _casting(module, names, dtype, casts))
        if fast and type(module) is nn.Linear and module.weight.dtype == torch.float8_e4m3fn and names:
            module.forward = _in_own_type(module, Layer("float8_e4m3fn", tuple(module.weight.shape), {}, 0), casts,
                                          module.forward)


def unpack_at_use(model, packed, casts):
    """Let the nn.Linear whose weights are packed (packed.packed_weights) unpack them where they are used, or multiply
    them as they are."""
    for name, how in packed.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        if module.weight.is_meta:
            continue
        add_at_use(module)
        module.forward = _linear(module, casts, _unpacking(module, how))
        if how.layer is not None:
            for buffer, tensor in kitchen.in_tiles(how.layer, _beside(module, how.layer)).items():
                setattr(module, buffer, tensor)
            module.forward = _in_own_type(module, how.layer, casts, module.forward)


def add_at_use(linear, up=None, down=None):
    """Have an nn.Linear whose weight is packed add the product of these to it, wherever it is unpacked;
    None: no more."""
    linear.register_buffer("weight_up", up, persistent=False)
    linear.register_buffer("weight_down", down, persistent=False)


def _in_own_type(module, layer, casts, forward):
    """The forward of a layer of ComfyUI's quantised files: multiplied in its own type where the device does so, else
    unpacked by `forward`."""
    multiplies, layer = kitchen.multiplies(layer, module.weight.device), kitchen.without_names(layer)
    if multiplies:
        kitchen.choose_backends()

    @functools.wraps(forward)
    def linear(tensor):
        smoothing = getattr(module, "pre_quant_scale", None)
        if smoothing is not None:
            tensor = tensor * smoothing.to(tensor.dtype)
        # changed, in plain numbers; or no tokens
        if not multiplies or module.weight.dtype.itemsize > 1 or tensor.numel() == 0:
            return forward(tensor)
        bias = None if module.bias is None else casts.of(module.bias, tensor.dtype)
        agree = getattr(module, "agree", None)                 # of tensor parallelism (parallel/tensor.py)
        if agree is None:
            result = kitchen.product(layer, module.weight, _beside(module, layer), tensor, bias)
        else:
            result = kitchen.shared_product(layer, module.weight, _beside(module, layer), tensor, bias, agree)
        up = getattr(module, "weight_up", None)
        if up is None:
            return result
        return result + F.linear(F.linear(tensor, module.weight_down.to(tensor.dtype)), up.to(tensor.dtype))
    return linear


def _beside(module, layer):
    return {name: getattr(module, name) for name in layer.beside}


def _unpacking(module, how):
    """(weight, dtype) -> the numbers of the module's packed weight, with what a LoRA adds to them."""
    layer = None if how.layer is None or how.type in SCALED else kitchen.without_names(how.layer)
    type_ = how.type

    def numbers(weight, dtype):
        if layer is not None:
            return kitchen.unpacked(layer, weight, _beside(module, layer), dtype)
        return unpacked(weight, type_, getattr(module, "weight_scale", None), dtype)

    def unpacked_weight(weight, dtype):
        if weight.dtype.itemsize > 1:                          # a changed weight, in plain numbers
            return weight.to(dtype)
        up = getattr(module, "weight_up", None)
        if up is None:
            return numbers(weight, dtype)
        return torch.addmm(numbers(weight, torch.float32), up, module.weight_down).to(dtype)
    return unpacked_weight


def _linear(module, casts, cast_to=torch.Tensor.to):
    @functools.wraps(module.forward)
    def linear(tensor):
        if tensor.numel() == 0:                                # text, after the first patch
            return tensor.new_empty((*tensor.shape[:-1], module.out_features))
        bias = None if module.bias is None else casts.of(module.bias, tensor.dtype)
        return F.linear(tensor, casts.of(module.weight, tensor.dtype, cast_to), bias)
    return linear


def _casting(module, names, dtype, casts):
    forward = module.forward

    @functools.wraps(forward)
    def casting(*args, **kwargs):
        held = {name: module._parameters[name] for name in names}
        module._parameters.update({name: casts.of(parameter, dtype) for name, parameter in held.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(held)
    return casting
