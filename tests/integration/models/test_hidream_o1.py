"""HiDream-O1 as MODELs: the latents of ComfyUI's own KSampler at odd sizes, with reference images, and with what its
own node does to the model; what is refused."""

import pytest
import torch

from tests.support.layouts import LAYOUTS
from tests.support.tolerances import close, relative_error

KIND = "hidream-o1"
TOLERANCE = 2e-5                           # relative, float32 on both sides
SIDE = 32                                  # of a token, in pixels
WHOLE = {"num_patches": 3, "warmup_steps": 1000}               # no step is stale
METHODS = LAYOUTS | {"pipefusion2": ("cpu,cpu", {"pipefusion": 2} | WHOLE)}


def prompt(comfyui, seed, tokens=20, images=()):
    """A prompt, with reference images of these rows and columns."""
    [[text, options]] = comfyui.conditioning(KIND, seed, tokens)
    generator = torch.Generator().manual_seed(9)
    images = [torch.rand(1, *size, 3, generator=generator) for size in images]
    return [[text, options | ({"reference_latents": images} if images else {})]]


def latent(rows, columns, batch=1):
    return {"samples": torch.zeros(batch, 3, SIDE * rows, SIDE * columns)}


@pytest.mark.parametrize("layout", METHODS)
def test_latents_equal_native_ksampler(comfyui, layout):
    """A sampler that draws noise at an odd number of tokens; a batch, and prompts of unlike lengths; two images."""
    devices, degrees = METHODS[layout]
    model, native = comfyui.ours(KIND, comfyui.config(devices, **degrees)), comfyui.native(KIND)
    for tokens, size, images, sampler in (
            ((23, 23), (5, 7), (), "euler_ancestral"), ((17, 4), (3, 5, 2), (), "res_multistep"),
            ((21, 9), (3, 4), ((70, 90),), "euler"), ((16, 16), (4, 3, 2), ((64, 32), (90, 200)), "euler")):
        arguments = {"positive": prompt(comfyui, 1, tokens[0], images), "sampler": sampler, "steps": 2,
                     "negative": prompt(comfyui, 2, tokens[1], images), "latent": latent(*size)}

        result = comfyui.sample(model, KIND, **arguments)

        close(result, comfyui.sample(native, KIND, **arguments), TOLERANCE, (tokens, size, images))


def test_the_time_and_an_image_matter(comfyui):
    model = comfyui.ours(KIND, comfyui.config("cpu,cpu", ulysses=2))
    timeless = prompt(comfyui, 1)
    timeless[0][1]["text_input_ids"] = timeless[0][1]["text_input_ids"].clamp(max=7)
    given = [prompt(comfyui, 1), prompt(comfyui, 1, images=((64, 64),)), timeless, prompt(comfyui, 1, 19)]
    want, *others = (comfyui.sample(model, KIND, steps=2, positive=each, latent=latent(3, 5)) for each in given)

    assert all(relative_error(other, want) > 100 * TOLERANCE for other in others)


def smoothed(model, **settings):
    from comfy_extras.nodes_hidream_o1 import HiDreamO1PatchSeamSmoothing
    return HiDreamO1PatchSeamSmoothing.execute(model=model, **{
        "start_percent": 0.3, "end_percent": 1.0, "pattern": "single_shift", "passes": "ramp_2_4", "blend": "average",
        "strength": 1.0} | settings).args[0]


@pytest.mark.parametrize("layout, settings", [
    ("ulysses2", {}), ("cfg2", {"pattern": "symmetric", "blend": "median"}), ("pipefusion2", {"blend": "window"}),
    ("displaced2", {"pattern": "symmetric", "passes": "4", "strength": 0.6}), ("tensor2", {"blend": "window"})])
def test_seams_smoothed_by_its_own_node_equal_native_ksampler(comfyui, layout, settings):
    """It has the model draw each late step several times, of latents that are moved."""
    devices, degrees = METHODS[layout]
    degrees = degrees | ({"warmup_steps": 1} if layout == "pipefusion2" else {})
    degrees = {name: value for name, value in degrees.items() if name != "displaced_mode"}
    arguments = {"positive": prompt(comfyui, 1, 21), "negative": prompt(comfyui, 2, 9), "latent": latent(4, 5),
                 "steps": 4}
    ours, native = comfyui.ours(KIND, comfyui.config(devices, **degrees)), comfyui.native(KIND)

    result = comfyui.sample(smoothed(ours, **settings), KIND, **arguments)

    want = comfyui.sample(smoothed(native, **settings), KIND, **arguments)
    close(result, want, TOLERANCE)
    assert relative_error(comfyui.sample(native, KIND, **arguments), want) > 100 * TOLERANCE


def test_other_sizes_are_refused_with_what_it_takes(comfyui):
    """At which ComfyUI's own forward fails."""
    arguments = {"positive": prompt(comfyui, 1), "negative": prompt(comfyui, 2),
                 "latent": {"samples": torch.zeros(1, 3, 100, 64)}}

    with pytest.raises(comfyui.errors.ConfigError, match="multiples of 32 pixels.* has 100 x 64"):
        comfyui.sample(comfyui.ours(KIND, comfyui.config("cpu,cpu", ulysses=2)), KIND, **arguments)
    with pytest.raises(RuntimeError):
        comfyui.sample(comfyui.native(KIND), KIND, **arguments)
