"""The numbers of layers in ComfyUI's quantised formats, and products with them, by the package comfy-kitchen, as
ComfyUI's own layers compute them (comfy.ops.mixed_precision_ops).

Called by layerwise_casting.py in every forward, by tensor_reader.py where a weight is unpacked once, and by
checkpoint.py.
"""

import dataclasses
import importlib.util
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...protocol.errors import CheckpointError
from ...protocol.op_registration import operator
from ...protocol.shared_memory import DTYPES, dtype_name
from .layer_formats import FORMATS, Layer

WITHOUT = ("float8_e4m3fn", "float8_e5m2")                     # which are unpacked where the package is not installed
LAYOUTS = {"float8_e4m3fn": "TensorCoreFP8Layout", "float8_e5m2": "TensorCoreFP8Layout",
           "nvfp4": "TensorCoreNVFP4Layout", "mxfp8": "TensorCoreMXFP8Layout",
           "int8_tensorwise": "TensorWiseINT8Layout", "convrot_w4a4": "TensorCoreConvRotW4A4Layout"}
ROWS = 2048                                                    # whose sums are in memory at once, in 32 bits
COMPUTED = (torch.float32, torch.float16, torch.bfloat16)      # types that the package's functions take


def is_installed():
    """Is comfy-kitchen installed?"""
    return importlib.util.find_spec("comfy_kitchen") is not None


def check(layers, file_name):
    """Raise CheckpointError where these layers need the package and it is not installed, or is too old."""
    needs = sorted({layer.format for layer in layers} - set(WITHOUT))
    if not needs:
        return
    if "mxfp8" in needs and not hasattr(torch, "float8_e8m0fnu"):
        raise CheckpointError(f"Use the bf16, fp8 or GGUF file of the same model: {file_name} holds weights in "
                              f"mxfp8, for which PyTorch 2.7 or newer is needed, and this is {torch.__version__}.")
    if is_installed():
        import comfy_kitchen.tensor
        needs = [format_ for format_ in needs if not hasattr(comfy_kitchen.tensor, LAYOUTS[format_])]
    if needs:
        raise CheckpointError(f"{file_name} holds weights in {' and '.join(needs)}, for which the package "
                              f"comfy-kitchen is needed, in the version of ComfyUI's requirements. Install with: "
                              f"python -m pip install -U comfy-kitchen (with ComfyUI's Python), and restart ComfyUI; "
                              f"or use the bf16, fp8 or GGUF file of the same model.")


def has_kernels():
    """Does comfy-kitchen compute with CUDA kernels of its own? They need CUDA 13, and a device."""
    return (torch.version.cuda is not None and int(torch.version.cuda.partition(".")[0]) >= 13
            and torch.cuda.is_available())


def choose_backends():
    """Have comfy-kitchen compute with what ComfyUI has it compute with: its CUDA kernels where it has them, and those
    in Triton are off."""
    import comfy_kitchen
    if not has_kernels():
        comfy_kitchen.disable_backend("cuda")
    comfy_kitchen.disable_backend("triton")


def multiplies(layer, device):
    """Is the layer multiplied in its own type on this device, with inputs that are rounded to it? As
    comfy.ops.pick_operations decides."""
    return is_installed() and (layer.rounds_inputs or not layer.exact and has_products(layer, device))


def has_products(layer, device):
    """Has the device products of the layer's type, and this PyTorch too?"""
    return device.type == "cuda" and _is_multiplied(layer.format, torch.cuda.get_device_capability(device))


def products_on(module, capabilities):
    """(may devices unpack the weight of an nn.Linear that is held packed, may they multiply it as it is?) Both, where
    they are unlike or not known.

    capabilities: of each device, (0, 0) of what is no CUDA card; None: not known. module: of
    quantised_weights.set_packed_parameters.
    """
    if module.rounds_inputs:
        return False, True
    if not module.format or module.is_exact or not is_installed():
        return True, False
    found = [(True, False) if capability is None else (_is_multiplied(module.format, capability),) * 2
             for capability in capabilities]
    return not all(sure for _, sure in found), any(may for may, _ in found)


def _is_multiplied(format_, capability):
    known = {"mxfp8": hasattr(F, "scaled_mm"), "nvfp4": hasattr(torch, "float4_e2m1fn_x2")}
    return torch.version.hip is None and known.get(format_, True) and capability >= FORMATS[format_].capability


def in_tiles(layer, auxiliary):
    """{what it is: tensor} beside some rows of a layer's weight, with scales of blocks in the order in which products
    read them: in tiles, which are filled up. The same where the layer has none."""
    if not layer.how.block:
        return auxiliary
    from comfy_kitchen.float_utils import to_blocked
    return auxiliary | {"weight_scale": to_blocked(auxiliary["weight_scale"], flatten=False)}


