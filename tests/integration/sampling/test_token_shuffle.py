"""Token Perturbation Guidance of other packs: latents equal those of the native MODEL, whose random orders the host
draws, and functions that do something else are rejected."""

import functools

import pytest
import torch

from tests.integration.sampling.test_pack_patches import compare
from tests.support.pack_patches import shuffled
from tests.support.tolerances import close

DEEP = ("input_blocks.7", "input_blocks.8", "middle_block")


@pytest.mark.parametrize("kind, method, blocks, sampler", [
    ("sdxl", "cfg", DEEP, "euler"), ("sd15", "data", None, "euler_ancestral"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("sdxl", "one", None, "euler"), ("sd15", "cfg", None, "dpmpp_sde"), ("sd2", "cfg", DEEP, "euler")))])
def test_blocks_with_shuffled_tokens_equal_native(comfyui, kind, method, blocks, sampler):
    compare(comfyui, kind, method, functools.partial(shuffled, blocks=blocks), sampler=sampler)


def test_other_orders_give_other_latents(comfyui, monkeypatch):
    """What the test above compares depends on the orders that are drawn."""
    change, randperm = functools.partial(shuffled, blocks=DEEP), torch.randperm
    native = comfyui.sample(change(comfyui.native("sdxl")), "sdxl", steps=2)
    ours = change(comfyui.ours("sdxl", comfyui.config("cpu,cpu", cfg=2)))
    comfyui.sample(ours, "sdxl", steps=2)                      # functions are tested before the next line
    monkeypatch.setattr(torch, "randperm", lambda *args, **options: randperm(*args, **options).flip(0))

    with pytest.raises(AssertionError):
        close(comfyui.sample(ours, "sdxl", steps=2), native, 1e-3)


@pytest.mark.parametrize("tokens", ["x.flip(1)", "2 * x[:, order]", "x[:, order].roll(1, 1)",
                                    "x[:, torch.randperm(x.shape[1])]"])
def test_functions_that_do_something_else_are_rejected(comfyui, tokens):
    ours = shuffled(comfyui.ours("sd15", comfyui.config()), tokens=tokens)

    with pytest.raises(comfyui.errors.UnsupportedError, match="a replaced diffusion_model.input_blocks.1.1.trans"):
        comfyui.sample(ours, "sd15", steps=1)


def test_methods_and_patches_that_need_other_tokens_are_rejected(comfyui):
    displaced = comfyui.ours("sd15", comfyui.config("cpu,cpu", displaced=2))
    with pytest.raises(comfyui.errors.UnsupportedError, match="^Use cfg_degree or data_degree instead of displaced"):
        comfyui.sample(shuffled(displaced), "sd15", steps=1)
    from comfy_extras.nodes_model_downscale import PatchModelAddDownscale
    shrunk = PatchModelAddDownscale.execute(shuffled(comfyui.ours("sd15", comfyui.config())), 3, 2.0, 0.0, 0.35, True,
                                            "bicubic", "bicubic").args[0]
    with pytest.raises(comfyui.errors.UnsupportedError, match="^Remove Token Perturbation Guidance or PatchModelAddD"):
        comfyui.sample(shrunk, "sd15", steps=1)
    svd = comfyui.ours("svd", comfyui.config())
    with pytest.raises(comfyui.errors.UnsupportedError, match="^Remove Token Perturbation Guidance: it is for image"):
        comfyui.sample(shuffled(svd), "svd", steps=1)
