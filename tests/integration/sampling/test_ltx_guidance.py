"""Guidance nodes for LTX-2 equal native, and are rejected before sampling for other models."""

import pytest

from tests.integration.conftest import DEGREES
from tests.programs.model_nodes import model_nodes, run_node
from tests.support.tolerances import close, relative_error

TOLERANCE = 2e-5                           # relative, float32 on both sides
STG, MODALITY = "LTXVSpatioTemporalGuidance", "LTXVModalityGuidance"
WIDGETS = {STG: {"scale": 2.0, "blocks": "1, 7", "start_percent": 0.0, "end_percent": 1.0},
           MODALITY: {"modality_scale": 3.0, "start_percent": 0.0, "end_percent": 1.0}}
ONE_CALL = [{}, {"ulysses": 2}, {"ring": 2}, {"tensor": 2}, {"pipefusion": 2, "warmup_steps": 9}]
LAYOUTS = [*ONE_CALL, {"cfg": 2}, {"data": 2}, {"displaced": 2, "warmup_steps": 9}]


def node_of(comfyui, name):
    node = model_nodes(comfyui).get(name)
    if node is None:
        pytest.skip("ComfyUI has this node from 0.32.0 on")
    return node


def uncoupled(model):
    """LTXVModalityGuidance, of which older versions of ComfyUI have the option only."""
    import comfy.samplers

    def guide(args):
        options = args["model_options"] | {"transformer_options": args["model_options"].get(
            "transformer_options", {}) | {"a2v_cross_attn": False, "v2a_cross_attn": False}}
        [apart] = comfy.samplers.calc_cond_batch(args["model"], [args["cond"]], args["input"], args["sigma"], options)
        return args["denoised"] + 2.0 * (args["cond_denoised"] - apart)
    model = model.clone()
    model.set_model_sampler_post_cfg_function(guide)
    return model


def compare(comfyui, kind, layout, change):
    config = comfyui.config("cpu,cpu" if set(layout) & set(DEGREES) else "cpu", **layout)
    result, reference = (comfyui.sample(change(model), kind, steps=2).unbind()
                         for model in (comfyui.ours(kind, config), comfyui.native(kind)))

    before = comfyui.reference(kind, steps=2).unbind()
    for part, of_native, unguided in zip(result, reference, before, strict=True):
        close(part, of_native, TOLERANCE)
        assert relative_error(of_native, unguided) > 1e-3, "a node that changes nothing"


@pytest.mark.parametrize("layout", [each if each in ({}, {"tensor": 2}) else pytest.param(each, marks=pytest.mark.slow)
                                    for each in LAYOUTS], ids=str)
def test_calls_without_attention_between_video_and_audio_equal_native(comfyui, layout):
    compare(comfyui, "ltx-2", layout, uncoupled)


@pytest.mark.parametrize("layout", [each if each in ({}, {"ulysses": 2}) else pytest.param(each, marks=pytest.mark.slow)
                                    for each in LAYOUTS], ids=str)
@pytest.mark.parametrize("kind", ["ltx-2", pytest.param("ltx-2.3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WIDGETS)
def test_nodes_equal_native(comfyui, name, kind, layout):
    node = node_of(comfyui, name)
    compare(comfyui, kind, layout, lambda model: run_node(node, {"model": model, **WIDGETS[name]})[0])


@pytest.mark.parametrize("name", WIDGETS)
@pytest.mark.parametrize("kind", ["ltx-video", "sd3"])
def test_a_model_that_ignores_the_node_is_rejected_before_sampling(comfyui, monkeypatch, name, kind):
    node = node_of(comfyui, name)
    model = run_node(node, {"model": comfyui.ours(kind, comfyui.config()), **WIDGETS[name]})[0]
    monkeypatch.setattr(comfyui.samplers, "calc_cond_batch", lambda *args: pytest.fail("sampling has begun"))

    with pytest.raises(comfyui.errors.UnsupportedError, match=f"^Remove the node that adds it, .* {name}, which"):
        comfyui.sample(model, kind, steps=1)


def test_one_direction_alone_is_rejected(comfyui):
    model = comfyui.ours("ltx-2", comfyui.config()).clone()
    model.model_options["transformer_options"]["v2a_cross_attn"] = False

    with pytest.raises(comfyui.errors.UnsupportedError, match="^Set both of a2v_cross_attn and v2a_cross_attn"):
        comfyui.sample(model, "ltx-2", steps=1)
