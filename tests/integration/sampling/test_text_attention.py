"""PLADIS and Normalized Attention Guidance of the attention to a U-Net's text, of other packs: latents equal those of
the native MODEL under every method, and functions that compute something else are rejected."""

import functools

import pytest

from tests.integration.sampling.test_pack_patches import compare
from tests.support.ip_adapter import adapter_of, apply, import_pack
from tests.support.pack_patches import sparsified, text_guided
from tests.support.tolerances import close

OUTER = ("input_blocks.4", "output_blocks.3", "output_blocks.4")
REFUSED = "a replaced text cross-attention"


@pytest.mark.parametrize("kind, method, settings", [
    ("sdxl", "cfg", {}), ("sd15", "cfg", {"kind": "sparsemax", "scale": 1.5, "blocks": OUTER}),
    ("sd15", "displaced", {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("sdxl", "data", {"scale": 0.5}), ("sd2", "one", {}),
        ("sdxl", "displaced", {"blocks": OUTER})))])
def test_attention_with_sparse_weights_equals_native(comfyui, kind, method, settings):
    compare(comfyui, kind, method, functools.partial(sparsified, **settings))


@pytest.mark.parametrize("weights", [
    "entmax(logits, sparse_func)", "2 * logits.softmax(-1) - entmax(logits, sparse_func)",
    "pladis_scale * entmax(2 * logits, sparse_func) + (1 - pladis_scale) * logits.softmax(-1)", "logits.softmax(-1)"])
def test_other_weights_are_rejected(comfyui, weights):
    ours = sparsified(comfyui.ours("sd15", comfyui.config()), weights=weights)

    with pytest.raises(comfyui.errors.UnsupportedError, match=REFUSED):
        comfyui.sample(ours, "sd15", steps=1)


def guide(comfyui, kind, **settings):
    return functools.partial(text_guided, conditioning=comfyui.conditioning(kind, 3, tokens=21), **settings)


@pytest.mark.parametrize("kind, method, settings, task", [
    ("sdxl", "cfg", {}, {}), ("sd15", "displaced", {"blocks": OUTER}, {}),
    ("sd15", "data", {}, {"cfg": 1.0, "batch": 2}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("sd15", "cfg", {"tau": 9.0, "alpha": 1.0}, {"batch": 2}), ("sd2", "one", {}, {}),
        ("sdxl", "displaced", {}, {"cfg": 1.0})))])
def test_attention_guided_from_a_second_text_equals_native(comfyui, kind, method, settings, task):
    task = dict(task)

    compare(comfyui, kind, method, guide(comfyui, kind, **settings),
            latent=comfyui.latent(kind, batch=task.pop("batch", 1)), **task)


def test_guidance_acts_between_its_noise_levels(comfyui):
    sampling = comfyui.native("sd15").get_model_object("model_sampling")
    middle = float(sampling.percent_to_sigma(0.4))

    compare(comfyui, "sd15", "cfg", guide(comfyui, "sd15", end=middle), steps=3)
    compare(comfyui, "sd15", "cfg", guide(comfyui, "sd15", start=-1.0), acts=False)


def test_guidance_of_guided_and_sparse_attention_equals_native(comfyui):
    first, second = guide(comfyui, "sd15"), guide(comfyui, "sd15", scale=1.0, alpha=0.7)

    compare(comfyui, "sd15", "cfg", lambda model: second(first(sparsified(model))))


def test_weights_of_the_text_are_the_files(comfyui):
    """Nodes call these layers themselves."""
    text, path = comfyui.conditioning("sdxl", 3)[0][0], "middle_block.1.transformer_blocks.0.attn2"
    models = comfyui.ours("sdxl", comfyui.config()), comfyui.native("sdxl")
    ours, native = (model.get_model_object("diffusion_model").get_submodule(path) for model in models)
    for name in ("to_k", "to_v"):
        close(getattr(ours, name)(text), getattr(native, name)(text), 1e-6)


@pytest.mark.parametrize("result", ["far", "positive", "alpha * far + (1 - alpha) * against",
                                    "(alpha * far + (1 - alpha) * positive).roll(1, 1)"])
def test_other_guidance_is_rejected(comfyui, result):
    with pytest.raises(comfyui.errors.UnsupportedError, match=REFUSED):
        comfyui.sample(guide(comfyui, "sd15", result=result)(comfyui.ours("sd15", comfyui.config())), "sd15", steps=1)


def test_batches_of_prompts_and_videos_are_rejected(comfyui):
    text = comfyui.conditioning("sd15", 3)
    with pytest.raises(comfyui.errors.UnsupportedError, match="^Connect one prompt to Normalized Attention Guidance"):
        comfyui.sample(text_guided(comfyui.ours("sd15", comfyui.config()), [[text[0][0].repeat(2, 1, 1), {}]]), "sd15",
                       steps=1)
    svd = comfyui.ours("svd", comfyui.config())
    guided = guide(comfyui, "svd", source=comfyui.native("svd"))
    for change, node in ((functools.partial(sparsified, blocks=("input_blocks",)), "PLADIS"),
                         (guided, "Normalized Attention Guidance .sd-perturbed-attention.")):
        with pytest.raises(comfyui.errors.UnsupportedError, match=f"^Remove {node}: it is for images, and Stable"):
            comfyui.sample(change(svd), "svd", steps=1)


def test_guidance_of_image_adapters_equals_native(comfyui, tmp_path):
    pack, net = import_pack(tmp_path), comfyui.native("sd15").model.diffusion_model
    adapter = adapter_of(net, is_xl=False)
    change = guide(comfyui, "sd15", blocks=OUTER)

    compare(comfyui, "sd15", "cfg", lambda model: change(apply(pack, model, net, adapter)))
