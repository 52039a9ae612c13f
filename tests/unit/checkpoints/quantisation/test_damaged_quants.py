"""Files of ComfyUI's quantised formats that are damaged, or that a later program wrote: each of these faults, drawn
over formats and layers, is an error of the real loader that names the layer and says what to do."""

import json
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.comfy_quants import HAS_MXFP8, NEWER, WRITTEN, save_comfy_quant
from tests.support.tiers import by_default
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.checkpoints.quantisation.quantised_weights import packed_weights
from xdit_backend.protocol.errors import CheckpointError

FORMATS = [format_ for format_ in WRITTEN if format_ not in NEWER and (format_ != "mxfp8" or HAS_MXFP8)]
BLOCKS, ROTATED = ("nvfp4", "mxfp8"), ("int8_convrot", "convrot_w4a4")
SCALED = [format_ for format_ in FORMATS if format_ != "convrot_w4a4"]


def said(tensors, layer, **options):
    """Have the file say otherwise of a layer."""
    name = f"{layer}.comfy_quant"
    text = json.dumps(json.loads(tensors[name].numpy().tobytes()) | options)
    tensors[name] = torch.tensor(list(text.encode()), dtype=torch.uint8)


def fewer_columns(tensors, layer):
    """As where another size of blocks was written."""
    scale = tensors[f"{layer}.weight_scale"]
    tensors[f"{layer}.weight_scale"] = scale.view(torch.uint8)[:, :scale.shape[1] // 2].contiguous().view(scale.dtype)


def unreadable(tensors, layer):
    tensors[f"{layer}.comfy_quant"] = tensors[f"{layer}.comfy_quant"][:-3].clone()


def unsaid(tensors, layer):
    del tensors[f"{layer}.comfy_quant"]


def unsaid_and_unscaled(tensors, layer):
    for name in ("comfy_quant", "weight_scale", "weight_scale_2"):
        tensors.pop(f"{layer}.{name}", None)


def plain_weight(tensors, layer):
    weight = tensors[f"{layer}.weight"]
    tensors[f"{layer}.weight"] = torch.zeros(weight.shape, dtype=torch.bfloat16)


def cut_rows(tensors, layer):
    tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"][:-8].clone()


def of_whole_numbers(tensors, layer):
    scale = tensors[f"{layer}.weight_scale"]
    tensors[f"{layer}.weight_scale"] = torch.zeros(scale.shape, dtype=torch.int32)


# what is done to a file's tensors -> (the formats that it is done to, what the message says beside the layer)
FAULTS = {
    "no scale": (lambda tensors, layer: tensors.pop(f"{layer}.weight_scale"), FORMATS, "Download .* again: it lacks"),
    "no second scale": (lambda tensors, layer: tensors.pop(f"{layer}.weight_scale_2"), ("nvfp4",), "Download .* again"),
    "no weight": (lambda tensors, layer: tensors.pop(f"{layer}.weight"), FORMATS, "Download .* again: it lacks"),
    "other blocks": (fewer_columns, BLOCKS, "Use the bf16, .*xDiT reads"),
    "a scale of whole numbers": (of_whole_numbers, FORMATS, "Use the bf16, .*xDiT reads"),
    "a format from the future": (lambda tensors, layer: said(tensors, layer, format="mxfp2"), FORMATS,
                                 "Use the bf16, .*format mxfp2 .*It reads float8_e4m3fn"),
    "another rotation": (lambda tensors, layer: said(tensors, layer, convrot_groupsize=48), ROTATED,
                         "Use the bf16, .*rotates 48 columns"),
    "what is said cannot be read": (unreadable, FORMATS, "Download .* again: its quantisation metadata"),
    "nothing is said": (unsaid, SCALED, "Use the bf16, .*without a format"),
    # float8 is then a plain file's
    "neither said nor scaled": (unsaid_and_unscaled, [format_ for format_ in FORMATS if "8_e" not in format_
                                                      and format_ != "mxfp8"], "Download .* again"),
    "a weight that is plain": (plain_weight, FORMATS, "Use the bf16, .*and it is BF16"),
    "rows that are cut off": (cut_rows, FORMATS, "Use the bf16,|Download")}
if "asym_w4a8_int8" in WRITTEN:
    GROUPED = ["asym_w4a8_int8"]
    FAULTS |= {
        "no relative scale": (lambda tensors, layer: tensors.pop(f"{layer}.weight_s_rel"), GROUPED,
                              "Download .*it lacks"),
        "no scale of rows": (lambda tensors, layer: tensors.pop(f"{layer}.weight_s_channel"), GROUPED,
                             "Download .*it lacks"),
        "another group": (lambda tensors, layer: said(tensors, layer, group_size=32), GROUPED,
                          "Use the bf16, .*xDiT reads"),
        "a group of no kind": (lambda tensors, layer: said(tensors, layer, group_size=5), GROUPED,
                               "Use the bf16, .*5 columns of .* share a scale"),
        "another rotation of groups": (lambda tensors, layer: said(tensors, layer, convrot_groupsize=48), GROUPED,
                                       "Use the bf16, .*rotates 48 columns"),
        "a short codebook": (lambda tensors, layer: tensors.update({f"{layer}.weight_codebook": torch.zeros(8)}),
                             GROUPED, "Use the bf16, .*xDiT reads 16 numbers")}
DRAWN = [(fault, seed) for seed in range(3) for fault in FAULTS]


@pytest.mark.parametrize("case", by_default(lambda case: case[1] == 0, DRAWN), ids=lambda case: f"{case[0]}-{case[1]}")
def test_a_damaged_file_is_an_error_that_names_the_layer(file_of, tmp_path, case):
    fault, seed = case
    damage, formats, words = FAULTS[fault]
    drawn = random.Random(f"{fault} {seed}")
    format_, whole, path = drawn.choice(list(formats)), tmp_path / "whole.safetensors", tmp_path / "bad.safetensors"
    _, quantised = save_comfy_quant(whole, file_of("sd3"), format_)
    tensors, layer = load_file(whole), drawn.choice(quantised).removesuffix(".weight")
    damage(tensors, layer)
    with safe_open(whole, "pt") as opened:
        save_file(tensors, path, opened.metadata())

    with pytest.raises(CheckpointError, match=f"^({words})") as raised:
        load(path)
    names = [layer, *(name for name, how in load(whole).items() if how.source == f"{layer}.weight")]   # here and there
    assert path.name in str(raised.value) and any(name in str(raised.value) for name in names)


def load(path):
    """As host and ranks do. Returns the Packed of each quantised weight."""
    checkpoint = open_checkpoint(path)
    packed = packed_weights(checkpoint, checkpoint.meta_model())
    load_transformer(checkpoint.spec("float32", "float32"), torch.device("cpu"))
    return packed
