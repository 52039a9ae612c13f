"""Displaced patches through ComfyUI: synchronous they are KSampler's latents, stale ones the oracle's;
the rule of which is which."""

import sys
from contextlib import contextmanager

import pytest
import torch

from tests.support.displaced_oracle import StaleUNet
from tests.support.tiny_checkpoints import families
from tests.support.tolerances import close, relative_error
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.config import ParallelConfig
from xdit_backend.partition import cut_bands
from xdit_backend.planner.run_time import synchronous_steps

TOLERANCE = 2e-5                           # relative, float32 on both sides
ROUNDING = 1.001                           # of noise levels


class OracleForward:
    """What stands for the diffusion model of ComfyUI's own MODEL:
    for each image of a batch, by its prompt, the oracle."""

    def __init__(self, comfyui, kind, num_ranks, warmup_steps):
        header = open_checkpoint(comfyui.base / "diffusion_models" / comfyui.file(kind))
        self.family, self.num_ranks, self.warmup_steps = families()[kind], num_ranks, warmup_steps
        self.load = lambda: load_transformer(header.spec("float32", "float32"), torch.device("cpu"))
        self.oracles, self.num_stale = {}, 0

    def __call__(self, x, timestep=None, context=None, control=None, transformer_options={}, **extra):
        sigma, sigmas = transformer_options["sigmas"].max().item(), transformer_options["sample_sigmas"].tolist()
        predictions = []
        seen = []
        for image in range(len(x)):
            given = {name: tensor[image:image + 1] for name, tensor in {"context": context, **extra}.items()
                     if torch.is_tensor(tensor)}
            prompt = tuple(tensor.sum().item() for tensor in given.values())
            key = prompt, seen.count(prompt)                   # of several images with one prompt, which
            seen.append(prompt)
            is_stale = key in self.oracles and sigma <= sigmas[self.warmup_steps] * ROUNDING
            if key not in self.oracles:
                loaded = self.load()
                model, config = loaded.model, loaded.config
                bands = cut_bands(x.shape[2], self.num_ranks, 2 ** (len(config["block_out_channels"]) - 1))
                self.oracles[key] = StaleUNet(model, list(zip(bands, bands[1:])), "corrected_async_gn",
                                              ParallelConfig.forecast_keys_values), config
            oracle, config = self.oracles[key]
            self.num_stale += is_stale
            predictions.append(oracle.predict(is_stale, **self.family.forward_arguments(
                x[image:image + 1], timestep[image:image + 1], given, config)))
        return torch.cat(predictions)


@pytest.mark.parametrize("kind, devices, degrees, arguments", [
    ("sdxl", 2, {"displaced": 2}, {"sampler": "heun", "scheduler": "normal", "steps": 3}),
    pytest.param("sd15", 3, {"displaced": 3}, {"sampler": "dpmpp_2s_ancestral", "scheduler": "karras"},
                 marks=pytest.mark.slow),
    pytest.param("sdxl", 4, {"displaced": 2, "cfg": 2}, {"sampler": "dpmpp_2m", "scheduler": "normal"},
                 marks=pytest.mark.slow),
    pytest.param("sdxl", 4, {"displaced": 2, "data": 2}, {"sampler": "euler", "scheduler": "normal"},
                 marks=pytest.mark.slow)],
    ids=str)
def test_stale_steps_equal_the_oracles_through_comfyuis_sampler(comfyui, kind, devices, degrees, arguments):
    """An odd latent, two branches of guidance, one warm-up step; samplers with one call a step and with two;
    a batch's images apart."""
    arguments = {**arguments,
                 "latent": comfyui.latent(kind, batch=degrees.get("data", 1), size=(23 if kind == "sdxl" else 21, 10))}
    model = comfyui.ours(kind, comfyui.config(",".join(["cpu"] * devices), displaced_mode="corrected_async_gn",
                                              **degrees))
    native, oracle = comfyui.native(kind).clone(), OracleForward(comfyui, kind, degrees["displaced"], 1)
    forward = native.model.diffusion_model.forward

    result = comfyui.sample(model, kind, **arguments)
    whole = comfyui.sample(native, kind, **arguments)
    native.model.diffusion_model.forward = oracle
    try:
        reference = comfyui.sample(native, kind, **arguments)
    finally:
        native.model.diffusion_model.forward = forward

    # moments of norms are differences, which enlarge rounding
    close(result, reference, 1e-4)
    assert oracle.num_stale > 0 and relative_error(result, whole) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sdxl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sd15",))])
