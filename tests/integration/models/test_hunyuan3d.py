"""Hunyuan3D through ComfyUI's nodes: a picture, and several views of a thing, as its conditioning nodes hand them on; a
batch of shapes; guidance that is built in."""

import types

import pytest

from tests.support.layouts import LAYOUTS
from tests.support.tolerances import close, relative_error

TOLERANCE = 2e-5
KINDS = "hunyuan3d-2", "hunyuan3d-2.1"


def seen(comfyui, kind, seed):
    """What a vision model gives, as far as Hunyuan3D's nodes ask it."""
    (context, _), = comfyui.conditioning(kind, seed)
    return types.SimpleNamespace(last_hidden_state=context)


def prompts(comfyui, kind):
    from comfy_extras.nodes_hunyuan3d import Hunyuan3Dv2Conditioning, Hunyuan3Dv2ConditioningMultiView
    if kind == "hunyuan3d-2.1":
        return Hunyuan3Dv2Conditioning.execute(seen(comfyui, kind, 1)).args
    return Hunyuan3Dv2ConditioningMultiView.execute(*(seen(comfyui, kind, number) for number in range(3))).args


def sampled(comfyui, model, kind, **options):
    positive, negative = prompts(comfyui, kind)
    return comfyui.sample(model, kind, positive=positive, negative=negative, latent=comfyui.latent(kind, batch=2),
                          **options)


@pytest.fixture(scope="module")
def wanted(comfyui):
    return {kind: sampled(comfyui, comfyui.native(kind), kind) for kind in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_of_shapes_equals_native(comfyui, wanted, kind, layout):
    devices, degrees = LAYOUTS[layout]

    result = sampled(comfyui, comfyui.ours(kind, comfyui.config(devices, **degrees)), kind)

    close(result, wanted[kind], TOLERANCE)
    assert relative_error(result[:1], wanted[kind][1:]) > 0.1


@pytest.mark.slow
def test_without_guidance_each_of_a_batch_is_itself(comfyui):
    """ComfyUI's module of version 2.1 exchanges them."""
    kind, model = KINDS[1], comfyui.ours(KINDS[1], comfyui.config("cpu,cpu", ulysses=2))
    both = sampled(comfyui, model, kind, cfg=1.0)
    positive, negative = prompts(comfyui, kind)

    alone = comfyui.sample(comfyui.native(kind), kind, positive=positive, negative=negative, cfg=1.0)

    close(both[:1], alone, TOLERANCE)


@pytest.mark.slow
def test_guidance_that_is_built_in_equals_native(comfyui):
    """Flux Guidance says how much; without the node it is 5."""
    kind, results = KINDS[0], []
    for guidance in ({}, {"guidance": 2.0}):
        positive = [[text, more | guidance] for text, more in prompts(comfyui, kind)[0]]
        options = {"positive": positive, "negative": positive, "cfg": 1.0}
        results.append(comfyui.sample(comfyui.ours(kind, comfyui.config("cpu,cpu", ring=2)), kind, **options))

        close(results[-1], comfyui.sample(comfyui.native(kind), kind, **options), TOLERANCE)

    assert relative_error(*results) > 10 * TOLERANCE
