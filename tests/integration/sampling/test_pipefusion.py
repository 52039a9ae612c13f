"""PipeFusion through ComfyUI: patchwise runs of its own samplers equal the native KSampler where nothing is stale, else
the oracle.

The oracle is the native sampler on the whole latent, with a model of stale keys and values in this process.
"""

import functools
import importlib
import sys

import pytest
import torch

from tests.support.model_zoo import Example
from tests.support.pipefusion_oracle import StaleModel
from tests.support.tiny_checkpoints import VARIANTS, families
from tests.support.tolerances import close, relative_error
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.config import ParallelConfig
from xdit_backend.partition import cut_patches
from xdit_backend.planner.planner import choose_num_patches

EXACT, STALE = 2e-5, 1e-5
QUICK = ("sd3", "wan", "lumina-2")           # a picture, a video, and streams that merge
KINDS = [kind for kind, family in families().items()
         if kind not in VARIANTS and not family.plan.is_unet and "pipefusion" not in family.refused]


def kinds(settings):
    """(kind, each of settings) of the quick kinds; (kind, one of settings in turn) of the others."""
    others = [kind for kind in KINDS if kind not in QUICK]
    return [*((kind, each) for kind in QUICK for each in settings),
            *(pytest.param(kind, settings[number % len(settings)], marks=pytest.mark.slow)
              for number, kind in enumerate(others))]


@functools.cache
def transformer(path):
    header = open_checkpoint(path)
    family = header.family
    loaded = load_transformer(header.spec("float32", "float32"), torch.device("cpu"))
    return family, loaded.model, loaded.config


def oracle(comfyui, kind, num_patches, warmup_steps):
    """A MODEL for the native sampler, whose diffusion model is the oracle."""
    family, model, config = transformer(comfyui.base / "diffusion_models" / comfyui.file(kind))
    proxy = comfyui.ours(kind, comfyui.config("cpu"))
    stale = {}
    variant_of = importlib.import_module(
        f"{comfyui.pack.__name__}.nodes.bridge.compatibility.comfyui_variants").variant_of

    def forward(x, timestep, context=None, control=None, transformer_options={}, **extra):
        beside = family.inputs.per_call_inputs(timestep, transformer_options)
        x, transformer_options, finish = family.inputs.components.rescale(x, timestep, extra, transformer_options)
        if isinstance(x, list):
            x, timestep, beside = family.inputs.components.split(x, timestep, config, transformer_options)
        size = family.patch_size(config)
        patches = cut_patches(x.shape, size, choose_num_patches(num_patches, 1, x.shape, size))
        schedule, sigma = transformer_options["sample_sigmas"], transformer_options["sigmas"].max()
        if stale.get("schedule") is not schedule:
            stale.update(schedule=schedule, models={})
        conditioning = {"context": context, **extra}
        key = tuple(transformer_options["cond_or_uncond"])
        if key not in stale["models"]:
            stale["models"][key] = StaleModel(Example(model, family, config, *[None] * 4),
                                              ParallelConfig.forecast_keys_values)
        one = stale["models"][key]
        one.example.conditioning = family.tensors(conditioning | variant_of(family)) | beside
        if warmup_steps >= len(schedule) - 1 or sigma > schedule[warmup_steps] * 1.001:
            prediction = one.predict(x, timestep)
        else:
            dim = patches[0][0].dim
            prediction = torch.cat(
                [one.predict(x, timestep, (patch.start, patch.start + rows)).narrow(dim, patch.start, rows)
                 for patch, rows in patches], dim)
        return finish([family.inputs.components.first(prediction), *one.others] if one.others else prediction)

    remote = proxy.model.remote                                # the workers are not asked; nothing is started
    remote.load = remote.unload = remote.end_run = lambda *base_model: None
    proxy.model.diffusion_model.forward = remote.modules[""][1]["forward"] = forward
    proxy.wrappers.clear()
    return proxy


