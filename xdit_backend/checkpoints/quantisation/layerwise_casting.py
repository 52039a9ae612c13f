"""Weights that are held otherwise than a model computes, such as in float8, or quantised: cast where they are used, as
ComfyUI does it.

Placed by the loader on each rank, before the hooks.
"""

import functools
import weakref

import torch
import torch.nn.functional as F
from torch import nn

from . import kitchen_layers
from .layer_formats import Layer
from .quantised_weights import SCALED, unpacked


class Casts:
    """The weights of a model in the type it computes in, made where they are used, and some of them kept.

    A cast lives while its own module runs, and no module casts those of another. PipeFusion runs every module once for
    each patch: while `keep` holds, casts stay for the patches that follow, from the first module on, as far as there is
    room. Casting is exact in one direction, and who changes weights drops the casts, so nothing else changes.
    """

    def __init__(self):
        self._kept, self._spare_bytes = {}, None

    @property
    def are_cached(self):
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
        if self.are_cached and cast.nbytes <= self._spare_bytes and cast is not parameter:
            self._kept[key] = parameter, cast                  # the parameter, so that its id stays its own
            self._spare_bytes -= cast.nbytes
        return cast


class RoundedInputs:
    """The inputs that layers of a model rounded last, for the next layer that has the same and rounds them alike: of an
    attention's queries, keys and values. Kept no longer than the inputs live."""

    def __init__(self):
        self._inputs, self._how, self._rounded, self._users = None, None, None, set()

    def of(self, user, tensor, how, rounded):
        """`rounded()` of a tensor. user: the layer; each asks once for the same inputs. how: what tells how they are
        rounded."""
        if self._inputs is None or self._inputs() is not tensor or self._how != how or user in self._users:
            self._rounded, self._how, self._users = rounded(), how, set()
            self._inputs = weakref.ref(tensor, self._let_go)
        self._users.add(user)
        return self._rounded

    def _let_go(self, inputs):
        if inputs is self._inputs:
            self._inputs = self._rounded = None


def cast_at_use(model, dtype, casts, fast=False):
    """Let every module compute in `dtype` with parameters that are held in other types, and go on holding them so.

    casts: the model's Casts. What the hooks evaluate once a step is cast once. fast: multiply an nn.Linear that is held
    in float8_e4m3fn as it is, with inputs that are rounded to that, where the device can.
    """
    inputs = RoundedInputs()
    wide = getattr(model, "wide_modules", ())                  # which are given float32, and compute in it
    for path, module in model.named_modules():
        names = [name for name, parameter in module.named_parameters(recurse=False) if path not in wide
                 and parameter.is_floating_point() and parameter.dtype != dtype and not parameter.is_meta]
        if names:
            module.forward = (_linear(module, casts) if type(module) is nn.Linear
                              else _casting(module, names, dtype, casts))
        if fast and type(module) is nn.Linear and module.weight.dtype == torch.float8_e4m3fn and names:
            module.forward = _in_own_type(module, Layer("float8_e4m3fn", tuple(module.weight.shape), {}, 0), casts,
                                          inputs)


def unpack_at_use(model, packed, casts):
    """Let the nn.Linear whose weights are packed (quantised_weights.packed_weights) unpack them where they are used, or
    multiply them as they are."""
    inputs, rotations = RoundedInputs(), {}
    for name, how in packed.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        if module.weight.is_meta:
            continue
        add_at_use(module)
        module.forward = _linear(module, casts, _unpacking(module, how))
        if how.layer is not None:
            if how.layer.agreed == "each" and how.layer.rotated and how.layer.rotated not in rotations:
                rotations[how.layer.rotated] = kitchen_layers.rotation(how.layer.rotated, module.weight.device)
            module.forward = _in_own_type(module, how.layer, casts, inputs, rotations.get(how.layer.rotated))


def add_at_use(linear, up=None, down=None):
    """Have an nn.Linear whose weight is packed add the product of these to it, wherever it is unpacked;
    None: no more."""
    linear.register_buffer("weight_up", up, persistent=False)
    linear.register_buffer("weight_down", down, persistent=False)


