"""Scaled float8 as ComfyUI's files mark it: which weights have a scale, and where it stands. Used by checkpoint.py.

The older mark is a tensor `scaled_fp8`, with `scale_weight` beside each scaled weight; the newer is JSON for each
layer, in a tensor `comfy_quant` or in the metadata, with `weight_scale` beside the weight. ComfyUI's
comfy.utils.convert_old_quants and comfy.ops say so.
"""

import json
import math

from ..protocol.errors import CheckpointError

FLOAT8 = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
BESIDE = ("comfy_quant", "scale_weight", "weight_scale", "scale_input", "input_scale")
# ends of names -> whose quantisation has them, which xDiT does not read
UNKNOWN = {".weight_scale_2": "nvfp4", ".pre_quant_scale": "ModelOpt's with smoothed inputs",
           ".weight_scale_inv": "scales of tiles",
           ".absmax": "bitsandbytes", ".quant_map": "bitsandbytes", ".qweight": "GPTQ, AWQ or SVDQuant",
           ".qzeros": "GPTQ or AWQ"}


def scales_of(shapes, dtypes, metadata, read, file_name, prefix=""):
    """({name of a weight: name of its scale}, names that are no weights of the model). read(name) -> bytes of a tensor.

    A scale is one number, or one for each row. What quantises activations (`input_scale`) is left out: they are not.
    prefix: of the names that the metadata says. Raises CheckpointError for other quantisations, by name.
    """
    for name in shapes:
        for end, whose in UNKNOWN.items():
            if name.endswith(end):
                raise _refusal(file_name, f"is quantised in a way that xDiT does not read ({name}: {whose})")
    beside = {name for name in shapes if name.rpartition(".")[2] in BESIDE} | ({"scaled_fp8"} & shapes.keys())
    formats = {name.removesuffix(".scale_weight"): "float8_e4m3fn" if dtypes.get(_weight(name)) != "F8_E5M2"
               else "float8_e5m2"
               for name in beside if name.endswith(".scale_weight")}
    try:
        layers = json.loads(metadata.get("_quantization_metadata", "{}")).get("layers", {})
        formats |= {layer.removeprefix(prefix): said.get("format") for layer, said in layers.items()}
        formats |= {name.removesuffix(".comfy_quant"): json.loads(read(name)).get("format")
                    for name in beside if name.endswith(".comfy_quant")}
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{file_name} says of its quantisation what cannot be read ({error}). Download it "
                              f"again.") from error
    scales = {}
    for layer, format_ in formats.items():
        weight = f"{layer}.weight"
        scale = next((name for name in (f"{layer}.weight_scale", f"{layer}.scale_weight") if name in shapes), None)
        if format_ not in FLOAT8:
            raise _refusal(file_name, f"is quantised in the format {format_} ({layer}), which xDiT does not read")
        if weight not in shapes or scale is None:
            raise CheckpointError(f"{file_name} lacks {f'the scale of {weight}' if weight in shapes else weight}. "
                                  f"Download it again.")
        if dtypes[weight] != FLOAT8[format_] or len(shapes[weight]) != 2:
            raise _refusal(file_name, f"says that {weight} is {format_}, and it is {dtypes[weight]} of shape "
                                      f"{list(shapes[weight])}")
        if (math.prod(shapes[scale]) != 1 and shapes[scale] != (shapes[weight][0], 1)
                or dtypes[scale] not in ("F32", "F16", "BF16")):
            raise _refusal(file_name, f"has a scale {scale} of {dtypes[scale]} and shape {list(shapes[scale])} for "
                                      f"{weight} of shape {list(shapes[weight])}, and xDiT reads one number, or one "
                                      f"for each row")
        scales[weight] = scale
    lost = [name for name in beside if name.endswith("weight_scale") and name not in scales.values()]
    if lost:
        raise _refusal(file_name, f"has a scale {lost[0]}, and does not say for what format")
    return scales, beside


def _weight(name):
    return f"{name.rpartition('.')[0]}.weight"


def _refusal(file_name, why):
    return CheckpointError(f"{file_name} {why}. Use the bf16, fp16, fp8 (plain or scaled) or GGUF file of the same "
                           f"model.")
