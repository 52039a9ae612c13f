"""Distributed Upscale Image equals ComfyUI's Upscale Image (using Model), for every size, batch and scale; upscale
models that workers cannot reproduce are rejected by name."""

import importlib
import re

import psutil
import pytest
import torch

from tests.support.fault_actions import can_run_out, run_out_of_memory
from tests.support.upscale_models import compact, esrgan

FILES = {"esrgan-4x": lambda: esrgan(4), "esrgan-2x": lambda: esrgan(2), "esrgan-1x": lambda: esrgan(1),
         "compact-2x": lambda: compact(2), "compact-3x": lambda: compact(3, num_convs=2),
         "compact-1x": lambda: compact(1), "gray-2x": lambda: compact(2, channels=1)}
# file, images, rows and columns: one tile; an odd size; a tile's size; one pixel more; two overlapping tiles whose
# second one is smaller than the overlap; tiles in both directions; frames with tiles
CASES = [("esrgan-4x", 1, 24, 30), ("esrgan-2x", 2, 13, 17), ("esrgan-1x", 1, 9, 40), ("compact-2x", 1, 512, 33),
         ("compact-2x", 1, 40, 513), ("compact-3x", 1, 30, 993), ("compact-2x", 1, 700, 530), ("compact-1x", 3, 20, 600),
         ("esrgan-4x", 5, 8, 12), ("compact-2x", 1, 1, 1)]


@pytest.fixture(scope="module")
def upscaler(comfyui):
    """upscaler(name): the UPSCALE_MODEL that ComfyUI loads from a file of FILES."""
    (comfyui.base / "upscale_models").mkdir(exist_ok=True)
    comfyui.folder_paths.add_model_folder_path("upscale_models", str(comfyui.base / "upscale_models"), is_default=True)

    def load(name):
        path = comfyui.base / "upscale_models" / f"{name}.pth"
        if not path.exists():
            torch.save(FILES[name](), path)
        return native("UpscaleModelLoader").execute(f"{name}.pth").args[0]
    return load


@pytest.fixture
def texts(comfyui, monkeypatch):
    """Texts shown on the node."""
    texts = []
    monkeypatch.setattr(bridge(comfyui, "distributed_upscale"), "show_text", texts.append)
    return texts


def native(name):
    return getattr(importlib.import_module("comfy_extras.nodes_upscale_model"), name)


def bridge(comfyui, module):
    return importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.upscale.{module}")


def image(num_images, rows, columns, channels=3):
    return torch.rand(num_images, rows, columns, channels, generator=torch.Generator().manual_seed(rows + columns))


def upscale(comfyui, *arguments):
    return comfyui.nodes.NODE_CLASS_MAPPINGS["XDiTUpscaleImage"].execute(*arguments).args[0]


def wanted(model, pixels):
    return native("ImageUpscaleWithModel").execute(model, pixels).args[0]


@pytest.mark.parametrize("name, num_images, rows, columns", CASES)
def test_images_equal_comfyuis(comfyui, upscaler, name, num_images, rows, columns):
    pixels, model = image(num_images, rows, columns), upscaler(name)
    want = wanted(model, pixels)
    result = upscale(comfyui, model, pixels, comfyui.config("cpu,cpu"))

    assert result.shape == want.shape and result.dtype == want.dtype and want.std() > 0.01
    torch.testing.assert_close(result, want, atol=1e-5, rtol=0)