def _in_own_type(module, layer, casts, inputs, rotations=None):
    """The forward of a layer of ComfyUI's quantised files: multiplied in its own type where the device does so, else
    unpacked by the forward that it has. inputs: RoundedInputs of the model. rotations: of kitchen_layers.rotation."""
    forward, layer = module.forward, kitchen_layers.without_names(layer)
    module.multiplies = kitchen_layers.multiplies(layer, module.weight.device)
    if module.multiplies:
        kitchen_layers.choose_backends()
    products = _Products(module, layer, inputs, rotations)

    @functools.wraps(forward)
    def linear(tensor):
        smoothing = getattr(module, "pre_quant_scale", None)
        if smoothing is not None:
            tensor = tensor * smoothing.to(tensor.dtype)
        # changed, in plain numbers
        if not module.multiplies or module.weight.dtype.itemsize > 1:
            return forward(tensor)
        if tensor.numel() == 0:
            products.pass_by(tensor)
            return forward(tensor)
        result = products.of(tensor, None if module.bias is None else casts.of(module.bias, tensor.dtype))
        up = getattr(module, "weight_up", None)
        if up is None:
            return result
        narrow = F.linear(tensor, module.weight_down.to(tensor.dtype)).flatten(0, -2)
        # in its place: what is wide as a feed-forward would be there three times
        result.view(-1, result.shape[-1]).addmm_(narrow, up.to(tensor.dtype).T)
        return result
    return linear


class _Products:
    """Products of a layer's weight in its own type. Of its module: `agree`, where ranks are to agree on what inputs are
    rounded by (parallel/amax_sync.py)."""

    def __init__(self, module, layer, inputs, rotations):
        self._module, self._layer, self._inputs, self._rotations = module, layer, inputs, rotations
        self._how = None                                       # what tells how inputs are rounded

    def of(self, tensor, bias):
        module, layer, agree = self._module, self._layer, getattr(self._module, "agree", None)
        auxiliary = _auxiliary(module, layer)
        if agree is not None and layer.agreed == "each":
            return kitchen_layers.shared_product(layer, module.weight, auxiliary, tensor, bias, agree, self._rotations)
        if torch.compiler.is_compiling():                      # a graph has no memory of other layers
            auxiliary = self._with_scale(tensor, auxiliary)
            return kitchen_layers.product(layer, module.weight, auxiliary, tensor, bias)
        known = None if layer.rounds_inputs else self._rounded(tensor, auxiliary)
        return kitchen_layers.product(layer, module.weight, auxiliary, tensor, bias, known)

    def pass_by(self, tensor):
        """Of no tokens: other ranks may have some; in a graph none has (Agreement.suits_graphs)."""
        if not torch.compiler.is_compiling() and self._agrees:
            self._rounded(tensor, _auxiliary(self._module, self._layer))

    @property
    def _agrees(self):
        return self._layer.agreed == "all" and getattr(self._module, "agree", None) is not None

    def _with_scale(self, tensor, auxiliary):
        if not self._agrees:
            return auxiliary
        return auxiliary | {"input_scale": kitchen_layers.agreed_scale(tensor, self._module.agree)}

    def _rounded(self, tensor, auxiliary):
        """The tensor as kitchen_layers.rounded_inputs gives it, or as another layer has had it; None of no tokens."""
        if self._how is None:
            scale = auxiliary.get("input_scale")
            self._how = self._layer.format, None if scale is None else scale.item()

        def rounded():
            scaled = self._with_scale(tensor, auxiliary)
            return kitchen_layers.rounded_inputs(self._layer, scaled, tensor) if tensor.numel() else None
        return self._inputs.of(self._module, tensor, self._how, rounded)


def _auxiliary(module, layer):
    return {name: getattr(module, name) for name in layer.auxiliary}


def _unpacking(module, how):
    """(weight, dtype) -> the numbers of the module's packed weight, with what a LoRA adds to them."""
    layer = None if how.layer is None or how.type in SCALED else kitchen_layers.without_names(how.layer)
    type_ = how.type

    def numbers(weight, dtype):
        if layer is not None:
            return kitchen_layers.unpacked(layer, weight, _auxiliary(module, layer), dtype)
        return unpacked(weight, type_, getattr(module, "weight_scale", None), dtype)

    def unpacked_weight(weight, dtype):
        if weight.dtype.itemsize > 1:                          # a changed weight, in plain numbers
            return weight.to(dtype)
        up = getattr(module, "weight_up", None)
        if up is None:
            return numbers(weight, dtype)
        sums = numbers(weight, torch.float32)
        return torch.addmm(sums, up, module.weight_down, out=sums).to(dtype)
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
