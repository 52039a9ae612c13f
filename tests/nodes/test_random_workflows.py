"""Workflows drawn at random give what ComfyUI's own model gives: the combinations that no other test thinks of.

A failure names the number of the workflow; the same number draws the same workflow.
"""

import importlib
import random

import pytest
import torch

from tests.tolerances import close

NUM_WORKFLOWS = 8                          # of each layout
TOLERANCE = 1e-4                           # relative; samplers that divide by small differences of predictions enlarge rounding
LAYOUTS = {"auto": {}, "cfg": {"cfg": 2}, "data": {"data": 2}, "ulysses": {"ulysses": 2}, "ring": {"ring": 2},
           "one patch": {"pipefusion": 2, "num_patches": 1}, "warm-up": {"pipefusion": 2, "num_patches": 3, "warmup_steps": 1000},
           "warm-up by sequence": {"pipefusion": 2, "num_patches": 4, "warmup_steps": 1000, "warmup": "sequence"}}
KINDS = ("sd3", "sd3", "sd35", "wan")
SIZES = ((16, 18), (8, 24), (15, 17), (9, 31), (2, 6), (3, 3), (2, 2), (31, 5), (1, 8))


def draw(comfyui, number):
    """A workflow by its number: what to do, in words."""
    pick = random.Random(number).choice
    return {
        "kind": pick(KINDS), "node": pick(("KSampler", "Parallel Sampler", "KSamplerAdvanced", "SamplerCustomAdvanced")),
        "sampler": pick(comfyui.samplers.KSampler.SAMPLERS), "scheduler": pick(comfyui.samplers.KSampler.SCHEDULERS),
        "steps": pick((1, 2, 3, 4)), "cfg": pick((1.0, 0.5, 1.5, 4.0, 7.5)), "denoise": pick((1.0, 1.0, 0.6)), "seed": number,
        "size": pick(SIZES), "frames": pick((1, 2, 3, 5)), "batch": pick((1, 1, 2, 3)), "tokens": pick((20, 1, 77)),
        "latent": pick(("empty", "picture", "noise mask", "batch index")),
        "range": (pick((0, 1)), pick((2, 10000))), "noise": pick(("enable", "disable")),
        "prompt": pick(("plain", "plain", "mask", "area", "combine", "average", "range", "zero out", "longer", "same")),
        "change": pick(("none", "none", "RescaleCFG", "ModelSamplingSD3", "CFGOverride", "APG", "DifferentialDiffusion")),
        "guider": pick(("BasicGuider", "CFGGuider", "DualCFGGuider", "PerpNegGuider", "DualModelGuider")),
    }


def prompts(comfyui, drawn):
    """The positive and the negative prompt of a workflow."""
    nodes = comfyui.nodes
    make = lambda seed, tokens=drawn["tokens"]: comfyui.conditioning(drawn["kind"], seed, tokens=tokens)  # noqa: E731
    positive, negative, other = make(1), make(2), make(4, 33)
    mask = torch.zeros(1, 64, 64)
    mask[:, :30] = 1
    if drawn["prompt"] == "mask":
        positive = (nodes.ConditioningSetMask().append(positive, mask, "default", 0.8)[0]
                    + nodes.ConditioningSetMask().append(other, 1 - mask, "mask bounds", 1.0)[0])
    elif drawn["prompt"] == "area":
        positive = nodes.ConditioningSetAreaPercentage().append(positive, 0.5, 1.0, 0.25, 0.0, 1.0)[0] + other
    elif drawn["prompt"] == "combine":
        positive = positive + make(5)
    elif drawn["prompt"] == "average":
        positive = nodes.ConditioningAverage().addWeighted(positive, make(4, 12), 0.4)[0]
    elif drawn["prompt"] == "range":
        positive = (nodes.ConditioningSetTimestepRange().set_range(positive, 0.0, 0.5)[0]
                    + nodes.ConditioningSetTimestepRange().set_range(other, 0.4, 1.0)[0])
    elif drawn["prompt"] == "zero out":
        negative = nodes.ConditioningZeroOut().zero_out(negative)[0]
    elif drawn["prompt"] == "longer":
        positive = other
    elif drawn["prompt"] == "same":
        negative = make(1)
    return positive, negative


def latent(comfyui, drawn):
    generator = torch.Generator().manual_seed(drawn["seed"])
    samples = comfyui.latent(drawn["kind"], batch=drawn["batch"], size=drawn["size"])["samples"]
    if samples.ndim == 5:
        samples = samples[:, :, :1].repeat(1, 1, drawn["frames"], 1, 1)
    made = {"samples": samples if drawn["latent"] == "empty" else torch.randn(samples.shape, generator=generator)}
    if drawn["latent"] == "noise mask":
        made["noise_mask"] = torch.rand(1, 1, *drawn["size"], generator=generator)
    elif drawn["latent"] == "batch index":
        made["batch_index"] = [3 * index + 1 for index in range(drawn["batch"])]
    return made