def without_names(layer):
    """The Layer without what tells it from others that are held alike: their blocks then have one graph."""
    return dataclasses.replace(layer, shape=(0, 0), auxiliary=dict.fromkeys(layer.auxiliary, ""))


def unpacked(layer, weight, auxiliary, dtype):
    """The numbers of rows of a layer's weight, in `dtype`. beside: {what it is: tensor} of these rows, in tiles."""
    if torch.compiler.is_compiling():                          # which knows no tensors of comfy-kitchen's
        return unpacked_weight(*_told(layer, auxiliary), weight, dtype_name(dtype))
    within = dtype if dtype in COMPUTED else torch.float32
    return quantised_tensor(layer, weight, auxiliary, within).dequantize().to(dtype)


def product(layer, weight, auxiliary, tensor, bias, inputs=None):
    """F.linear of a tensor and the weight, with inputs that are rounded. inputs: these, of `rounded_inputs`, where they
    are known. Others: as of `unpacked`."""
    if torch.compiler.is_compiling():
        return rounded_product(*_told(layer, auxiliary), weight, tensor, bias)
    within = _within(tensor)
    if inputs is None:
        inputs = _rows(tensor) if layer.rounds_inputs else rounded_inputs(layer, auxiliary, tensor)
    held = quantised_tensor(layer, weight, auxiliary, within)
    result = F.linear(inputs, held, None if bias is None else bias.to(within))
    return result.view(*tensor.shape[:-1], len(weight)).to(tensor.dtype)


def rounded_inputs(layer, auxiliary, tensor):
    """Inputs in the type of a layer whose products do not round them by themselves, as comfy-kitchen's tensor.
    beside: as of `unpacked`; without input_scale float8 takes 1, and nvfp4 that of the largest of these numbers."""
    import comfy_kitchen
    from comfy_kitchen.tensor import QuantizedTensor, get_layout_class
    name, rows, scale = LAYOUTS[layer.format], _rows(tensor), auxiliary.get("input_scale")
    if not layer.format.startswith("float8"):
        if layer.format == "nvfp4":
            scale = agreed_scale(tensor, lambda largest: largest) if scale is None else scale
            return QuantizedTensor.from_float(rows, name, scale=scale.view(()))
        return QuantizedTensor.from_float(rows, name)
    scale = torch.ones((), device=rows.device) if scale is None else scale.view(())
    params = get_layout_class(name).Params(scale=scale, orig_dtype=rows.dtype, orig_shape=tuple(rows.shape))
    return QuantizedTensor(comfy_kitchen.quantize_per_tensor_fp8(rows, scale, layer.how.held), name, params)


def agreed_scale(tensor, agree):
    """The input_scale of nvfp4 that is of the inputs of all ranks, each of which calls this, also with no tokens.
    Tokens that are no numbers, which stand in where a rank has none, do not count.

    agree(the largest of this rank's numbers, as one number) -> of those of all ranks.
    """
    from comfy_kitchen.float_utils import F4_E2M1_MAX, F8_E4M3_MAX
    rows = _rows(tensor)
    own = (torch.linalg.vector_norm(rows, math.inf, 1).nan_to_num_(0, math.inf).amax() if rows.numel()
           else rows.new_zeros(()))
    return (agree(own.float().view(1)).to(rows.dtype) / (F8_E4M3_MAX * F4_E2M1_MAX)).float()


def _within(tensor):
    """The type in which products of these inputs are computed."""
    return tensor.dtype if tensor.dtype in COMPUTED else torch.float32


def _rows(tensor):
    return tensor.reshape(-1, tensor.shape[-1]).to(_within(tensor))


def rotation(size, device):
    """{type of inputs: the matrix (size, size) by which ConvRot rotates so many of a row's numbers}; it is exact in
    each."""
    layer = Layer("int8_tensorwise", (size, size), {"weight_scale": ""}, size, size)
    scale = {"weight_scale": torch.ones(size, 1, device=device)}
    matrix = unpacked(layer, torch.eye(size, dtype=torch.int8, device=device), scale, torch.float32)
    return {dtype: matrix.T.to(dtype) for dtype in COMPUTED}


