"""Files of every quantised format of ComfyUI's, written by ComfyUI's own quantiser: comfy.quant_ops and what a layer of
comfy.ops.mixed_precision_ops writes into a state dict.

Used by the tests of checkpoints and nodes.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.comfyui_server import comfyui_folder
from tests.support.tiny_checkpoints import import_comfyui, matrices, metadata_of, save, save_gguf, save_scaled
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.quantisation.layer_formats import FORMATS, ROTATING  # noqa: F401

# format of a test -> (ComfyUI's, options of its quantiser, of how many columns the matrices must have a multiple)
WRITTEN = {"float8_e4m3fn": ("float8_e4m3fn", {"scale": "recalculate"}, 1),
           "float8_e5m2": ("float8_e5m2", {"scale": "recalculate"}, 1),
           "nvfp4": ("nvfp4", {}, 16), "mxfp8": ("mxfp8", {}, 32),
           "int8_tensorwise": ("int8_tensorwise", {}, 1), "int8_per_row": ("int8_tensorwise", {"per_channel": True}, 1),
           "int8_convrot": ("int8_tensorwise", {"per_channel": True, "convrot": True, "convrot_groupsize": 64}, 64),
           "convrot_w4a4": ("convrot_w4a4", {"convrot_groupsize": 64}, 64)}
# the same, of formats that newer versions of ComfyUI have
NEWER = {"asym_w4a8_int8": ("asym_w4a8_int8", {"convrot_groupsize": 64, "group_size": 16}, 64)}
SOURCE = comfyui_folder() and Path(comfyui_folder(), "comfy", "quant_ops.py")
WRITTEN |= {how: written for how, written in NEWER.items() if SOURCE and f'"{how}"' in SOURCE.read_text("utf-8")}
HAS_MXFP8 = hasattr(torch, "float8_e8m0fnu")                   # PyTorch 2.7
MIXED = ("nvfp4", "int8_convrot", "float8_e4m3fn", *["mxfp8"] * HAS_MXFP8, "convrot_w4a4")
# ends of the weights by whose columns ComfyUI tells how wide CogVideoX's times and LTX-Video's texts are: with two
# numbers in a byte it would take half
MEASURED = "blocks.0.norm1.linear.weight", "transformer_blocks.0.attn2.to_k.weight"
ROWS = 32                                  # of these, so that no format fills up a matrix


def save_comfy_quant(path, source, format_, options={}, more=None):
    """Write the checkpoint `source` anew, the matrices of its blocks quantised, as published files have them; "mixed":
    each in another format. Returns ({name: tensor} of what its weights come to, the names of those that are quantised).

    options: what `comfy_quant` is to say beside the format. more: {what it is: makes a tensor of a matrix}, such as
    input scales.
    """
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
    if format_ == "mxfp8" and not HAS_MXFP8:
        pytest.skip("this PyTorch has no type for the scales of mxfp8")
    family, tensors, plain, quantised = open_checkpoint(source).family, {}, {}, []
    blocks = ([list_.file_prefix for list_ in family.blocks] or [f"{name}." for name in family.plan.nested_lists]
              or [".transformer_blocks."])
    names = {name for name in matrices(source) if any(block in name for block in blocks)}
    for name, tensor in load_file(source).items():
        written = MIXED[len(quantised) % len(MIXED)] if format_ == "mixed" else format_
        known, how, columns = WRITTEN[written]
        if (name not in names or tensor.shape[1] % columns or tensor.shape[0] % ROWS
                or FORMATS[known].numbers > 1 and name.endswith(MEASURED)):
            tensors[name] = plain[name] = tensor
            continue
        layer = name.removesuffix(".weight")
        weight = QuantizedTensor.from_float(tensor, QUANT_ALGOS[known]["comfy_tensor_layout"], **how)
        tensors |= weight.state_dict(name)
        plain[name] = weight.dequantize()
        rotated = {"convrot_groupsize": 64} if "convrot" in written or written in NEWER else {}
        said = {"format": known} | rotated | ({"convrot": True} if "convrot" in how else {}) | options
        tensors[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
        tensors |= {f"{layer}.{what}": make(tensor) for what, make in (more or {}).items()}
        quantised.append(name)
    assert quantised, f"{source} has no matrix that {format_} takes"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(path), metadata=metadata_of(source))
    return plain, quantised


SMOOTHED = {"pre_quant_scale": lambda matrix: torch.linspace(0.8, 1.25, matrix.shape[1]),
            "input_scale": lambda matrix: 0.02 + 0.01 * matrix[0, 0].abs()}


def packed_file(folder, kind, format_):
    """A tiny file of a kind in a format of WRITTEN, in this folder; made, by ComfyUI, where it is not there."""
    path, plain = (Path(folder, f"{kind}-{name}.safetensors") for name in (format_, "plain"))
    if not path.exists():
        import_comfyui(comfyui_folder())
        save(kind, plain)
        save_comfy_quant(path, plain, format_)
    return path


def save_as(how, folder, original):
    """A file like the original whose weights are "scaled" float8, of a type of GGUF, or in a format of WRITTEN.
    Returns its path."""
    path = folder / f"model.{'gguf' if how.startswith('Q') else 'safetensors'}"
    if how in WRITTEN:
        save_comfy_quant(path, original, how)
    else:
        (save_scaled if how == "scaled" else save_gguf)(path, original, *(() if how == "scaled" else (how,)))
    return path