def changed(model, drawn):
    """The MODEL with the node of the workflow that changes it."""
    extras = lambda name: importlib.import_module(f"comfy_extras.{name}")  # noqa: E731
    if drawn["change"] == "RescaleCFG":
        return extras("nodes_model_advanced").RescaleCFG().patch(model, 0.7)[0]
    if drawn["change"] == "ModelSamplingSD3":
        return extras("nodes_model_advanced").ModelSamplingSD3().patch(model, 5.0)[0]
    if drawn["change"] == "CFGOverride":
        return extras("nodes_custom_sampler").CFGOverride.execute(model, 2.0, 0.2, 0.8).args[0]
    if drawn["change"] == "APG":
        return extras("nodes_apg").APG.execute(model, 1.0, 5.0, 0.3).args[0]
    if drawn["change"] == "DifferentialDiffusion":
        return extras("nodes_differential_diffusion").DifferentialDiffusion.execute(model, 0.8).args[0]
    return model


def guider(comfyui, model, drawn, positive, negative):
    custom, third = importlib.import_module("comfy_extras.nodes_custom_sampler"), comfyui.conditioning(drawn["kind"], 3)
    if drawn["guider"] == "BasicGuider":
        return custom.BasicGuider.execute(model, positive).args[0]
    if drawn["guider"] == "DualCFGGuider":
        return custom.DualCFGGuider.execute(model, positive, third, negative, drawn["cfg"], 1.5, "regular").args[0]
    if drawn["guider"] == "PerpNegGuider":
        return importlib.import_module("comfy_extras.nodes_perpneg").PerpNegGuider.execute(
            model, positive, negative, third, drawn["cfg"], 0.7).args[0]
    if drawn["guider"] == "DualModelGuider":
        return custom.DualModelGuider.execute(model, positive, drawn["cfg"], model.clone(), negative).args[0]
    return custom.CFGGuider.execute(model, positive, negative, drawn["cfg"]).args[0]


def run(comfyui, model, drawn):
    """The workflow's latent with this MODEL; Parallel Sampler is KSampler for ComfyUI's own."""
    model, (positive, negative), samples = changed(model, drawn), prompts(comfyui, drawn), latent(comfyui, drawn)
    arguments = drawn["seed"], drawn["steps"], drawn["cfg"], drawn["sampler"], drawn["scheduler"], positive, negative, samples
    with torch.inference_mode():
        if drawn["node"] == "KSamplerAdvanced":
            return comfyui.nodes.KSamplerAdvanced().sample(model, drawn["noise"], *arguments, *drawn["range"], "enable")[0]["samples"]
        if drawn["node"] == "SamplerCustomAdvanced":
            custom = importlib.import_module("comfy_extras.nodes_custom_sampler")
            sigmas = custom.BasicScheduler.execute(model, drawn["scheduler"], drawn["steps"], drawn["denoise"]).args[0]
            return custom.SamplerCustomAdvanced.execute(
                custom.RandomNoise.execute(drawn["seed"]).args[0], guider(comfyui, model, drawn, positive, negative),
                custom.KSamplerSelect.execute(drawn["sampler"]).args[0], sigmas, samples).args[0]["samples"]
        if drawn["node"] == "Parallel Sampler" and isinstance(model, comfyui.shell.ShellPatcher):
            return comfyui.parallel_sampler.execute(model, *arguments, drawn["denoise"]).args[0]["samples"]
        return comfyui.nodes.KSampler().sample(model, *arguments, drawn["denoise"])[0]["samples"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_workflows_drawn_at_random_equal_native(comfyui, layout):
    """Or are refused in our words; what ComfyUI's own model cannot run (too few steps for a scheduler, say) does not count."""
    first, num_equal = 1000 * list(LAYOUTS).index(layout), 0
    for number in range(first, first + NUM_WORKFLOWS):
        drawn = draw(comfyui, number)
        try:
            want = run(comfyui, comfyui.native(drawn["kind"]), drawn)
        except Exception:
            continue
        try:
            result = run(comfyui, comfyui.ours(drawn["kind"], comfyui.config("cpu,cpu", **LAYOUTS[layout])), drawn)
        except (comfyui.errors.ConfigError, comfyui.errors.UnsupportedError):
            continue

        finite = torch.isfinite(want)
        assert torch.equal(finite, torch.isfinite(result)), drawn
        if finite.any():                                       # one step of some schedulers is NaN
            close(result[finite], want[finite], TOLERANCE, drawn)
        num_equal += 1
    assert num_equal > NUM_WORKFLOWS // 2
