"""Models of a ComfyUI with DynamicVRAM, whose layers have no weights before a file is loaded."""

import importlib

import pytest

from tests.support.tiers import by_default
from tests.support.tiny_checkpoints import families

KINDS = "sd3", "wan-humo", "ltx-2", "hidream-o1", "sdxl", "minimax-music-3"


def shapes_of(model):
    return {name: tuple(tensor.shape) for name, tensor in model.model.state_dict().items()}


@pytest.mark.parametrize("kind", by_default(("sd3", "wan-humo"), KINDS))
def test_a_model_has_the_same_weights_and_its_class_is_compared(comfyui, monkeypatch, kind):
    check, models = (importlib.import_module(f"{comfyui.pack.__name__}.{name}")
                     for name in ("nodes.bridge.model.family_check", "xdit_backend.models"))
    family, without = models.FAMILIES[families()[kind].name], comfyui.ours(kind, comfyui.config())

    monkeypatch.setattr("comfy.memory_management.aimdo_enabled", True)
    model = comfyui.ours(kind, comfyui.config())

    assert shapes_of(model) == shapes_of(without)
    assert importlib.import_module("comfy.memory_management").aimdo_enabled
    assert check.compare(check.build_pair(family, model.model)) == {check.SAMPLING: "", check.LORA: ""}


def test_layers_have_weights_in_the_context_alone(comfyui, monkeypatch):
    creation = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.compatibility.weight_creation")
    layers = importlib.import_module("comfy.ops").disable_weight_init
    monkeypatch.setattr("comfy.memory_management.aimdo_enabled", True)

    with creation.weights_at_construction():
        inside = layers.Linear(3, 2), layers.Embedding(3, 2, device="cpu")

    assert all(not layer.weight.is_meta for layer in inside)
    assert layers.Linear(3, 2).weight is None and layers.Embedding(3, 2, device="cpu").weight.is_meta
