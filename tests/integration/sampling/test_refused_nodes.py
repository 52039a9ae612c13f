"""Nodes of other packs that cannot be applied are rejected with the node to use instead, when a run begins and in the
page's check, by the same message."""

import importlib

import pytest

from tests.integration.server.test_graph_check import graph_of

CACHE = "^Use EasyCache or LazyCache instead of {}, or Load Diffusion Model: it replaces the model's blocks on one"
SLG = "^Use SkipLayerGuidanceDiT or SkipLayerGuidanceDiTSimple instead of SkipLayerGuidanceWanVideo: it needs options"


def first_block_cache(model):
    def ensure_cache_state(*_):
        raise AssertionError("the model is called")
    update_cache_state = reset_cache_state = ensure_cache_state

    def wrapper(call, arguments):
        ensure_cache_state(arguments["input"])
        try:
            return call(arguments["input"], arguments["timestep"], **arguments["c"])
        except RuntimeError:
            reset_cache_state()
        update_cache_state(arguments["input"])
    model = model.clone()
    model.set_model_unet_function_wrapper(wrapper)
    return model


def tea_cache(model):
    diffusion_model, is_cfg, context = model.get_model_object("diffusion_model"), True, None

    def wrapper(call, arguments):
        raise AssertionError("the model is called", diffusion_model, is_cfg, context)
    model = model.clone()
    model.set_model_unet_function_wrapper(wrapper)
    return model


def slg(model, fails=True, start_percent=0.2, end_percent=1.0):
    def skip(arguments, more):
        options = more.get("transformer_options") if fails else arguments["transformer_options"]
        if not options and fails:
            raise ValueError("transformer_options not found")
        is_skipped = start_percent <= options.get("current_percent", 0.5) <= end_percent
        return arguments if is_skipped else more["original_block"](arguments)
    model = model.clone()
    model.set_model_patch_replace(skip, "dit", "double_block", 1)
    return model


CASES = {"ApplyFBCacheOnModel": ("sd15", first_block_cache, CACHE.format("Apply First Block Cache")),
         "TeaCache": ("flux", tea_cache, CACHE.format("TeaCache")), "SkipLayerGuidanceWanVideo": ("wan", slg, SLG)}


@pytest.mark.parametrize("node", CASES)
def test_nodes_are_rejected_before_sampling_with_the_node_to_use_instead(comfyui, node):
    kind, change, message = CASES[node]

    with pytest.raises(comfyui.errors.UnsupportedError, match=message):
        comfyui.sample(change(comfyui.ours(kind, comfyui.config())), kind, steps=1)


def test_skip_layer_guidance_fails_natively_too(comfyui):
    with pytest.raises(ValueError, match="transformer_options not found"):
        comfyui.sample(slg(comfyui.native("wan")), "wan", steps=1)


def test_one_that_does_not_fail_is_rejected_as_any_other_function(comfyui):
    with pytest.raises(comfyui.errors.UnsupportedError, match="model patches that replace parts of the model .dit"):
        comfyui.sample(slg(comfyui.ours("wan", comfyui.config()), fails=False), "wan", steps=1)


@pytest.mark.parametrize("node", CASES)
def test_the_page_says_what_a_run_says(comfyui, node):
    kind, change, _ = CASES[node]

    class Strange:
        RETURN_TYPES, FUNCTION, RELATIVE_PYTHON_MODULE = ("MODEL",), "patch", "custom_nodes.strange"

        def patch(self, model):
            raise AssertionError("the code of another pack is run")
    module = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.server.graph_check")
    classes = comfyui.nodes.NODE_CLASS_MAPPINGS | {node: Strange}

    found = module.check_graph(graph_of(comfyui.file(kind), [(node, {})]), classes)

    with pytest.raises(comfyui.errors.XDiTError) as rejected:
        comfyui.sample(change(comfyui.ours(kind, comfyui.config())), kind, steps=1)
    assert found["nodes"]["loader"] == {"verdict": "refused", "by": "0", "reason": str(rejected.value)}