def sample_oracle(comfyui, kind, num_patches, warmup_steps, change=lambda model: model, **arguments):
    """change(MODEL): what a node does to it."""
    model = change(oracle(comfyui, kind, num_patches, warmup_steps))
    arguments = {"sampler": "euler", "scheduler": "simple", "steps": 3, "cfg": 4.0, "denoise": 1.0} | arguments
    with torch.inference_mode():
        return comfyui.nodes.KSampler().sample(
            model, 7, arguments["steps"], arguments["cfg"], arguments["sampler"], arguments["scheduler"],
            arguments.get("positive") or comfyui.conditioning(kind, 1), arguments.get("negative")
            or comfyui.conditioning(kind, 2),
            arguments.get("latent") or comfyui.latent(kind), arguments["denoise"])[0]["samples"]


def staged(comfyui, kind, **settings):
    return comfyui.ours(kind, comfyui.config("cpu,cpu", **{"pipefusion": 2, "num_patches": 4} | settings))


@pytest.mark.parametrize("kind", QUICK)
@pytest.mark.parametrize("settings", [{"warmup_steps": 3}, {"num_patches": 1}], ids=str)
def test_nothing_stale_equals_native_ksampler(comfyui, kind, settings):
    """Of the other kinds the oracle's first step, which is whole, and test_proxy_model.py are beside native."""
    result = comfyui.sample(staged(comfyui, kind, **settings), kind)

    close(result, comfyui.reference(kind), EXACT)


@pytest.mark.parametrize("kind, patches", kinds([(4, 1), (3, 0)]), ids=str)
def test_stale_patches_equal_the_oracle(comfyui, kind, patches):
    num_patches, warmup_steps = patches
    model = staged(comfyui, kind, num_patches=num_patches, warmup_steps=warmup_steps)
    want = sample_oracle(comfyui, kind, num_patches, warmup_steps)

    close(comfyui.sample(model, kind), want, STALE)
    assert relative_error(want, comfyui.reference(kind)) > 10 * STALE


SAMPLERS = ("euler_ancestral", "heun", "dpmpp_sde", "euler_ancestral_cfg_pp", "dpm_2", "dpmpp_2m", "dpmpp_2m_sde",
            "lcm", "uni_pc", "res_multistep_cfg_pp", "sa_solver", "er_sde")


@pytest.mark.parametrize("sampler",
                         [*SAMPLERS[:4], *(pytest.param(sampler, marks=pytest.mark.slow) for sampler in SAMPLERS[4:])])
def test_stale_patches_of_many_samplers_equal_the_oracle(comfyui, sampler):
    """Noise on the way, several calls a step, history from step to step, guidance inside the sampler."""
    arguments = {"sampler": sampler, "steps": 4}

    result = comfyui.sample(staged(comfyui, "sd3"), "sd3", **arguments)

    close(result, sample_oracle(comfyui, "sd3", 4, 1, **arguments), STALE)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_sampler_patchwise_equals_native_where_nothing_is_stale(comfyui, part):
    for sampler in comfyui.samplers.SAMPLER_NAMES[part::4]:
        # hundreds of calls else
        arguments = {"sampler": sampler, "steps": 4, "denoise": 0.2 if sampler == "dpm_adaptive" else 1.0}

        result = comfyui.sample(staged(comfyui, "sd3", warmup_steps=100), "sd3", **arguments)

        close(result, comfyui.reference("sd3", **arguments), EXACT, sampler)


def test_a_plain_ksampler_runs_patches_too(comfyui):
    """Patch by patch inside each call: the same stale keys and values, so the same picture."""
    model = staged(comfyui, "sd3")
    with torch.inference_mode():
        result = comfyui.nodes.KSampler().sample(model, 7, 3, 4.0, "euler", "simple", comfyui.conditioning("sd3", 1),
                                                 comfyui.conditioning("sd3", 2), comfyui.latent("sd3"),
                                                 1.0)[0]["samples"]

    close(result, sample_oracle(comfyui, "sd3", 4, 1), STALE)


# ComfyUI's class of the last swaps halves of a batch
@pytest.mark.parametrize("kind, warmup", [("sd3", "micro_batches"), ("sd3", "sequence"),
                                          ("hunyuan3d-2.1", "micro_batches")])
