"""Files of the published models load whole: ComfyUI's own module at published size names the tensors;
nothing holds bytes."""

import importlib
import json
from contextlib import nullcontext

import pytest
import torch
from accelerate import init_empty_weights

from tests.unit.checkpoints.test_header import PUBLISHED
from xdit_backend.checkpoints.build_transformer import build
from xdit_backend.checkpoints.checkpoint import PREFIXES
from xdit_backend.models import FAMILIES

# whose detection leaves arguments to the class of the model
APART = ("SD3", "PixArt-Sigma", "PixArt-Alpha")


# what the metadata of a published file says of its transformer, beside what is not looked at here
SAID = {"ltx-2.3-22b": {"apply_gated_attention": True, "cross_attention_adaln": True,
                        "caption_proj_before_connector": True, "caption_projection_first_linear": False}}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PUBLISHED if PUBLISHED[name][0] not in APART])
def test_every_tensor_of_a_published_file_has_its_place(comfyui, monkeypatch, name):
    """Recognised by ComfyUI and by us, converted, and loaded:
    no tensor is missing, none left over, every shape fits."""
    import comfy.ldm.ace.model as ace
    import comfy.ldm.anima.model as anima
    import comfy.model_detection
    import comfy.supported_models
    # thin in other tests
    monkeypatch.setattr(ace, "LyricEncoder", getattr(ace.LyricEncoder, "func", ace.LyricEncoder))
    monkeypatch.setattr(anima, "LLMAdapter", getattr(anima.LLMAdapter, "func", anima.LLMAdapter))
    family_name, some_shapes, expected = PUBLISHED[name]
    family = FAMILIES[family_name]
    if family.testing.detected and not family.plan.takes_unet_patches:
        monkeypatch.setattr(getattr(comfy.supported_models, family.testing.detected), "unet_extra_config", {})
    given = {key: torch.empty(shape, device="meta") for key, shape in some_shapes.items()}
    said = SAID.get(name, {})
    unet = comfy.model_detection.detect_unet_config(given, "", {"config": json.dumps({"transformer": said})})
    if family.plan.hooks == "replicated":
        unet.pop("stable_cascade_stage")
    elif family.plan.is_unet:
        unet |= ({"num_heads": 8, "num_head_channels": -1} if family_name in ("SD 1.5", "SD x4 upscaler")
                 else {"num_heads": -1, "num_head_channels": 64})
        if family.has_frames_as_batch:
            assert unet["use_temporal_attention"] and not unet["disable_temporal_crossattention"]
        if family_name == "SD x4 upscaler":
            unet |= comfy.supported_models.SD_X4Upscaler.unet_extra_config
    module, _, class_name = family.testing.native.partition(":")
    import comfy.ops
    with init_empty_weights() if family.computes_as_made else nullcontext():
        native = getattr(importlib.import_module(module), class_name)(
            **{key: value for key, value in unet.items()
               if key != "image_model" or family.testing.native.endswith(":Flux")},
            dtype=torch.bfloat16, device=None if family.computes_as_made else "meta",
            operations=comfy.ops.disable_weight_init)
    tensors = family.testing.in_file(dict(native.state_dict()))
    namings = [tensors]                                        # as ComfyUI saves it
    if "ldm.flux" in family.testing.native or family_name.startswith("Chroma"):     # and as it is published
        namings += [{key.replace("_norm.weight", "_norm.scale") if "norm." in key else key: tensor
                     for key, tensor in tensors.items()}]
    if family.plan.hooks == "replicated":
        namings += [given]

    for tensors in namings:
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        assert family.detection.recognise(shapes) and family.detection.refuse(shapes) is None
        config = family.detection.config(shapes)
        assert expected.items() <= config.items()
        config |= {f"_{key}": said.get(key, values[0]) for key, values in family.detection.settings.items()}
        with torch.device("meta"):
            model = build(family, config)
        converted = family.detection.convert(tensors, config)
        assert {key: tuple(tensor.shape) for key, tensor in converted.items()} == {
            key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


def test_every_prefix_that_comfyui_saves_a_model_under_is_known(comfyui):
    """HunyuanVideo's is another than most; ComfyUI also reads what has none that it knows under "model.",
    as AuraFlow was published."""
    import comfy.supported_models
    saved = {name.removesuffix("x") for model in comfy.supported_models.models
             for name in model.process_unet_state_dict_for_saving(model, {"x": None})}

    assert {"model.diffusion_model.", "model.model."} <= saved
    assert saved | {"model."} <= set(PREFIXES)