def shared_product(layer, weight, auxiliary, tensor, bias, agree, rotations=None):
    """`product` of the columns of an int8 weight, and of as many of each token's inputs, that a rank has. Inputs are
    rounded as if by one rank that had all of them.

    agree(the largest number of each of this rank's rows) -> of the rows of all ranks, each of which calls it.
    rotations: of `rotation`, where the layer is rotated: in groups of columns, which no rank has a part of.
    """
    rows = _rows(tensor)
    if layer.rotated:
        rows = (rows.view(len(rows), -1, layer.rotated) @ rotations[rows.dtype]).view_as(rows)
    scale = (agree(rows.abs().amax(1, keepdim=True).float()) / 127).clamp(min=1e-30)
    multiplied = scaled_product if torch.compiler.is_compiling() else _scaled_product
    result = multiplied(weight, auxiliary["weight_scale"], rows.contiguous(), scale)
    result = result if bias is None else result + bias.to(result.dtype)
    return result.view(*tensor.shape[:-1], len(weight)).to(tensor.dtype)


def _scaled_product(weight, weight_scale, rows, scale):
    """The product of int8 weights and of inputs that are rounded to int8. weight_scale: (1 or rows of the weight, 1),
    scale: (rows, 1), float32."""
    import comfy_kitchen
    result, weight_scale = rows.new_empty(len(rows), len(weight)), weight_scale.view(1, -1)
    for start in range(0, len(rows), ROWS):
        piece, of_piece = rows[start:start + ROWS], scale[start:start + ROWS]
        steps = of_piece.to(piece.dtype)
        steps = torch.where(steps == 0, torch.finfo(steps.dtype).tiny, steps)
        levels = (piece / steps).round_().clamp_(-128, 127).to(torch.int8)
        result[start:start + ROWS] = comfy_kitchen.mm_int8(levels, weight.T).float() * (of_piece * weight_scale)
    return result


def quantised_tensor(layer, weight, auxiliary, dtype):
    """comfy-kitchen's tensor of a weight, whose numbers are of `dtype`."""
    from comfy_kitchen.tensor import QuantizedTensor, get_layout_class
    name, scale = LAYOUTS[layer.format], auxiliary.get("weight_scale")
    shape = len(weight), weight.shape[1] * layer.how.numbers
    options = {}
    if scale is None:                                          # of a weight that was rounded to float8 as it is
        scale = torch.ones((), device=weight.device)
    elif layer.format == "nvfp4":
        options, scale = {"block_scale": scale.view(torch.float8_e4m3fn)}, auxiliary["weight_scale_2"].view(())
    elif layer.format == "mxfp8":
        scale = scale.view(torch.float8_e8m0fnu)
    elif layer.format == "convrot_w4a4":
        weight, scale = weight.view(torch.int8), scale.view(-1)
        options = {"convrot_groupsize": layer.rotated, "linear_dtype": layer.linear_dtype}
    elif layer.rotated:
        options = {"convrot": True, "convrot_groupsize": layer.rotated}
    elif scale.numel() == 1:
        scale = scale.view(())
    return QuantizedTensor(weight, name, get_layout_class(name).Params(scale=scale, orig_dtype=dtype, orig_shape=shape,
                                                                       **options))


# --- operators of compiled blocks: torch.compile looks into none of comfy-kitchen's tensors ---

def _told(layer, auxiliary):
    """(a Layer and what stands beside its weight in words, these tensors), as operators take them."""
    return " ".join((layer.format, str(layer.rotated), layer.linear_dtype, *auxiliary)), list(auxiliary.values())


def _heard(how, auxiliary):
    format_, rotated, linear_dtype, *names = how.split()
    given = dict(zip(names, auxiliary, strict=True))
    return Layer(format_, (0, 0), dict.fromkeys(given, ""), 0, int(rotated), linear_dtype=linear_dtype), given


@operator
def unpacked_weight(how: str, auxiliary: list[Tensor], weight: Tensor, dtype: str) -> Tensor:
    """`unpacked`. how, beside: of _told."""
    layer, given = _heard(how, auxiliary)
    return unpacked(layer, weight, given, DTYPES[dtype]).contiguous()


@unpacked_weight.register_fake
def _(how, auxiliary, weight, dtype):
    columns = weight.shape[1] * _heard(how, auxiliary)[0].how.numbers
    return weight.new_empty(weight.shape[0], columns, dtype=DTYPES[dtype])


@operator
def rounded_product(how: str, auxiliary: list[Tensor], weight: Tensor, tensor: Tensor, bias: Tensor | None) -> Tensor:
    """`product`. how, beside: of _told."""
    layer, given = _heard(how, auxiliary)
    return product(layer, weight, given, tensor, bias).contiguous()


@rounded_product.register_fake
def _(how, auxiliary, weight, tensor, bias):
    return tensor.new_empty(*tensor.shape[:-1], weight.shape[0])


@operator
def scaled_product(weight: Tensor, weight_scale: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
    """`_scaled_product`."""
    return _scaled_product(weight, weight_scale, rows, scale)


@scaled_product.register_fake
def _(weight, weight_scale, rows, scale):
    return rows.new_empty(rows.shape[0], weight.shape[0])
