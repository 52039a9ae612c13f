"""Flux KV Cache: later steps take the keys and values that a run's first call had of its reference pictures. Our MODEL
draws what the native MODEL draws, whichever prompts have pictures; what cannot be is refused."""

import pytest
import torch

from tests.integration.sampling.test_pipefusion import EXACT
from tests.integration.sampling.test_reference_images import edited
from tests.programs.model_nodes import model_nodes, run_node
from tests.support.tolerances import close, relative_error

KIND, STEPS = "flux2-klein", 4


def cached(comfyui, model):
    return run_node(model_nodes(comfyui)["FluxKVCache"], {"model": model})[0]


def prompts(comfyui, kind=KIND, batch=2, method=None, tokens=20, **negative):
    """Both with two pictures, of odd sizes; or what is given of the negative prompt, at odd sides."""
    positive, other = edited(comfyui, kind, method=method), comfyui.conditioning(kind, 2, tokens=tokens)
    other[0][1] |= {name: value for name, value in positive[0][1].items() if name.startswith("reference")} | negative
    return {"positive": positive, "negative": other, "latent": comfyui.latent(kind, batch, size=(9, 7)),
            "steps": STEPS}


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"cfg": 2}, *(
    pytest.param(each, marks=pytest.mark.slow) for each in ({"ring": 2}, {"tensor": 2}, {"data": 2},
    {"ring": 2, "ulysses": 2}, {"cfg": 2, "data": 2}, {"ulysses": 2, "compile": "blocks"},
    {"pipefusion": 2, "num_patches": 3}, {"pipefusion": 2, "num_patches": 3, "cfg": 2}))], ids=str)
def test_kept_references_equal_native_ksampler(comfyui, degrees):
    arguments = prompts(comfyui)
    devices = ",".join(["cpu"] * (4 if sum(degree == 2 for degree in degrees.values()) > 1 else 2))

    result = comfyui.sample(cached(comfyui, comfyui.ours(KIND, comfyui.config(devices, **degrees))), KIND, **arguments)

    want = comfyui.sample(cached(comfyui, comfyui.native(KIND)), KIND, **arguments)
    close(result, want, EXACT)
    at_zero = arguments | {"positive": edited(comfyui, KIND, method="index_timestep_zero")}
    assert relative_error(comfyui.sample(comfyui.native(KIND), KIND, **at_zero), want) > 100 * EXACT


@pytest.mark.parametrize("name, more", [("negative without", {"reference_latents": None}),
                                        ("unequal texts", {"tokens": 27})])
@pytest.mark.parametrize("degrees", [{}, pytest.param({"ulysses": 2}, marks=pytest.mark.slow)], ids=str)
def test_prompts_that_comfyui_calls_apart_equal_native_ksampler(comfyui, degrees, name, more):
    """Of unequal texts the negative prompt takes what is kept of the positive one's pictures, as ComfyUI's does."""
    arguments = prompts(comfyui, **more)
    ours = cached(comfyui, comfyui.ours(KIND, comfyui.config("cpu,cpu" if degrees else "cpu", **degrees)))

    result = comfyui.sample(ours, KIND, **arguments)

    close(result, comfyui.sample(cached(comfyui, comfyui.native(KIND)), KIND, **arguments), EXACT)
    assert torch.equal(result, comfyui.sample(ours, KIND, **arguments)), "a run leaves nothing for the next"


@pytest.mark.slow
def test_flux_1_keeps_references_at_the_latents_time(comfyui):
    """At time zero, which the node asks for, ComfyUI's own fails."""
    arguments = prompts(comfyui, "flux", method="offset") | {"cfg": 1.0}

    result = comfyui.sample(cached(comfyui, comfyui.ours("flux", comfyui.config("cpu,cpu", ulysses=2))), "flux",
                            **arguments)

    close(result, comfyui.sample(cached(comfyui, comfyui.native("flux")), "flux", **arguments), EXACT)
    with pytest.raises(RuntimeError):
        comfyui.sample(cached(comfyui, comfyui.native("flux")), "flux", **arguments | {"positive": edited(
            comfyui, "flux")})
    with pytest.raises(comfyui.errors.UnsupportedError, match="or uxo, and this workflow's .* has index_timestep"):
        comfyui.sample(cached(comfyui, comfyui.ours("flux", comfyui.config("cpu"))), "flux", **arguments | {
            "positive": edited(comfyui, "flux")})


def test_what_cannot_be_kept_is_refused_by_name(comfyui):
    unsupported = comfyui.errors.UnsupportedError
    one, displaced = comfyui.config("cpu"), comfyui.config("cpu,cpu", displaced=2)
    twice = cached(comfyui, cached(comfyui, comfyui.ours(KIND, one)))
    with pytest.raises(unsupported, match="^Set displaced_degree to 1, .* or remove Flux KV Cache"):
        comfyui.sample(cached(comfyui, comfyui.ours(KIND, displaced)), KIND, **prompts(comfyui))
    with pytest.raises(unsupported, match="^Use Flux KV Cache once"):
        comfyui.sample(twice, KIND, **prompts(comfyui))
    with pytest.raises(unsupported, match="^Use reference images of the same sizes .* Flux KV"):
        comfyui.sample(cached(comfyui, comfyui.ours(KIND, one)), KIND, **prompts(comfyui, reference_latents=[
            torch.zeros(1, 128, 4, 4)]))
    changed = cached(comfyui, comfyui.ours(KIND, one))
    patch, = changed.model_options["transformer_options"]["patches"]["attn1_patch"]
    type(patch).__call__, own = lambda self, *arguments, **more: {}, type(patch).__call__
    try:
        with pytest.raises(unsupported, match="model patches .attn1_patch."):
            comfyui.sample(changed, KIND, **prompts(comfyui))
    finally:
        type(patch).__call__ = own
