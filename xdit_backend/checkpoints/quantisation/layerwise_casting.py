"""Layerwise casting: weights stored in another type than the model computes in, such as float8, or quantised, are cast
at use, as in ComfyUI. The loader installs it on each rank, before the hooks."""

import functools
import weakref

import torch
import torch.nn.functional as F
from torch import nn

from . import kitchen_layers
from .layer_formats import Layer
from .quantised_weights import SCALED, unpacked


class Casts:
    """The weights of a model cast to the compute dtype at use, some of them cached.

    A cast exists while its own module runs, and no module casts another's weights. PipeFusion runs every module once
    per patch: after `keep`, casts are cached for the following patches, from the first module on, as far as memory
    allows. Casting is exact in one direction, and the casts are dropped when weights change, so nothing else changes.
    """

    def __init__(self):
        self._cached, self._spare_bytes = {}, None

    @property
    def are_cached(self):
        return self._spare_bytes is not None

    @property
    def num_bytes(self):
        """Bytes of the cached casts."""
        return sum(cast.nbytes for _, cast in self._cached.values())

    def keep(self, spare_bytes):
        """From now on, cache casts of up to spare_bytes; until `drop`."""
        self._spare_bytes = spare_bytes

    def drop(self):
        """Empty the cache and stop caching."""
        self._cached, self._spare_bytes = {}, None

    def of(self, parameter, dtype, cast_to=torch.Tensor.to):
        """The parameter in this dtype. cast_to(parameter, dtype) makes it."""
        if torch.compiler.is_compiling():                      # one graph serves all blocks
            return cast_to(parameter, dtype)
        key = id(parameter), dtype
        if key in self._cached:
            return self._cached[key][1]
        cast = cast_to(parameter, dtype)
        if self.are_cached and cast.nbytes <= self._spare_bytes and cast is not parameter:
            self._cached[key] = parameter, cast                # the parameter, so that its id is not reused
            self._spare_bytes -= cast.nbytes
        return cast


class RoundedInputs:
    """The most recently rounded inputs, reused by the next layer with the same inputs and rounding, such as an
    attention's queries, keys and values. Freed together with the inputs."""

    def __init__(self):
        self._inputs, self._how, self._rounded, self._users = None, None, None, set()

    def of(self, user, tensor, how, rounded):
        """`rounded()` of a tensor. user: the layer, which calls this once for the same inputs. how: identifies the
        rounding."""
        if self._inputs is None or self._inputs() is not tensor or self._how != how or user in self._users:
            self._rounded, self._how, self._users = rounded(), how, set()
            self._inputs = weakref.ref(tensor, self._let_go)
        self._users.add(user)
        return self._rounded

    def _let_go(self, inputs):
        if inputs is self._inputs:
            self._inputs = self._rounded = None


def cast_at_use(model, dtype, casts, fast=False):
    """Make every module compute in `dtype` while its parameters stay stored in other types.

    casts: the model's Casts. Layers that the hooks evaluate once per step are cast once. fast: multiply an nn.Linear
    stored in float8_e4m3fn without casting, with inputs rounded to float8, if the device supports it.
    """
    inputs = RoundedInputs()
    wide = getattr(model, "wide_modules", ())                  # their inputs and computation are float32
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
    """Make every nn.Linear with packed weights (quantised_weights.packed_weights) unpack them at use, or multiply them
    in their own format."""
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
    """Make an nn.Linear with a packed weight add the product up @ down to it whenever it is unpacked; None: nothing."""
    linear.register_buffer("weight_up", up, persistent=False)
    linear.register_buffer("weight_down", down, persistent=False)


def _in_own_type(module, layer, casts, inputs, rotations=None):
    """The forward of a quantised layer of a ComfyUI file: multiplied in its own format if the device supports it,
    otherwise unpacked by its current forward. inputs: RoundedInputs of the model. rotations: from
    kitchen_layers.rotation."""
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
        # a changed weight, in plain numbers
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
        # in place, since a feed-forward's wide output would otherwise exist three times
        result.view(-1, result.shape[-1]).addmm_(narrow, up.to(tensor.dtype).T)
        return result
    return linear


class _Products:
    """Matrix multiplications with a layer's weight in its own format. The module's `agree`, if set, agrees on the
    maximum of inputs among ranks (parallel/amax_sync.py)."""

    def __init__(self, module, layer, inputs, rotations):
        self._module, self._layer, self._inputs, self._rotations = module, layer, inputs, rotations
        self._how = None                                       # identifies the rounding of inputs

    def of(self, tensor, bias):
        module, layer, agree = self._module, self._layer, getattr(self._module, "agree", None)
        auxiliary = _auxiliary(module, layer)
        if agree is not None and layer.agreed == "each":
            return kitchen_layers.shared_product(layer, module.weight, auxiliary, tensor, bias, agree, self._rotations)
        if torch.compiler.is_compiling():                      # a graph does not reuse other layers' inputs
            auxiliary = self._with_scale(tensor, auxiliary)
            return kitchen_layers.product(layer, module.weight, auxiliary, tensor, bias)
        known = None if layer.rounds_inputs else self._rounded(tensor, auxiliary)
        return kitchen_layers.product(layer, module.weight, auxiliary, tensor, bias, known)

    def pass_by(self, tensor):
        """Handle a call without tokens: other ranks may have some; in a graph none has (Agreement.suits_graphs)."""
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
        """The result of kitchen_layers.rounded_inputs, or another layer's if it is the same; None without tokens."""
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
    """Function (weight, dtype) -> values of the module's packed weight, with a LoRA's terms added."""
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
        stored = {name: module._parameters[name] for name in names}
        module._parameters.update({name: casts.of(parameter, dtype) for name, parameter in stored.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(stored)
    return casting
