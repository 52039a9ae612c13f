"""Weights quantised when they are loaded, stored in tensors of our own layout: int8 by torchao or, if that is not
installed, comfy-kitchen; nf4 by bitsandbytes."""

import importlib
import importlib.util

import torch
from torch import nn

from ...protocol.errors import CheckpointError, ConfigError
from ...protocol.op_registration import operator
from ...protocol.shared_memory import DTYPES, dtype_name

TYPES = {"int8": "INT8", "nf4": "NF4"}     # weight_dtype -> type
# packages for each type, in order of preference; no file has these types. ComfyUI installs comfy-kitchen.
PACKAGES = {"INT8": ("torchao", "comfy_kitchen"), "NF4": ("bitsandbytes",)}
# (elements, bytes) of a block of NF4: 32 bytes with two levels each, then their scale in float32
BLOCK = 64, 36


def is_installed(type_):
    """Whether a package for this type is installed."""
    return maker(type_) is not None


def maker(type_):
    """The installed package for this type; None if there is none."""
    return next((name for name in PACKAGES[type_] if importlib.util.find_spec(name) is not None), None)


def quantisation_of(weight_dtype, checkpoint):
    """A key of TYPES if the linear layers of a checkpoint are to be quantised when they are loaded, otherwise "".

    Raises ConfigError if they are quantised already, or the package is missing.
    """
    if weight_dtype not in TYPES:
        return ""
    if checkpoint.quantised:
        types = sorted({checkpoint.dtypes[name] for name in checkpoint.quantised})
        raise ConfigError("Set weight_dtype to default, which leaves weights as they are, or use the bf16 or fp16 "
                          f"file of the same model: weight_dtype {weight_dtype} would quantise {checkpoint.name} a "
                          f"second time, whose weights are {' and '.join(types)} already.")
    if not is_installed(TYPES[weight_dtype]):
        raise ConfigError(_what_to_install(TYPES[weight_dtype]))
    return weight_dtype


def quantised(weight, type_):
    """(numbers, scales) of a float32 matrix, on its device. INT8: int8 (rows, columns), float32 (rows, 1). NF4: blocks,
    uint8 (rows, columns / 64 * 36), and no scales."""
    if type_ == "INT8" and maker(type_) == "comfy_kitchen":
        library = _library("comfy_kitchen.tensor", type_)
        numbers, params = library.TensorWiseINT8Layout.quantize(weight, per_channel=True)
        return numbers, params.scale.view(-1, 1)
    if type_ == "INT8":
        library = _library("torchao.quantization", type_)
        linear = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        library.quantize_(linear, library.Int8WeightOnlyConfig())
        return linear.weight.qdata, linear.weight.scale
    levels, state = _library("bitsandbytes.functional", type_).quantize_4bit(
        weight.contiguous(), blocksize=BLOCK[0], quant_type="nf4")
    blocks = torch.cat([levels.view(-1, BLOCK[0] // 2), state.absmax.view(-1, 1).view(torch.uint8)], 1)
    return blocks.view(len(weight), -1), None


def dequantised(blocks, dtype):
    """Dequantised rows of NF4 blocks: uint8 (rows, bytes) -> (rows, columns) of `dtype`."""
    levels, factors = (part.contiguous() for part in blocks.reshape(-1, BLOCK[1]).split(
        [BLOCK[0] // 2, BLOCK[1] - BLOCK[0] // 2], 1))
    return nf4_numbers(levels, factors, dtype_name(dtype)).view(len(blocks), -1)


@operator
def nf4_numbers(levels: torch.Tensor, factors: torch.Tensor, dtype: str) -> torch.Tensor:
    """Values of each NF4 block, (blocks, elements). A custom op, since bitsandbytes can neither be traced by
    torch.compile nor run on fake tensors. levels, factors: uint8, contiguous."""
    library = _library("bitsandbytes.functional", "NF4")
    state = library.QuantState(factors.view(torch.float32).view(-1), torch.Size((len(levels), BLOCK[0])),
                               blocksize=BLOCK[0], quant_type="nf4", dtype=DTYPES[dtype])
    return library.dequantize_4bit(levels.view(-1, 1), state).contiguous()


@nf4_numbers.register_fake
def _(levels, factors, dtype):
    return levels.new_empty(len(levels), BLOCK[0], dtype=DTYPES[dtype])


def _library(module, type_):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CheckpointError(f"{_what_to_install(type_)} ({error})") from error


def _what_to_install(type_):
    name = next(name for name, of_name in TYPES.items() if of_name == type_)
    packages = [package.replace("_", "-") for package in PACKAGES[type_]]
    return (f"Install with: python -m pip install -U {packages[-1]} (with ComfyUI's Python), and restart ComfyUI; or "
            f"choose another weight_dtype: {name} needs the package {' or '.join(packages)}, which this Python does "
            "not have, or not for its PyTorch.")
