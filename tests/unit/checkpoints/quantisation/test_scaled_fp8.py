"""Scaled float8 files: our model equals ComfyUI's own, and that of the dequantised weights;
they are held as in the file."""

import pytest
import torch
from safetensors.torch import save_file

from tests.support.tiny_checkpoints import VARIANTS, families, matrices, metadata_of, save_scaled
from tests.support.tolerances import close, relative_error
from tests.unit.checkpoints.quantisation.test_layerwise_casting import native, ours
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.protocol.errors import CheckpointError

# with matrices whose scales ComfyUI does not heed, and such a file is refused
# (tests/integration/sampling/test_quantised.py); the embeddings of words of Anima and HiDream-O1 are unpacked when they
# are read
NOT_HEEDED = ("hidream-i1", "hunyuan3d-2.1", "wan-animate", "hunyuanvideo-1.5",
              "hunyuanvideo-1.5-distilled", "anima", "hidream-o1",
              "stable-audio-open", "ace-step-1.0", "sd-x4-upscaler")
CASES = [("flux", "scaled_fp8", False), ("wan", "metadata", False), ("sd15", "comfy_quant", False),
         # embeddings of times, texts and pictures among them, as published files of Wan and Z-Image have them
         *((kind, "comfy_quant", True) for kind in families() if kind not in (*VARIANTS, *NOT_HEEDED, "sd3"))]


@pytest.mark.parametrize("kind, marks, per_row", [
    ("sd3", "comfy_quant", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)])
def test_a_scaled_file_equals_comfyuis_and_the_dequantised_one(file_of, tmp_path, kind, marks, per_row):
    """A scaled matrix takes a byte a number, whatever the rest is held in; what the host plans is what is held."""
    family, path = families()[kind], tmp_path / "scaled.safetensors"
    save_file(save_scaled(path, file_of(kind), marks, per_row), tmp_path / "plain.safetensors",
              metadata_of(file_of(kind)))

    with torch.inference_mode():
        result, want = ours(path, family, "float32"), ours(tmp_path / "plain.safetensors", family, "float32")
        close(result, native(path, family, None), 1e-4)
        exact = ours(file_of(kind), family, "float32")

    close(result, want, 1e-5)
    assert relative_error(result, exact) > 1e-3
    header = open_checkpoint(path)
    held, plain = (one.weight_table(header.spec("float32", "float32")).resident_bytes
                   for one in (header, open_checkpoint(file_of(kind))))
    numbers = sum(header.shapes[name][0] * header.shapes[name][1] for name in matrices(path))
    # of the inputs too
    scales = 4 * sum(layer.num_scales + 1 for layer in header.layers.values())
    # one for each part
    assert len(header.layers) == len(matrices(path)) and 0 < held - (plain - 3 * numbers) <= 4 * scales


FP8 = torch.zeros(4, 8, dtype=torch.float8_e4m3fn)


def said(format_):
    return torch.tensor(list(format_.encode()), dtype=torch.uint8)


@pytest.mark.parametrize("tensors, words", [
    ({"a.comfy_quant": said('{"format": "nvfp8"}')},
     r"quantised in the format nvfp8 \(a\), which .*reads.*nvfp4, mxfp8"),
    ({"a.comfy_quant": said('{"format": "nvfp4"}')}, r"lacks the scale of a.weight \(a.weight_scale_2\)"),
    ({"a.comfy_quant": said('{"format": "mxfp8"}')}, "says that a.weight is mxfp8, and its 8 columns are no whole "
                                                     "number of blocks of 32"),
    ({"a.comfy_quant": said('{"format": "int8_tensorwise"}')},
     "says that a.weight is int8_tensorwise, and it is F8_E4M3"),
    ({"a.comfy_quant": said("float8")}, "its quantisation metadata cannot be read"),
    ({"a.comfy_quant": said("[1]")}, "its quantisation metadata cannot be read"),
    ({"a.weight_scale": None}, "lacks the scale of a.weight"),
    ({"a.weight": None}, "lacks a.weight"),
    ({"a.weight": FP8.bfloat16()}, "says that a.weight is float8_e4m3fn, and it is BF16"),
    ({"a.weight_scale": torch.ones(4)}, r"shape \[4\] for a.weight of shape \[4, 8\]"),
    ({"a.comfy_quant": None}, "has a scale a.weight_scale without a format"),
    ({"b.weight_scale_2": torch.ones(1)}, "has a scale b.weight_scale_2 without a format"),
    ({"a.weight.absmax": torch.ones(1)}, "bitsandbytes"),
], ids=str)
def test_what_is_not_known_of_a_quantisation_is_refused_by_name(tmp_path, tensors, words):
    whole = {"a.weight": FP8, "a.weight_scale": torch.ones(4, 1), "a.comfy_quant": said('{"format": "float8_e4m3fn"}')}
    save_file(whole, tmp_path / "whole.safetensors")
    layer, = open_checkpoint(tmp_path / "whole.safetensors").layers.values()
    assert (layer.auxiliary, layer.num_scales) == ({"weight_scale": "a.weight_scale"}, 4)
    save_file({name: tensor for name, tensor in (whole | tensors).items() if tensor is not None},
              tmp_path / "other.safetensors")

    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path / "other.safetensors")