def test_ways_to_warm_up_give_the_same_image(comfyui, kind, warmup):
    latent = comfyui.latent(kind, batch=2)
    model = staged(comfyui, kind, warmup=warmup, warmup_steps=2)

    result = comfyui.sample(model, kind, latent=latent, steps=4)

    close(result, sample_oracle(comfyui, kind, 4, 2, latent=latent, steps=4), STALE)


@pytest.mark.parametrize("kind", ["sd3", *(pytest.param(kind, marks=pytest.mark.slow)
                                           for kind in ("flux", "wan", "qwen-image", "lumina-2"))])
def test_odd_sides_equal_the_oracle(comfyui, kind):
    """Models pad the end of a latent with its beginning, which is in another patch."""
    latent, model = comfyui.latent(kind, size=(15, 11)), staged(comfyui, kind)
    if latent["samples"].ndim == 5:                            # one frame: a video is cut into frames
        latent["samples"] = latent["samples"][:, :, :1]
    want = sample_oracle(comfyui, kind, 4, 1, latent=latent, sampler="heun")

    close(comfyui.sample(model, kind, latent=latent, sampler="heun"), want, STALE)
    with torch.inference_mode():
        plain = comfyui.nodes.KSampler().sample(model, 7, 3, 4.0, "heun", "simple", comfyui.conditioning(kind, 1),
                                                comfyui.conditioning(kind, 2), latent, 1.0)[0]["samples"]
    close(plain, want, STALE)


def test_inpainting_and_img2img_equal_the_oracle(comfyui):
    """The noise mask and the latent under it are cut like the rest; warm-up is clipped to the steps that run."""
    generator = torch.Generator().manual_seed(3)
    latent = {"samples": torch.randn(1, 16, 16, 18, generator=generator), "noise_mask": torch.zeros(1, 128, 144)}
    latent["noise_mask"][:, 40:, 60:] = 1.0
    arguments = {"latent": latent, "denoise": 0.6, "steps": 5}

    result = comfyui.sample(staged(comfyui, "sd3"), "sd3", **arguments)

    close(result, sample_oracle(comfyui, "sd3", 4, 1, **arguments), STALE)


def test_prompts_of_different_length_equal_the_oracle(comfyui):
    arguments = {"positive": comfyui.conditioning("sd3", 1, tokens=31), "steps": 4}

    result = comfyui.sample(staged(comfyui, "sd3"), "sd3", **arguments)

    close(result, sample_oracle(comfyui, "sd3", 4, 1, **arguments), STALE)


def test_a_prompt_that_starts_late_runs_whole_when_it_is_first_seen(comfyui):
    """Its keys and values are not there yet; nothing else would be honest.
    With all the rest warm-up, that equals native."""
    early, late = comfyui.conditioning("sd3", 1), comfyui.conditioning("sd3", 5)
    early[0][1].update(start_percent=0.0, end_percent=0.7)
    late[0][1].update(start_percent=0.7, end_percent=1.0)     # the last of four steps
    arguments = {"positive": early + late, "steps": 4}

    result = comfyui.sample(staged(comfyui, "sd3", warmup_steps=3), "sd3", **arguments)

    close(result, comfyui.sample(comfyui.native("sd3"), "sd3", **arguments), EXACT)
    assert relative_error(result, comfyui.sample(comfyui.native("sd3"), "sd3", steps=4)) > 10 * EXACT


@pytest.mark.slow
def test_branches_on_ranks_of_their_own_equal_the_oracle_and_native(comfyui):
    """CFG beside stages: each branch's keys and values are where its patches go, or it runs whole; as the negative one
    does in the last of four steps, where it is alone and another rank's."""
    def four(**settings):
        return comfyui.ours("sd3", comfyui.config("cpu,cpu,cpu,cpu", cfg=2, pipefusion=2, **settings))

    early = comfyui.conditioning("sd3", 1)
    early[0][1].update(start_percent=0.0, end_percent=0.7)
    arguments = {"positive": early, "steps": 4}

    close(comfyui.sample(four(num_patches=4), "sd3"), sample_oracle(comfyui, "sd3", 4, 1), STALE)
    close(comfyui.sample(four(num_patches=4, warmup_steps=3), "sd3", **arguments),
          comfyui.sample(comfyui.native("sd3"), "sd3", **arguments), EXACT)


