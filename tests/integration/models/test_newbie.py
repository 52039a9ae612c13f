"""NewBie-Image as MODELs: the latents of ComfyUI's own KSampler at odd sizes, with prompts that lack the pooled vector
of the second text encoder; what is refused."""

import pytest
import torch

from tests.support.tolerances import close, relative_error

KIND = "newbie-image"
TOLERANCE = 2e-5                           # relative, float32 on both sides
WHOLE = {"num_patches": 3, "warmup_steps": 1000}               # no step is stale
LAYOUTS = {"one": ("cpu", {}), "cfg2": ("cpu,cpu", {"cfg": 2}), "data2": ("cpu,cpu", {"data": 2}),
           "ulysses2": ("cpu,cpu", {"ulysses": 2}), "ring2": ("cpu,cpu", {"ring": 2}),
           "pipefusion2": ("cpu,cpu", {"pipefusion": 2} | WHOLE), "tensor2": ("cpu,cpu", {"tensor": 2}),
           "displaced2": ("cpu,cpu", {"displaced": 2, "displaced_mode": "full_sync"})}


def prompt(comfyui, seed, pooled=True, tokens=20):
    """A prompt; pooled: False, without the vector, as a text encoder alone gives it, or a factor of it."""
    [[text, options]] = comfyui.conditioning(KIND, seed, tokens)
    vector = options.pop("pooled_output")
    return [[text, options | ({} if pooled is False else {"pooled_output": pooled * vector})]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_latents_equal_native_ksampler(comfyui, layout):
    """A sampler that draws noise at an odd size; then without the vector in one prompt, and in both."""
    devices, degrees = LAYOUTS[layout]
    model, native = comfyui.ours(KIND, comfyui.config(devices, **degrees)), comfyui.native(KIND)
    for positive, negative, size, batch, sampler in (
            (True, True, (15, 17), 1, "euler_ancestral"), (True, False, (7, 22), 2, "res_multistep"),
            (False, False, (16, 9), 1, "euler")):
        arguments = {"positive": prompt(comfyui, 1, positive, 23), "negative": prompt(comfyui, 2, negative),
                     "latent": comfyui.latent(KIND, batch, size), "sampler": sampler, "steps": 2}

        result = comfyui.sample(model, KIND, **arguments)

        close(result, comfyui.sample(native, KIND, **arguments), TOLERANCE, (positive, negative, size))


def test_the_vector_of_a_prompt_matters(comfyui):
    """Its direction alone: the model norms it."""
    model = comfyui.ours(KIND, comfyui.config("cpu,cpu", ulysses=2))
    given = [comfyui.sample(model, KIND, steps=2, positive=prompt(comfyui, 1, factor)) for factor in (1, -1, False)]

    assert all(relative_error(given[0], other) > 100 * TOLERANCE for other in given[1:])


def test_context_windows_equal_native_ksampler(comfyui):
    from comfy_extras.nodes_context_windows import ContextWindowsManualNode
    models = [ContextWindowsManualNode.execute(model, 9, 3, "standard_static", 1, False, "pyramid", 2, False).args[0]
              for model in (comfyui.ours(KIND, comfyui.config("cpu,cpu", ulysses=2)), comfyui.native(KIND))]

    result, want = (comfyui.sample(model, KIND, steps=2) for model in models)

    close(result, want, TOLERANCE)


def test_reference_images_are_refused_by_name(comfyui):
    """ComfyUI's class would take them as Z-Image-Omni does, which this model was not trained for."""
    positive = prompt(comfyui, 1)
    positive[0][1]["reference_latents"] = [torch.zeros(1, 16, 8, 8)]

    with pytest.raises(comfyui.errors.UnsupportedError, match="ref_latents"):
        comfyui.sample(comfyui.ours(KIND, comfyui.config("cpu")), KIND, positive=positive)


@pytest.mark.parametrize("width", [8, 24])
def test_a_vector_of_another_text_encoder_is_refused_with_both_widths(comfyui, width):
    positive = prompt(comfyui, 1)
    positive[0][1]["pooled_output"] = torch.zeros(1, width)

    with pytest.raises(comfyui.errors.ConfigError, match=f"of {width} channels, .* needs 16"):
        comfyui.sample(comfyui.ours(KIND, comfyui.config("cpu,cpu", ulysses=2)), KIND, positive=positive)