def test_synchronous_steps_equal_native_ksampler(comfyui, kind):
    """Every step a warm-up step, or full_sync; odd sizes and a batch."""
    for sampler, scheduler, size, settings in (
            ("euler", "normal", (16, 18), {"warmup_steps": 9}),
            ("heun", "karras", (17, 23), {"displaced_mode": "full_sync"}),
            ("dpmpp_2m", "sgm_uniform", (33, 9), {"warmup_steps": 2}),
            ("uni_pc", "simple", (20, 8), {"displaced_mode": "full_sync"})):
        model = comfyui.ours(kind, comfyui.config("cpu,cpu", displaced=2, **settings))
        arguments = {"sampler": sampler, "scheduler": scheduler, "steps": 2,
                     "latent": comfyui.latent(kind, batch=2, size=size)}

        # moments of norms are added up in another order: at odd sizes it is 2.1e-5
        allowed = TOLERANCE * (2 if sampler == "heun" else 1)
        close(comfyui.sample(model, kind, **arguments), comfyui.sample(comfyui.native(kind), kind, **arguments),
              allowed, sampler)


@contextmanager
def noting_calls(comfyui):
    """A list of what each call is, of both branches of guidance at once:
    "once" (nothing is kept), "keep" or "stale"."""
    client, seen = comfyui.groups.client(("cpu", "cpu")), []
    submit = type(client).submit

    def noted(client, spec, layout, num_channels, calls, forward, run):
        seen.append("stale" if forward.stale else "keep" if forward.keep else "once")
        return submit(client, spec, layout, num_channels, calls, forward, run)
    client.submit = noted.__get__(client)
    try:
        yield seen
    finally:
        del client.submit


def stale_calls(comfyui, **arguments):
    with noting_calls(comfyui) as seen:
        comfyui.sample(comfyui.ours("sdxl", comfyui.config("cpu,cpu", displaced=2, **arguments.pop("settings", {}))),
                       "sdxl", **arguments)
    return seen


@contextmanager
def noting_noise(native):
    """A list of the noise level of each call of ComfyUI's own MODEL (of both branches at once),
    and of the run's schedule."""
    seen, schedule, forward = [], [], native.model.diffusion_model.forward

    def noted(x, *args, transformer_options={}, **options):
        schedule[:] = transformer_options["sample_sigmas"].tolist()
        seen.extend([transformer_options["sigmas"].max().item()] * len(x))
        return forward(x, *args, transformer_options=transformer_options, **options)
    native.model.diffusion_model.forward = noted
    try:
        yield seen, schedule
    finally:
        native.model.diffusion_model.forward = forward
    # ComfyUI may ask for the branches at once or one after the other
    assert seen[::2] == seen[1::2]
    seen[:] = seen[::2]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_sampler_runs_displaced(comfyui, part):
    """Synchronous calls give KSampler's latents, with every third sampler. Else all but the first are stale from the
    second step's noise level on, as many as KSampler makes; dpm_adaptive, whose calls depend on an error over the
    latent, has none, nor dpm_fast in two steps."""
    native = comfyui.native("sdxl").clone()
    synchronous, stale = (comfyui.ours("sdxl", comfyui.config("cpu,cpu", displaced=2, warmup_steps=steps))
                          for steps in (100, 1))
    for number, sampler in enumerate(comfyui.samplers.SAMPLER_NAMES[part::8]):
        arguments = {"sampler": sampler, "scheduler": "normal", "steps": 2,
                     "latent": comfyui.latent("sdxl", size=(8, 6)),
                     # it makes hundreds of calls from pure noise
                     "denoise": 0.2 if sampler == "dpm_adaptive" else 1.0}
        with noting_noise(native) as (sigmas, schedule):
            reference = comfyui.sample(native, "sdxl", **arguments)
        expected = ["keep"] + ["stale" if sigma <= schedule[1] * ROUNDING else "keep" for sigma in sigmas[1:]]

        with noting_calls(comfyui) as calls:
            result = comfyui.sample(stale, "sdxl", **arguments)

        if sampler == "dpm_adaptive":
            assert calls == ["once"] * len(sigmas)
            close(result, reference, 1e-4, sampler)
            continue
        assert calls == expected and result.isfinite().all(), sampler
        assert ("stale" in calls) == (sampler != "dpm_fast"), sampler
        if calls[1] == "stale":                                # what it uses is of another noise level
            assert relative_error(result, reference) > 1e-5, sampler
        if number % 3 == part % 3:
            close(comfyui.sample(synchronous, "sdxl", **arguments), reference, 1e-4, sampler)


@pytest.mark.parametrize("arguments, expected", [
    ({"sampler": "euler", "steps": 3}, ["keep", "stale", "stale"]),
    ({"sampler": "euler", "steps": 3, "settings": {"warmup_steps": 0}}, ["keep", "stale", "stale"]),
    ({"sampler": "euler", "steps": 3, "settings": {"warmup_steps": 2}}, ["keep", "keep", "stale"]),
    # its second call is at the next step's noise
    ({"sampler": "heun", "steps": 2}, ["keep", "stale", "stale"]),
    # so is this one's, but for rounding
    ({"sampler": "dpmpp_2s_ancestral", "steps": 2}, ["keep", "stale", "stale"]),
    # its second call is halfway between the two steps' noise
    ({"sampler": "dpm_2", "steps": 2}, ["keep", "keep", "stale"]),
    ({"sampler": "euler", "steps": 2, "settings": {"displaced_mode": "full_sync"}}, ["once", "once"])], ids=str)