def test_a_latent_of_one_token_equals_native(comfyui):
    """Too few tokens for stages to share: they run one after the other."""
    latent = comfyui.latent("sd3", size=(2, 2))

    result = comfyui.sample(staged(comfyui, "sd3", warmup="sequence"), "sd3", latent=latent)

    close(result, comfyui.sample(comfyui.native("sd3"), "sd3", latent=latent), EXACT)


@pytest.mark.slow
def test_dpm_adaptive_runs_whole_and_the_node_says_so(comfyui, said):
    arguments = {"sampler": "dpm_adaptive", "steps": 2}

    result = comfyui.sample(staged(comfyui, "sd3"), "sd3", **arguments)

    close(result, comfyui.reference("sd3", **arguments), EXACT)
    assert any("every step synchronous, because this workflow uses dpm_adaptive" in text for text in said)


def test_too_many_patches_for_the_latent_are_fewer_and_the_node_says_so(comfyui, said):
    comfyui.sample(staged(comfyui, "sd3", num_patches=20), "sd3")

    assert any("8 patches (the latent has too few rows for 20)" in text for text in said)


def test_areas_run_whole_and_the_node_says_so(comfyui, said):
    left, right = comfyui.conditioning("sd3", 1), comfyui.conditioning("sd3", 4, tokens=33)
    left[0][1]["area"], right[0][1]["area"] = (16, 10, 0, 0), (16, 12, 0, 6)

    result = comfyui.sample(staged(comfyui, "sd3"), "sd3", positive=left + right)

    close(result, comfyui.sample(comfyui.native("sd3"), "sd3", positive=left + right), EXACT)
    assert any("every step synchronous, because this workflow uses an area for a prompt" in text for text in said)


def test_runs_of_different_shape_do_not_see_each_other(comfyui):
    model = staged(comfyui, "sd3", warmup_steps=0)
    alone = comfyui.sample(model, "sd3")
    comfyui.sample(model, "sd3", latent=comfyui.latent("sd3", size=(24, 10)), seed=3)

    assert torch.equal(comfyui.sample(model, "sd3"), alone)


def test_progress_is_told_once_a_step_and_as_patches_of_long_ones_arrive(comfyui, monkeypatch):
    """Always with the whole latent. What arrives within a step changes the rows of one patch,
    and nothing of the result."""
    model, noise = staged(comfyui, "sd3"), torch.randn(1, 16, 16, 18, generator=torch.Generator().manual_seed(1))
    sampler = sys.modules[comfyui.parallel_sampler.__module__]
    prompts = comfyui.conditioning("sd3", 1), comfyui.conditioning("sd3", 2)

    def sample(shown_s):
        import comfy.sample
        told = []
        patchwise = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.sampling.patchwise_sampler")
        monkeypatch.setattr(patchwise, "SHOWN_S", shown_s)
        with torch.inference_mode():
            return comfy.sample.sample(sampler.patchwise(model), noise, 5, 4.0, "euler", "simple", *prompts, noise * 0,
                                       seed=1, callback=lambda step, denoised, x, total: told.append(
                                           (step, denoised.clone(), total))), told
    (result, told), (again, partly) = sample(1e9), sample(-1.0)

    assert torch.equal(result, again) and torch.equal(told[-1][1], partly[-1][1])
    assert [(step, tuple(denoised.shape), total)
            for step, denoised, total in told] == [(step, (1, 16, 16, 18), 5) for step in range(5)]
    steps = [step for step, *_ in partly]
    assert steps == sorted(steps) and set(steps) == set(range(5)) and len(steps) > 10
    for (_, before, _), (_, after, _) in zip(partly, partly[1:]):
        assert 0 < (before != after).any(dim=3)[0].any(dim=0).sum() <= 8
