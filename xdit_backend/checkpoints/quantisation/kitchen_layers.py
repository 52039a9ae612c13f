"""Dequantisation of layers in ComfyUI's formats, and matrix multiplications with them, by the package comfy-kitchen, as
in ComfyUI's own layers (comfy.ops.mixed_precision_ops)."""

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

WITHOUT = ("float8_e4m3fn", "float8_e5m2")                     # formats that can be unpacked without the package
LAYOUTS = {"float8_e4m3fn": "TensorCoreFP8Layout", "float8_e5m2": "TensorCoreFP8Layout",
           "nvfp4": "TensorCoreNVFP4Layout", "mxfp8": "TensorCoreMXFP8Layout",
           "int8_tensorwise": "TensorWiseINT8Layout", "convrot_w4a4": "TensorCoreConvRotW4A4Layout",
           "asym_w4a8_int8": "AsymW4A8Int8Layout"}
ROWS = 2048                                                    # rows of int32 sums in memory at once
COMPUTED = (torch.float32, torch.float16, torch.bfloat16)      # dtypes that the package's functions support


def is_installed():
    """Whether comfy-kitchen is installed."""
    return importlib.util.find_spec("comfy_kitchen") is not None


def check(layers, file_name):
    """Raise CheckpointError if these layers need the package and it is not installed, or too old."""
    needs = sorted({layer.format for layer in layers} - set(WITHOUT))
    if not needs:
        return
    if "mxfp8" in needs and not hasattr(torch, "float8_e8m0fnu"):
        raise CheckpointError(f"Use the bf16, fp8 or GGUF file of the same model: {file_name} has weights in "
                              f"mxfp8, which need PyTorch 2.7 or newer, and this is {torch.__version__}.")
    if is_installed():
        import comfy_kitchen.tensor
        needs = [format_ for format_ in needs if not hasattr(comfy_kitchen.tensor, LAYOUTS[format_])]
    if needs:
        raise CheckpointError(f"Install or update comfy-kitchen: python -m pip install -U comfy-kitchen (with ComfyUI"
                              f"'s Python), and restart ComfyUI; or use the bf16, fp8 or GGUF file of the same model: "
                              f"{file_name} has weights in {' and '.join(needs)}, which need this package in the "
                              f"version of ComfyUI's requirements.")


def has_kernels():
    """Whether comfy-kitchen's CUDA kernels can run. They need CUDA 13 and a device."""
    return (torch.version.cuda is not None and int(torch.version.cuda.partition(".")[0]) >= 13
            and torch.cuda.is_available())


def choose_backends():
    """Select comfy-kitchen's backends as ComfyUI does: CUDA kernels if available, and none in Triton."""
    import comfy_kitchen
    if not has_kernels():
        comfy_kitchen.disable_backend("cuda")
    comfy_kitchen.disable_backend("triton")


def multiplies(layer, device):
    """Whether the layer is multiplied in its own format on this device, with rounded inputs, as
    comfy.ops.pick_operations decides."""
    return is_installed() and (layer.rounds_inputs or not layer.exact and has_products(layer, device))


def has_products(layer, device):
    """Whether the device and this PyTorch support matrix multiplications in the layer's format."""
    return device.type == "cuda" and _is_multiplied(layer.format, torch.cuda.get_device_capability(device))


def products_on(module, capabilities):
    """(whether devices may unpack the weight of a packed nn.Linear, whether they may multiply it as stored). Both are
    True if devices differ or are unknown.

    capabilities: of each device, (0, 0) if it is not a CUDA device; None: unknown. module: after
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
    """{auxiliary tensor: values} of some rows of a layer's weight, with block scales in the order in which kernels read
    them: in padded tiles. Unchanged if the layer has no blocks."""
    if not layer.how.block:
        return auxiliary
    from comfy_kitchen.float_utils import to_blocked
    return auxiliary | {"weight_scale": to_blocked(auxiliary["weight_scale"], flatten=False)}


def without_names(layer):
    """The Layer without its shape and tensor names, so that blocks with layers of equal format share a compiled
    graph."""
    return dataclasses.replace(layer, shape=(0, 0), auxiliary=dict.fromkeys(layer.auxiliary, ""))


def unpacked(layer, weight, auxiliary, dtype):
    """Values of rows of a layer's weight in `dtype`. auxiliary: {auxiliary tensor: values} of these rows, in tiles."""
    if torch.compiler.is_compiling():                          # comfy-kitchen's tensors cannot be traced
        return unpacked_weight(*_encoded(layer, auxiliary), weight, dtype_name(dtype))
    within = dtype if dtype in COMPUTED else torch.float32
    return quantised_tensor(layer, weight, auxiliary, within).dequantize().to(dtype)


def product(layer, weight, auxiliary, tensor, bias, inputs=None):
    """F.linear of a tensor and the weight, with rounded inputs. inputs: from `rounded_inputs`, if known. Others: as in
    `unpacked`."""
    if torch.compiler.is_compiling():
        return rounded_product(*_encoded(layer, auxiliary), weight, tensor, bias)
    within = _within(tensor)
    if inputs is None:
        inputs = _rows(tensor) if layer.rounds_inputs else rounded_inputs(layer, auxiliary, tensor)
    quantised = quantised_tensor(layer, weight, auxiliary, within)
    result = F.linear(inputs, quantised, None if bias is None else bias.to(within))
    return result.view(*tensor.shape[:-1], len(weight)).to(tensor.dtype)


