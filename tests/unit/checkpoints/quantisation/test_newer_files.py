"""Files for versions of ComfyUI that are newer than 0.30: what the pack does not read is left out, or rejected by
name."""

import importlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.comfyui.install_location import find_comfyui
from xdit_backend.comfyui.native_models import class_at
from xdit_backend.protocol.errors import CheckpointError

LAYER = "joint_blocks.0.x_block.attn.qkv"


def in_bytes(options):
    return torch.tensor(list(json.dumps(options).encode()), dtype=torch.uint8)


def test_the_attention_backend_of_a_module_is_no_weight(file_of, tmp_path, caplog):
    config = {f"joint_blocks.{number}.x_block.attn.comfy_attention.config": in_bytes({"backend": "comfy_kitchen_int8"})
              for number in range(2)}
    save_file(load_file(file_of("sd3")) | config, tmp_path / "with.safetensors")

    with caplog.at_level("INFO"):
        checkpoint = open_checkpoint(tmp_path / "with.safetensors")

    assert checkpoint.shapes == open_checkpoint(file_of("sd3")).shapes
    assert checkpoint.meta_model() is not None
    assert "selects an attention backend for 2 modules" in caplog.text


def test_an_unknown_format_is_rejected_by_name(file_of, tmp_path):
    tensors = load_file(file_of("sd3"))
    rows, columns = tensors[f"{LAYER}.weight"].shape
    tensors |= {f"{LAYER}.weight": torch.zeros(rows, columns // 2, dtype=torch.uint8),
                f"{LAYER}.weight_s_rel": torch.zeros(rows, columns // 32, dtype=torch.uint8),
                f"{LAYER}.weight_s_channel": torch.zeros(rows), f"{LAYER}.weight_codebook": torch.zeros(16),
                f"{LAYER}.comfy_quant": in_bytes({"format": "asym_w3a8_int8"})}
    save_file(tensors, tmp_path / "asym.safetensors")

    with pytest.raises(CheckpointError, match=f"^Use the bf16, .* is quantised in the format asym_w3a8_int8 "
                       rf"\({LAYER}\), which xDiT does not read. It reads float8_e4m3fn"):
        open_checkpoint(tmp_path / "asym.safetensors")


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'comfy_kitchen'"), AttributeError(
    "module 'comfy_kitchen' has no attribute 'int8_attention_is_available'")])
def test_a_comfy_kitchen_that_comfyui_lacks_is_named(monkeypatch, error):
    if find_comfyui() is None:
        pytest.skip("no ComfyUI: name one in XDIT_COMFYUI")
    class_at("comfy.ldm.lens.model:LensTransformer2DModel")

    def import_module(name, imports=importlib.import_module):
        if name == "comfy.ldm.wan.model":
            raise error
        return imports(name)
    monkeypatch.setattr(importlib, "import_module", import_module)

    with pytest.raises(CheckpointError, match=r"^Install comfy-kitchen[=>]=[\d.]+ in the Python of the workers: the "
                       r"ComfyUI [\d.]+ in .* needs it, and comfy-kitchen is [\d.]+ \("):
        class_at("comfy.ldm.wan.model:WanModel")
