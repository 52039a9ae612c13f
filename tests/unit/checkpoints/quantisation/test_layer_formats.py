"""What ComfyUI's files say of quantised layers: read in every way that they say it, or refused with the layer's name
and what would run."""

import json
import sys

import pytest

from xdit_backend.checkpoints.quantisation import kitchen_layers
from xdit_backend.checkpoints.quantisation.layer_formats import layers_of
from xdit_backend.protocol.errors import CheckpointError

ROWS, COLUMNS = 96, 256
ONE, MANY = ("F32", ()), ("F32", (ROWS, 1))
# of each format: what it says, and the tensors of a layer
WHOLE = {"float8_e4m3fn": ({}, {"weight": ("F8_E4M3", (ROWS, COLUMNS)), "weight_scale": ONE, "input_scale": ONE}),
         "nvfp4": ({}, {"weight": ("U8", (ROWS, COLUMNS // 2)), "weight_scale": ("F8_E4M3", (128, 16)),
                        "weight_scale_2": ONE}),
         "mxfp8": ({}, {"weight": ("F8_E4M3", (ROWS, COLUMNS)), "weight_scale": ("U8", (128, 8))}),
         "int8_tensorwise": ({"convrot": True, "convrot_groupsize": 64},
                             {"weight": ("I8", (ROWS, COLUMNS)), "weight_scale": MANY}),
         "convrot_w4a4": ({"params": {"convrot_groupsize": 16, "linear_dtype": "int8"}},
                          {"weight": ("I8", (ROWS, COLUMNS // 2)), "weight_scale": ("F32", (ROWS,))})}


def read(format_, options={}, tensors={}, layer="blocks.3.fc"):
    said, whole = WHOLE[format_]
    here = {f"{layer}.{name}": entry for name, entry in (whole | tensors).items() if entry is not None}
    here[f"{layer}.comfy_quant"] = "U8", (64,)
    text = json.dumps({"format": format_} | said | options).encode()
    types, shapes = ({name: entry[index] for name, entry in here.items()} for index in (0, 1))
    return layers_of(shapes, types, {}, lambda name: text, "file.safetensors")


@pytest.mark.parametrize("format_", WHOLE)
def test_a_layer_is_read(format_):
    layers, marks = read(format_)

    layer = layers["blocks.3.fc.weight"]
    assert (layer.format, layer.shape, layer.stored_shape) == (
        format_, (ROWS, COLUMNS), WHOLE[format_][1]["weight"][1])
    assert marks == {f"blocks.3.fc.{name}" for name in (*WHOLE[format_][1], "comfy_quant")} - {"blocks.3.fc.weight"}
    assert layer.auxiliary_as_stored(10)["weight_scale"][0] == {"float8_e4m3fn": (1, 1), "nvfp4": (10, 16),
                                                                "mxfp8": (10, 8)
                                                           }.get(format_, (10, 1))


def test_options_are_read_where_older_files_have_them():
    (layer,), _ = read("convrot_w4a4")[0].values(), None
    assert (layer.rotated, layer.linear_dtype, layer.exact, layer.block) == (16, "int8", False, (64, 32))
    layer, = read("int8_tensorwise", {"full_precision_matrix_mult": True})[0].values()
    assert (layer.rotated, layer.exact, layer.block) == (64, True, (64, 64))
    layer, = read("int8_tensorwise", {"convrot": False})[0].values()
    assert (layer.rotated, layer.block) == (0, (1, 1))


@pytest.mark.parametrize("format_, options, tensors, words", [
    ("nvfp4", {}, {"weight_scale_2": None}, r"lacks the scale of blocks.3.fc.weight \(blocks.3.fc.weight_scale_2\)"),
    ("mxfp8", {}, {"weight_scale": None}, r"lacks the scale of blocks.3.fc.weight \(blocks.3.fc.weight_scale\)"),
    ("int8_tensorwise", {}, {"weight_scale": None}, "lacks the scale of blocks.3.fc.weight"),
    ("convrot_w4a4", {}, {"weight": None}, "lacks blocks.3.fc.weight"),
    ("nvfp4", {}, {"weight_scale": ("F8_E4M3", (ROWS, 16))}, r"blocks.3.fc.weight_scale of F8_E4M3 and shape "
                                                           r"\[96, 16\] .*xDiT reads 128 x 16, of F8_E4M3 or U8"),
    ("mxfp8", {}, {"weight_scale": ("F32", (128, 8))}, "blocks.3.fc.weight_scale of F32.* of F8_E8M0 or U8"),
    ("mxfp8", {}, {"weight": ("F8_E4M3", (ROWS, 40))}, "blocks.3.fc.weight is mxfp8, and its 40 columns are no whole"),
    ("nvfp4", {}, {"weight": ("F8_E4M3", (ROWS, COLUMNS))}, "blocks.3.fc.weight is nvfp4, and it is F8_E4M3"),
    ("nvfp4", {}, {"pre_quant_scale": ("F32", (ROWS,))}, "xDiT reads 256 numbers"),
    ("nvfp4", {}, {"input_scale": ("F32", (2,))}, "blocks.3.fc.input_scale .*xDiT reads one number"),
    ("int8_tensorwise", {"convrot_groupsize": 48}, {}, "rotates 48 columns of blocks.3.fc.weight together"),
    ("int8_tensorwise", {"convrot_groupsize": "many"}, {},
     "rotates 'many' columns .*They must be 4, 16, 64, 256, 1024"),
    ("nvfp4", {"format": ["nvfp4"]}, {}, r"in the format \['nvfp4'\] \(blocks.3.fc\)"),
    ("convrot_w4a4", {}, {"weight": ("I8", (ROWS, 24))}, "rotates 16 columns of blocks.3.fc.weight .*which has 48"),
    ("convrot_w4a4", {"linear_dtype": "int2"}, {}, "blocks.3.fc.weight is multiplied in 'int2', and xDiT knows int4"),
    ("int8_tensorwise", {}, {"weight": ("I8", (4, ROWS, COLUMNS))}, r"blocks.3.fc.weight .*it is I8 of shape \[4, 96"),
    ("nvfp4", {"format": "nvfp3"}, {}, r"format nvfp3 \(blocks.3.fc\), .*It reads float8_e4m3fn, float8_e5m2, nvfp4"),
], ids=str)
def test_a_layer_that_is_not_whole_is_refused_by_its_name(format_, options, tensors, words):
    with pytest.raises(CheckpointError, match=words):
        read(format_, options, tensors)


def test_a_package_that_is_missing_or_too_old_is_named(monkeypatch):
    """Scaled float8 needs none: it is unpacked before each product."""
    layers = {format_: list(read(format_)[0].values()) for format_ in WHOLE}
    words = "^Install or update comfy-kitchen: .*pip install -U comfy-kitchen .* file has weights in nvfp4, which need"
    kitchen_layers.check(sum(layers.values(), []), "file")

    monkeypatch.delattr("comfy_kitchen.tensor.TensorCoreNVFP4Layout")
    with pytest.raises(CheckpointError, match=words):
        kitchen_layers.check(sum(layers.values(), []), "file")
    monkeypatch.setattr(kitchen_layers, "is_installed", lambda: False)
    with pytest.raises(CheckpointError, match=words):
        kitchen_layers.check(layers["nvfp4"], "file")
    kitchen_layers.check(layers["float8_e4m3fn"], "file")
    assert "comfy_kitchen" in sys.modules