def test_staleness_is_counted_in_calls_and_warm_up_in_noise(comfyui, arguments, expected):
    assert stale_calls(comfyui, **arguments) == expected


@pytest.mark.parametrize("num_steps", [1, 4])
def test_the_forecast_counts_synchronous_steps_as_they_run(comfyui, num_steps):
    """With one call of the model a step."""
    staleness = sys.modules[f"{comfyui.pack.__name__}.nodes.bridge.sampling.warmup"].Staleness
    sigmas = torch.linspace(1, 0, num_steps + 1)
    for warmup_steps in range(num_steps + 3):
        run, count = staleness(sigmas, warmup_steps), 0
        for sigma in sigmas[:-1].tolist():
            count += run.is_synchronous({"one"}, sigma)
            run.hold({"one"})

        assert count == synchronous_steps(num_steps, warmup_steps)


def test_pieces_of_a_latent_are_synchronous(comfyui):
    positive = comfyui.conditioning("sdxl", 1) + comfyui.conditioning("sdxl", 3)
    positive[1][1]["area"] = (3, 10, 0, 6)                     # too few rows for two devices, even
    settings = {"positive": positive, "steps": 2}

    assert set(stale_calls(comfyui, **settings)) == {"once"}
    result = comfyui.sample(comfyui.ours("sdxl", comfyui.config("cpu,cpu", displaced=2)), "sdxl", **settings)
    close(result, comfyui.sample(comfyui.native("sdxl"), "sdxl", **settings), TOLERANCE)


def test_img2img_and_inpainting_are_displaced_too(comfyui):
    generator = torch.Generator().manual_seed(3)
    latent = {"samples": torch.randn(1, 4, 16, 18, generator=generator), "noise_mask": torch.zeros(1, 128, 144)}
    latent["noise_mask"][:, 40:, 60:] = 1.0
    arguments = {"latent": latent, "denoise": 0.6, "steps": 4}

    assert stale_calls(comfyui, **arguments) == ["keep", *["stale"] * 3]
    result = comfyui.sample(comfyui.ours("sdxl", comfyui.config("cpu,cpu", displaced=2, warmup_steps=4)), "sdxl",
                            **arguments)
    close(result, comfyui.sample(comfyui.native("sdxl"), "sdxl", **arguments), TOLERANCE)


def test_the_same_run_again_is_the_same_and_nothing_is_left(comfyui):
    model = comfyui.ours("sd15", comfyui.config("cpu,cpu", displaced=2))
    first, other = comfyui.sample(model, "sd15"), comfyui.sample(
        model, "sd15", latent=comfyui.latent("sd15", size=(24, 8)))
    client = comfyui.groups.client(("cpu", "cpu"))

    assert other.isfinite().all() and torch.equal(comfyui.sample(model, "sd15"), first)
    assert [numbers["exchange_bytes"] for numbers in client.report_memory().values()] == [0, 0]
    assert client.group.segments.names() == []


def test_what_cannot_be_displaced_is_refused_in_words(comfyui):
    with pytest.raises(comfyui.errors.ConfigError,
                       match="^Set displaced_degree to at most 1, .* too high for a latent of 7 rows, "):
        comfyui.sample(comfyui.ours("sd15", comfyui.config("cpu,cpu", displaced=2)), "sd15",
                       latent=comfyui.latent("sd15", size=(7, 16)))
    with pytest.raises(comfyui.errors.ConfigError, match="displaced_degree=2 and pipefusion_degree=2"):
        comfyui.config("cpu,cpu,cpu,cpu", displaced=2, pipefusion=2)
    with pytest.raises(comfyui.errors.ConfigError,
                       match="Set displaced_mode to auto, corrected_async_gn"):
        comfyui.config("cpu,cpu", displaced=2, displaced_mode="stale")


def test_the_node_says_how_it_runs(comfyui, said):
    area = comfyui.conditioning("sd15", 1)
    area[0][1]["area"] = (16, 8, 0, 0)
    for prompt in (None, area):
        comfyui.sample(comfyui.ours("sd15", comfyui.config("cpu,cpu", displaced=2, warmup="auto")), "sd15", steps=1,
                       positive=prompt)

    assert said[0] == ("running on cpu, cpu: DistriFusion 2, sync_gn (norms exchanged at once: a device has 1 row of "
                       "the smallest images, fewer than 4)")
    assert any("DistriFusion 2, every step synchronous, because this workflow uses an area for a prompt" in text
               for text in said)