def rounded_inputs(layer, auxiliary, tensor):
    """Inputs in the format of a layer whose matrix multiplication does not round them itself, as comfy-kitchen's
    tensor. auxiliary: as in `unpacked`; without input_scale float8 uses 1, and nvfp4 the scale of the inputs'
    maximum."""
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
    """The input_scale of nvfp4 for the inputs of all ranks. A collective: every rank calls this, also without tokens.
    NaN tokens, the placeholders of a rank without tokens, do not count.

    agree(maximum of this rank, one element) -> maximum of all ranks.
    """
    from comfy_kitchen.float_utils import F4_E2M1_MAX, F8_E4M3_MAX
    rows = _rows(tensor)
    own = (torch.linalg.vector_norm(rows, math.inf, 1).nan_to_num_(0, math.inf).amax() if rows.numel()
           else rows.new_zeros(()))
    return (agree(own.float().view(1)).to(rows.dtype) / (F8_E4M3_MAX * F4_E2M1_MAX)).float()


def _within(tensor):
    """The dtype in which products of these inputs are computed."""
    return tensor.dtype if tensor.dtype in COMPUTED else torch.float32


def _rows(tensor):
    return tensor.reshape(-1, tensor.shape[-1]).to(_within(tensor))


def rotation(size, device):
    """{dtype of inputs: the matrix (size, size) by which ConvRot rotates this many columns}; it is exact in each."""
    layer = Layer("int8_tensorwise", (size, size), {"weight_scale": ""}, size, size)
    scale = {"weight_scale": torch.ones(size, 1, device=device)}
    matrix = unpacked(layer, torch.eye(size, dtype=torch.int8, device=device), scale, torch.float32)
    return {dtype: matrix.T.to(dtype) for dtype in COMPUTED}


def shared_product(layer, weight, auxiliary, tensor, bias, agree, rotations=None):
    """`product` of a rank's columns of an int8 weight with its columns of the inputs, rounded as if one rank had all of
    them.

    agree(maximum of each of this rank's rows) -> maximum over the rows of all ranks, each of which calls it. rotations:
    from `rotation`, if the layer is rotated: in groups of columns, which are not split among ranks.
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
    """The product of int8 weights and inputs rounded to int8. weight_scale: (1 or rows of the weight, 1), scale: (rows,
    1), float32."""
    import comfy_kitchen
    result, weight_scale = rows.new_empty(len(rows), len(weight)), weight_scale.view(1, -1)
    for start in range(0, len(rows), ROWS):
        chunk, chunk_scale = rows[start:start + ROWS], scale[start:start + ROWS]
        steps = chunk_scale.to(chunk.dtype)
        steps = torch.where(steps == 0, torch.finfo(steps.dtype).tiny, steps)
        levels = (chunk / steps).round_().clamp_(-128, 127).to(torch.int8)
        result[start:start + ROWS] = comfy_kitchen.mm_int8(levels, weight.T).float() * (chunk_scale * weight_scale)
    return result


def quantised_tensor(layer, weight, auxiliary, dtype):
    """comfy-kitchen's tensor of a weight, with values of `dtype`."""
    from comfy_kitchen.tensor import QuantizedTensor, get_layout_class
    name, scale = LAYOUTS[layer.format], auxiliary.get("weight_scale")
    shape = len(weight), weight.shape[1] * layer.how.numbers
    options = {}
    if layer.group:
        scale, weight = auxiliary["weight_s_rel"], weight.view(torch.int8)
        options = {"s_channel": auxiliary["weight_s_channel"], "codebook": auxiliary.get("weight_codebook"),
                   "group_size": layer.group, "convrot_groupsize": layer.rotated}
    elif scale is None:                                        # a weight that was rounded to float8 without a scale
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


# --- custom ops for compiled blocks: torch.compile cannot trace comfy-kitchen's tensors ---

def _encoded(layer, auxiliary):
    """(text that encodes a Layer and the names of its auxiliary tensors, these tensors), as arguments of a custom
    op."""
    return (" ".join((layer.format, str(layer.rotated), layer.linear_dtype, str(layer.group), *auxiliary)),
            list(auxiliary.values()))


def _decoded(how, auxiliary):
    format_, rotated, linear_dtype, group, *names = how.split()
    tensors = dict(zip(names, auxiliary, strict=True))
    return Layer(format_, (0, 0), dict.fromkeys(tensors, ""), 0, int(rotated), linear_dtype=linear_dtype,
                 group=int(group)), tensors


@operator
def unpacked_weight(how: str, auxiliary: list[Tensor], weight: Tensor, dtype: str) -> Tensor:
    """`unpacked` as a custom op. how, auxiliary: from _encoded."""
    layer, tensors = _decoded(how, auxiliary)
    return unpacked(layer, weight, tensors, DTYPES[dtype]).contiguous()


@unpacked_weight.register_fake
def _(how, auxiliary, weight, dtype):
    columns = weight.shape[1] * _decoded(how, auxiliary)[0].how.numbers
    return weight.new_empty(weight.shape[0], columns, dtype=DTYPES[dtype])


@operator
def rounded_product(how: str, auxiliary: list[Tensor], weight: Tensor, tensor: Tensor, bias: Tensor | None) -> Tensor:
    """`product` as a custom op. how, auxiliary: from _encoded."""
    layer, tensors = _decoded(how, auxiliary)
    return product(layer, weight, tensors, tensor, bias).contiguous()


@rounded_product.register_fake
def _(how, auxiliary, weight, tensor, bias):
    return tensor.new_empty(*tensor.shape[:-1], weight.shape[0])


@operator
def scaled_product(weight: Tensor, weight_scale: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
    """`_scaled_product` as a custom op."""
    return _scaled_product(weight, weight_scale, rows, scale)


@scaled_product.register_fake
def _(weight, weight_scale, rows, scale):
    return rows.new_empty(rows.shape[0], weight.shape[0])
