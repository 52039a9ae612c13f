"""Images that a model reads next to its latent (Fill, Canny,
Depth) or as reference latents (Kontext and other edit models)."""

import pytest
import torch

from tests.integration.sampling.test_pipefusion import EXACT, STALE, sample_oracle, staged
from tests.programs.model_nodes import run_node
from tests.support.tiny_checkpoints import families
from tests.support.tolerances import close, relative_error
from xdit_backend.models.common.example_inputs import conditioning_of, options_of

EDIT = ["flux", "flux2", "qwen-image", "qwen-image-2511", "qwen-image-layered", "longcat-image", "ovis-image", "krea-2",
        "joyimage", "mage-flow"]
METHODS = [(kind, method) for kind in EDIT
           for method in (None, *families()[kind].inputs.choices.get("ref_latents_method", ()))
           if method or kind != "krea-2"] + [("flux2-klein", "index_timestep_zero")]
SIZES = [((12, 10), [(8, 14)]), ((7, 9), [(5, 3)]), ((4, 16), [(6, 6), (3, 10)]), ((11, 6), [(12, 4), (4, 4), (9, 7)])]


def random(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def references(kind, sizes, batch=1):
    frames = (1,) if len(families()[kind].inputs.latent.patch) == 3 else ()
    channels = 128 if kind in ("flux2", "flux2-klein", "mage-flow") else 16
    return [random(batch, channels, *frames, *size, seed=number) for number, size in enumerate(sizes)]


def beside(comfyui, kind, seed, size):
    """A prompt with a picture and a mask, as InpaintModelConditioning and InstructPixToPixConditioning give it."""
    positive, mask = comfyui.conditioning(kind, seed), torch.zeros(1, 1, 8 * size[0], 8 * size[1])
    mask[..., 20:70, 30:] = 1.0
    positive[0][1].update(concat_latent_image=random(1, 16, *size), concat_mask=mask)
    return positive


@pytest.mark.parametrize("kind, degrees, size", [
    ("flux-fill", {"ulysses": 2}, (16, 16)), ("flux-fill", {"cfg": 2}, (13, 18)), ("flux-canny", {"ring": 2}, (15, 10)),
    ("flux-fill", {"pipefusion": 2, "num_patches": 4, "warmup_steps": 9}, (16, 14))], ids=str)
def test_images_beside_the_latent_equal_native_ksampler(comfyui, kind, degrees, size):
    arguments = {"positive": beside(comfyui, kind, 1, size), "negative": beside(comfyui, kind, 2, size),
                 "latent": comfyui.latent(kind, size=size)}

    result = comfyui.sample(comfyui.ours(kind, comfyui.config("cpu,cpu", **degrees)), kind, **arguments)

    want = comfyui.sample(comfyui.native(kind), kind, **arguments)
    close(result, want, EXACT)
    without = {**arguments, "positive": comfyui.conditioning(kind, 1), "negative": comfyui.conditioning(kind, 2)}
    assert relative_error(want, comfyui.sample(comfyui.native(kind), kind, **without)) > 100 * EXACT


def test_stale_patches_with_images_beside_the_latent_equal_the_oracle(comfyui):
    arguments = {"positive": beside(comfyui, "flux-fill", 1, (16, 16)),
                 "negative": beside(comfyui, "flux-fill", 2, (16, 16))}

    result = comfyui.sample(staged(comfyui, "flux-fill"), "flux-fill", **arguments)

    close(result, sample_oracle(comfyui, "flux-fill", 4, 1, **arguments), STALE)


def at_the_right(comfyui, size, width):
    """Prompts of HiDream-E1 with a picture each, as InstructPixToPixConditioning gives it, and the latent."""
    prompts = {}
    for seed, name in ((1, "positive"), (2, "negative")):
        prompts[name] = comfyui.conditioning("hidream-i1", seed)
        prompts[name][0][1]["concat_latent_image"] = random(1, 16, size[0], width, seed=seed)
    return {**prompts, "latent": comfyui.latent("hidream-i1", size=size)}


@pytest.mark.parametrize("degrees, size, width", [
    ({"ulysses": 2}, (9, 12), 18), *(pytest.param(*row, marks=pytest.mark.slow) for row in (
        ({"cfg": 2}, (16, 8), 8), ({"ring": 2}, (7, 16), 2), ({"tensor": 2}, (8, 14), 14),
        ({"displaced": 2, "displaced_mode": "full_sync"}, (12, 10), 10),
        ({"pipefusion": 2, "num_patches": 3, "warmup_steps": 9}, (10, 22), 14)))], ids=str)
def test_a_image_to_the_right_of_the_latent_equals_native_ksampler(comfyui, degrees, size, width):
    arguments = at_the_right(comfyui, size, width)

    result = comfyui.sample(comfyui.ours("hidream-i1", comfyui.config("cpu,cpu", **degrees)), "hidream-i1", **arguments)

    want = comfyui.sample(comfyui.native("hidream-i1"), "hidream-i1", **arguments)
    close(result, want, EXACT)
    without = comfyui.sample(comfyui.native("hidream-i1"), "hidream-i1", latent=arguments["latent"])
    assert relative_error(want, without) > 100 * EXACT


def test_stale_patches_with_a_image_to_the_right_equal_the_oracle(comfyui):
    arguments = at_the_right(comfyui, (16, 18), 12)

    result = comfyui.sample(staged(comfyui, "hidream-i1"), "hidream-i1", **arguments)

    close(result, sample_oracle(comfyui, "hidream-i1", 4, 1, **arguments), STALE)


@pytest.mark.parametrize("size, image", [((8, 13), (8, 12)), ((8, 12), (8, 13)), ((8, 12), (10, 12))], ids=str)
def test_a_image_that_cannot_stand_to_the_right_is_refused_with_its_size(comfyui, size, image):
    """ComfyUI's own makes tokens of both, or fails."""
    positive = comfyui.conditioning("hidream-i1", 1)
    positive[0][1]["concat_latent_image"] = random(1, 16, *image)

    with pytest.raises(comfyui.errors.ConfigError, match=rf"{image[0]} x {image[1]} and {size[0]} x {size[1]}"):
        comfyui.sample(comfyui.ours("hidream-i1", comfyui.config("cpu")), "hidream-i1", positive=positive, cfg=1.0,
                       latent=comfyui.latent("hidream-i1", size=size))


def test_a_reference_of_several_frames_equals_native_ksampler(comfyui):
    """As an encode of a batch of pictures is for a VAE of videos. After it, a picture."""
    positive = comfyui.conditioning("qwen-image", 1)
    positive[0][1]["reference_latents"] = [random(1, 16, 3, 7, 6), random(1, 16, 1, 8, 9)]
    arguments = {"positive": positive, "latent": comfyui.latent("qwen-image", size=(10, 8)), "cfg": 1.0}

    result = comfyui.sample(comfyui.ours("qwen-image", comfyui.config("cpu,cpu", ulysses=2)), "qwen-image", **arguments)

    close(result, comfyui.sample(comfyui.native("qwen-image"), "qwen-image", **arguments), EXACT)


@pytest.mark.parametrize("kind, method", METHODS)
def test_references_equal_comfyuis_own_module(comfyui, kind, method):
    """One to three of them, of other shapes than the latent, also of odd ones. At time zero, ComfyUI's Flux.2 fails of
    two images where it takes guidance."""
    family, config = families()[kind], comfyui.transformer_config(kind)
    ours, native = comfyui.ours(kind, comfyui.config("cpu")), comfyui.module(kind)
    for batch, (size, sizes) in enumerate(SIZES, 1):
        frames = (1,) if len(family.inputs.latent.patch) == 3 else ()
        batch = 2 if batch == 4 and (kind, method) != ("flux2", "index_timestep_zero") else 1
        given = conditioning_of(family, config, torch.Generator().manual_seed(5), {"context": 9}, batch)
        given["transformer_options"] = options_of(family, given)
        given |= {"ref_latents": references(kind, sizes, batch)} | (
            {} if method is None else {"ref_latents_method": method})
        x, t = random(batch, family.taken_channels(config), *frames, *size), torch.full((batch,), 0.6)
        with torch.inference_mode():
            result = ours.model.diffusion_model.forward(x, t, **given)
            want = native(x, t, **given)
            without = native(x, t, **{**given, "ref_latents": None})

        close(result, want, EXACT, size)
        assert relative_error(want, without) > 100 * EXACT


def edited(comfyui, kind, sizes=((10, 8), (5, 7)), method=None):
    """A prompt with references, as ReferenceLatent gives it."""
    positive, method = comfyui.conditioning(kind, 1), method or ("index" if kind == "krea-2" else None)
    positive[0][1] |= {"reference_latents": references(kind, sizes)} | (
        {"reference_latents_method": method} if method else {})
    return positive


def test_references_that_krea_2_ignores_are_ignored(comfyui):
    """Its model in ComfyUI heeds them where a workflow says their method."""
    positive = edited(comfyui, "krea-2")
    del positive[0][1]["reference_latents_method"]

    result = comfyui.sample(comfyui.ours("krea-2", comfyui.config("cpu")), "krea-2", positive=positive)

    close(result, comfyui.reference("krea-2"), EXACT)


@pytest.mark.parametrize("more, words", [
    ({"reference_latents_method": "negative_index"},
     "runs Krea 2 with ref_latents_method = index or offset or uxo or index_timestep_zero"),
    ({"reference_latents": [random(1, 16, 3, 6, 6)]}, "adds reference latents of several frames, .* Krea 2")],
                         ids=["method", "frames"])
def test_references_that_krea_2_is_not_run_with_are_refused(comfyui, more, words):
    positive = edited(comfyui, "krea-2")
    positive[0][1] |= more

    with pytest.raises(comfyui.errors.UnsupportedError, match=words):
        comfyui.sample(comfyui.ours("krea-2", comfyui.config("cpu")), "krea-2", positive=positive)


@pytest.mark.parametrize("kind", EDIT)
@pytest.mark.parametrize("degrees",
                         [{"ulysses": 2}, {"cfg": 2}, {"pipefusion": 2, "num_patches": 4, "warmup_steps": 9}], ids=str)
def test_references_of_one_prompt_equal_native_ksampler(comfyui, kind, degrees):
    """The negative prompt has none."""
    positive = edited(comfyui, kind)

    result = comfyui.sample(comfyui.ours(kind, comfyui.config("cpu,cpu", **degrees)), kind, positive=positive)

    close(result, comfyui.sample(comfyui.native(kind), kind, positive=positive), EXACT)


@pytest.mark.parametrize("kind", ["krea-2", "flux2-klein"])
@pytest.mark.parametrize("degrees", [{"ulysses": 2}, *(pytest.param(each, marks=pytest.mark.slow) for each in (
    {"ring": 2}, {"tensor": 2}, {"displaced": 2, "displaced_mode": "full_sync"}, {"ulysses": 2, "compile": "blocks"},
    {"pipefusion": 2, "num_patches": 4, "warmup_steps": 9}))], ids=str)
def test_references_at_time_zero_equal_native_ksampler(comfyui, kind, degrees):
    arguments = {"positive": edited(comfyui, kind, method="index_timestep_zero"),
                 "negative": edited(comfyui, kind, ((6, 6),)), "latent": comfyui.latent(kind, size=(9, 14))}

    result = comfyui.sample(comfyui.ours(kind, comfyui.config("cpu,cpu", **degrees)), kind, **arguments)

    want = comfyui.sample(comfyui.native(kind), kind, **arguments)
    close(result, want, EXACT)
    identical = comfyui.sample(comfyui.native(kind), kind, **arguments | {"positive": edited(comfyui, kind)})
    assert relative_error(identical, want) > 100 * EXACT


@pytest.mark.parametrize("degrees", [{"cfg": 2}, {"pipefusion": 2, "num_patches": 3, "warmup_steps": 9}], ids=str)
def test_images_after_texts_of_unequal_length_equal_native_ksampler(comfyui, degrees):
    """LongCat-Image's begin where their own text ends."""
    arguments = {"positive": edited(comfyui, "longcat-image"),
                 "negative": comfyui.conditioning("longcat-image", 2, tokens=27),
                 "latent": {"samples": torch.zeros(2, 16, 13, 18)}}

    result = comfyui.sample(comfyui.ours("longcat-image", comfyui.config("cpu,cpu", **degrees)), "longcat-image",
                            **arguments)

    close(result, comfyui.sample(comfyui.native("longcat-image"), "longcat-image", **arguments), EXACT)


def test_a_model_whose_tokens_places_comfyui_gives_is_not_called_without_them(comfyui):
    """As a node does that calls the diffusion model itself:
    ComfyUI's own then has all pictures at the text's places."""
    model, (text, _) = comfyui.ours("longcat-image", comfyui.config("cpu")), comfyui.conditioning("longcat-image", 1)[0]

    with pytest.raises(comfyui.errors.UnsupportedError,
                       match="^Use a sampler node, .* without the positions that ComfyUI sets for LongCat-Image"):
        model.model.diffusion_model(torch.zeros(1, 16, 8, 8), torch.ones(1), text)


def test_references_that_comfyuis_model_leaves_out_change_nothing(comfyui):
    positive = comfyui.conditioning("chroma", 1)
    positive[0][1].update(reference_latents=[random(1, 16, 8, 6)], reference_latents_method="index")

    result = comfyui.sample(comfyui.ours("chroma", comfyui.config("cpu,cpu")), "chroma", positive=positive)

    close(result, comfyui.sample(comfyui.native("chroma"), "chroma", positive=positive), EXACT)


@pytest.mark.parametrize("kind", EDIT)
def test_stale_patches_with_references_equal_the_oracle(comfyui, kind):
    positive = edited(comfyui, kind)

    result = comfyui.sample(staged(comfyui, kind), kind, positive=positive)

    close(result, sample_oracle(comfyui, kind, 4, 1, positive=positive), STALE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["krea-2", "flux2-klein"])
def test_stale_patches_with_references_at_time_zero_equal_the_oracle(comfyui, kind):
    positive = edited(comfyui, kind, method="index_timestep_zero")

    result = comfyui.sample(staged(comfyui, kind), kind, positive=positive)

    close(result, sample_oracle(comfyui, kind, 4, 1, positive=positive), STALE)


def test_what_a_family_does_not_do_with_references_is_refused_by_name(comfyui):
    model, positive = comfyui.ours("flux", comfyui.config("cpu")), edited(comfyui, "flux")
    positive[0][1]["reference_latents_method"] = "index_timestep_zero"
    with pytest.raises(comfyui.errors.UnsupportedError,
                       match="= offset or index or uxo, and this workflow's .* has index_t"):
        comfyui.sample(model, "flux", positive=positive)
    positive[0][1].update(reference_latents=[random(1, 4, 8, 8)], reference_latents_method="index")
    with pytest.raises(comfyui.errors.ConfigError,
                       match="reference latent of 4 channels and 4 dims, and this Flux.1 model needs 16 and 4"):
        comfyui.sample(model, "flux", positive=positive)


REFINER = "hunyuanimage-refiner"


def mended(comfyui, size, noise=0.1, image=None, batch=1, guidance=None):
    """Prompts and latent of HunyuanImage's refiner, as Hunyuan Latent Refiner gives them. picture: rows and columns of
    the latent that it mends, where they are not the latent's; guidance: as FluxGuidance says it, or none ("none")."""
    from comfy_extras.nodes_hunyuan import HunyuanRefinerLatent
    prompts = [comfyui.conditioning(REFINER, seed) for seed in (1, 2)]
    for prompt in prompts:
        if guidance is not None:
            prompt[0][1]["guidance"] = None if guidance == "none" else guidance
    positive, negative, latent = run_node(HunyuanRefinerLatent, {
        "positive": prompts[0], "negative": prompts[1], "latent": {"samples": random(batch, 32, 1, *(image or size))},
        "noise_augmentation": noise})
    latent["samples"] = torch.zeros(batch, 32, 1, *size)
    return {"positive": positive, "negative": negative, "latent": latent}


@pytest.mark.parametrize("degrees, options", [
    ({"ulysses": 2}, {"size": (7, 9)}), *(pytest.param(*row, marks=pytest.mark.slow) for row in (
        ({"cfg": 2}, {"size": (5, 12), "noise": 0.0, "guidance": 2.5}),
        ({"data": 2}, {"size": (9, 5), "batch": 3}), ({"ring": 2}, {"size": (11, 6), "picture": (5, 8)}),
        ({"tensor": 2}, {"size": (3, 13), "noise": 0.9}), ({"ulysses": 2, "compile": "blocks"}, {"size": (6, 7)}),
        ({"displaced": 2, "displaced_mode": "full_sync"}, {"size": (10, 9), "guidance": "none"}),
        ({"pipefusion": 2, "num_patches": 3, "warmup_steps": 9}, {"size": (13, 7), "guidance": 8.0})))], ids=str)
def test_a_image_that_is_mended_equals_native_ksampler(comfyui, degrees, options):
    """In every method: of odd sizes and of another size than the latent, with and without noise and guidance."""
    arguments = mended(comfyui, **options)

    result = comfyui.sample(comfyui.ours(REFINER, comfyui.config("cpu,cpu", **degrees)), REFINER, **arguments)

    want = comfyui.sample(comfyui.native(REFINER), REFINER, **arguments)
    assert result.shape[1:3] == (32, 1)
    close(result, want, EXACT)
    other = comfyui.sample(comfyui.native(REFINER), REFINER, **mended(comfyui, **options | {"noise": 0.5}))
    assert relative_error(other, want) > 100 * EXACT


def test_stale_patches_of_a_image_that_is_mended_equal_the_oracle(comfyui):
    arguments = mended(comfyui, (16, 9))

    result = comfyui.sample(staged(comfyui, REFINER), REFINER, **arguments)

    close(result, sample_oracle(comfyui, REFINER, 4, 1, **arguments), STALE)


def test_guidance_changes_what_is_mended(comfyui):
    """That the tests above compare what is heeded."""
    identical, other = (comfyui.sample(comfyui.native(REFINER), REFINER, **mended(comfyui, (6, 6), guidance=guidance))
                    for guidance in (6.0, "none"))

    assert relative_error(other, identical) > 100 * EXACT
    close(identical, comfyui.sample(comfyui.native(REFINER), REFINER, **mended(comfyui, (6, 6))), EXACT)


def test_a_call_that_asks_for_the_time_of_the_next_step_is_refused(comfyui):
    """As a node makes it that calls the refiner's diffusion model itself."""
    model, (text, _) = comfyui.ours(REFINER, comfyui.config("cpu")), comfyui.conditioning(REFINER, 1)[0]

    with pytest.raises(comfyui.errors.UnsupportedError, match="adds the time of the next step"):
        model.model.diffusion_model(torch.zeros(1, 128, 1, 6, 6), torch.ones(1), text)
