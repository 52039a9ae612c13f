"""TripoSplat as MODELs: tokens of a shape and a camera, the latents of ComfyUI's own KSampler; its image, its preview
while it samples; as many tokens as its nodes make; what is refused."""

from types import SimpleNamespace

import pytest
import torch

from tests.integration.conftest import in_parts
from tests.support.tolerances import close, relative_error

KIND = "triposplat"
TOLERANCE = 2e-5                           # relative, float32 on both sides
LAYOUTS = {"one": ("cpu", {}), "cfg2": ("cpu,cpu", {"cfg": 2}), "data2": ("cpu,cpu", {"data": 2}),
           "ulysses2": ("cpu,cpu", {"ulysses": 2}), "ring2": ("cpu,cpu", {"ring": 2}),
           "pipefusion2": ("cpu,cpu", {"pipefusion": 2, "num_patches": 3, "warmup_steps": 1000}),
           "tensor2": ("cpu,cpu", {"tensor": 2}),
           "displaced2": ("cpu,cpu", {"displaced": 2, "displaced_mode": "full_sync"})}


def prompts(comfyui, tokens=21, images=True):
    """As TripoSplat Conditioning makes them: the negative one is of zeros."""
    [[text, options]] = comfyui.conditioning(KIND, 1, tokens)
    if not images:
        return [[[text, {}]], [[torch.zeros_like(text), {}]]]
    [image] = options["reference_latents"]
    return [[[text, {"reference_latents": [image]}]],
            [[torch.zeros_like(text), {"reference_latents": [torch.zeros_like(image)]}]]]


def latent(tokens, batch=1):
    return {"samples": in_parts(torch.zeros(batch, tokens, 16), torch.zeros(batch, 1, 5))}


def sampled(comfyui, model, given, tokens=67, batch=1, **arguments):
    positive, negative = given
    return comfyui.sample(model, KIND, positive=positive, negative=negative, latent=latent(tokens, batch),
                          **{"steps": 2} | arguments).unbind()


def compare(result, want):
    for ours, theirs in zip(result, want, strict=True):
        assert ours.shape == theirs.shape and theirs.std() > 0.1
        close(ours, theirs, TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_and_camera_equal_native_ksampler(comfyui, layout):
    """Numbers of tokens that no layout divides; a batch; a prompt without a image."""
    devices, degrees = LAYOUTS[layout]
    model, native = comfyui.ours(KIND, comfyui.config(devices, **degrees)), comfyui.native(KIND)
    for given, tokens, batch, sampler in ((prompts(comfyui), 67, 1, "euler_ancestral"),
                                          (prompts(comfyui, 9), 50, 3, "euler"),
                                          (prompts(comfyui, images=False), 31, 1, "dpmpp_2m")):
        arguments = {"tokens": tokens, "batch": batch, "sampler": sampler}

        result = sampled(comfyui, model, given, **arguments)

        compare(result, sampled(comfyui, native, given, **arguments))


def test_as_many_tokens_as_its_nodes_make_equal_native_ksampler(comfyui):
    """With nothing of ComfyUI's class changed: 8,192."""
    arguments = {"tokens": 8192, "steps": 1, "cfg": 1.0}

    result = sampled(comfyui, comfyui.ours(KIND, comfyui.config("cpu,cpu", ulysses=2)), prompts(comfyui), **arguments)

    compare(result, sampled(comfyui, comfyui.native(KIND), prompts(comfyui), **arguments))


def test_the_image_and_the_camera_matter(comfyui):
    model = comfyui.ours(KIND, comfyui.config("cpu,cpu", ring=2))
    given = prompts(comfyui)
    want = sampled(comfyui, model, given)
    without = sampled(comfyui, model, prompts(comfyui, images=False))
    turned = in_parts(torch.zeros(1, 67, 16), 3 * torch.ones(1, 1, 5))
    moved = comfyui.sample(model, KIND, positive=given[0], negative=given[1], latent={"samples": turned}, steps=2,
                           denoise=0.6).unbind()
    still = comfyui.sample(model, KIND, positive=given[0], negative=given[1], latent=latent(67), steps=2,
                           denoise=0.6).unbind()

    assert min(relative_error(one, other) for one, other in zip(without, want)) > 100 * TOLERANCE
    assert relative_error(moved[0], still[0]) > 10 * TOLERANCE       # one token of many


def test_its_preview_is_called_with_what_native_sampling_gives_it(comfyui, monkeypatch):
    import comfy.ldm.triposplat.preview
    from comfy_extras.nodes_triposplat import TripoSplatSamplingPreview
    seen = []
    monkeypatch.setattr(comfyui.management, "load_models_gpu", _without_vae(comfyui.management.load_models_gpu))
    monkeypatch.setattr(comfy.ldm.triposplat.preview, "decode_x0_to_image", lambda vae, x0, settings: seen.append(x0))
    decoder = SimpleNamespace(gaussians_per_point=32, gs=SimpleNamespace(model_channels=8))
    vae = SimpleNamespace(first_stage_model=decoder, vae_dtype=torch.float32, patcher=None)
    found = []
    for model in (comfyui.ours(KIND, comfyui.config("cpu,cpu", ulysses=2)), comfyui.native(KIND)):
        sampled(comfyui, TripoSplatSamplingPreview.execute(model, vae, 5, 16384, 90.0, 15.0, 3).args[0],
                prompts(comfyui))
        found.append(seen[:])
        seen.clear()

    assert len(found[0]) == len(found[1]) > 0
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs, TOLERANCE)


def _without_vae(load):
    return lambda models, **options: load([each for each in models if each is not None], **options)


@pytest.mark.parametrize("samples, words", [
    (lambda: torch.zeros(1, 16, 8, 8), "several parts|TripoSplat"),
    (lambda: in_parts(torch.zeros(1, 67, 12), torch.zeros(1, 1, 5)), "^Make the latent with TripoSplat Conditioning"),
    (lambda: in_parts(torch.zeros(1, 67, 16), torch.zeros(1, 1, 4)), "^Make the latent with TripoSplat Conditioning"),
    (lambda: in_parts(torch.zeros(1, 8193, 16), torch.zeros(1, 1, 5)), "up to 8192 tokens")])
def test_other_latents_are_refused_with_what_it_takes(comfyui, samples, words):
    positive, negative = prompts(comfyui)

    with pytest.raises(comfyui.errors.ConfigError, match=words):
        comfyui.sample(comfyui.ours(KIND, comfyui.config("cpu")), KIND, positive=positive, negative=negative,
                       latent={"samples": samples()})


def test_a_image_of_another_vae_is_refused(comfyui):
    given = prompts(comfyui)
    for prompt in given:
        prompt[0][1]["reference_latents"] = [torch.zeros(1, 16, 4, 4)]

    with pytest.raises(comfyui.errors.ConfigError, match="^Connect Flux.2's VAE to TripoSplat Conditioning"):
        sampled(comfyui, comfyui.ours(KIND, comfyui.config("cpu,cpu", ulysses=2)), given)
