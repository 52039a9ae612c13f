"""Enhance-A-Video of other packs: the latents equal those of the native MODEL under every method, and functions that
compute something else are rejected."""

import functools

import pytest

from tests.integration.sampling.test_pack_patches import FAST, METHODS, compare
from tests.support.pack_patches import enhanced
from tests.support.tolerances import close

EVERY = [pytest.param(kind, method, marks=() if (kind, method) in {*(("wan", each) for each in FAST),
                                                                   ("ltx-video", "ulysses")} else pytest.mark.slow)
         for kind in ("wan", "ltx-video") for method in METHODS]


def frames_of(comfyui, kind):
    return comfyui.latent(kind)["samples"].shape[2]


@pytest.mark.parametrize("kind, method", EVERY)
def test_self_attention_enhanced_between_frames_equals_native(comfyui, kind, method):
    compare(comfyui, kind, method, functools.partial(enhanced, frames=frames_of(comfyui, kind)))


@pytest.mark.parametrize("kind, method, task", [
    ("wan", "data", {"batch": 2}), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("wan", "ulysses", {"cfg": 1.0}), ("wan-i2v", "ulysses", {}), ("wan-vace", "cfg", {}),
        ("ltx-2", "ulysses", {})))])
def test_the_factor_is_a_mean_over_all_images_of_a_call(comfyui, kind, method, task):
    task = dict(task)
    latent = comfyui.latent(kind, batch=task.pop("batch", 1))
    frames = 3 if kind == "ltx-2" else latent["samples"].shape[2]

    compare(comfyui, kind, method, functools.partial(enhanced, frames=frames), latent=latent, **task)


def test_the_status_says_why_a_device_is_idle_and_steps_are_synchronous(comfyui, said):
    change = functools.partial(enhanced, frames=frames_of(comfyui, "wan"))
    native = comfyui.sample(change(comfyui.native("wan")), "wan", steps=3)
    for degrees, text in (({"cfg": 2}, "both prompts in one batch, over which Enhance-A-Video averages"),
                          ({"pipefusion": 2, "num_patches": 2, "warmup_steps": 1},
                           "every step synchronous, because this workflow uses Enhance-A-Video"),
                          ({"displaced": 2, "warmup_steps": 1},
                           "every step synchronous, because this workflow uses Enhance-A-Video")):
        ours = change(comfyui.ours("wan", comfyui.config("cpu,cpu", **degrees)))
        close(comfyui.sample(ours, "wan", steps=3), native, 1e-5)
        assert any(text in each for each in said), said


@pytest.mark.parametrize("change", [
    {"factor": "of_others * count"}, {"factor": "2 * of_others * (count + self.enhance_weight)"},
    {"factor": "of_others.neg() + 2"}, {"result": "module.o(2 * out)"}, {"result": "module.o(out).roll(1, 1)"}])
def test_a_factor_that_the_workers_would_compute_otherwise_is_rejected(comfyui, change):
    ours = enhanced(comfyui.ours("wan", comfyui.config()), **change)

    with pytest.raises(comfyui.errors.UnsupportedError,
                       match="a replaced diffusion_model.blocks.0.self_attn.forward"):
        comfyui.sample(ours, "wan", steps=1)


def test_latents_and_patches_that_it_cannot_process_are_rejected(comfyui):
    ours, frames = comfyui.ours("wan", comfyui.config()), frames_of(comfyui, "wan")
    for wrong, text in ((1, "^Remove Enhance-A-Video, or connect a latent of more frames .* has 1"),
                        (7, "^Connect the latent that the sampler gets .* 7 frames, which do not divide the")):
        with pytest.raises(comfyui.errors.ConfigError, match=text):
            comfyui.sample(enhanced(ours, frames=wrong), "wan", steps=1)
    patched = enhanced(ours, frames=frames)
    patched.set_model_attn1_patch(_speakers())
    with pytest.raises(comfyui.errors.UnsupportedError, match="^Remove Enhance-A-Video, or the node that adds Infin"):
        comfyui.sample(patched, "wan", steps=1)


def _speakers():
    from comfy.ldm.wan.model_multitalk import MultiTalkGetAttnMapPatch
    return MultiTalkGetAttnMapPatch(None)
