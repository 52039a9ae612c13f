"""Ideogram 4's second branch, which has no text, or is of a model of its own: its template's DualModelGuider."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tolerances import close

LAYOUTS = {"one": ("cpu", {}), "cfg2": ("cpu,cpu", {"cfg": 2}), "ulysses2": ("cpu,cpu", {"ulysses": 2}),
           "ring2": ("cpu,cpu", {"ring": 2}), "tensor2": ("cpu,cpu", {"tensor": 2}),
           "stages2": ("cpu,cpu", {"pipefusion": 2, "num_patches": 1}),
           "displaced2": ("cpu,cpu", {"displaced": 2, "displaced_mode": "full_sync"})}


def sampled(comfyui, model, other):
    """Two steps with text for one MODEL and none for the other; other: None: of the same one."""
    from comfy_extras.nodes_custom_sampler import DualModelGuider
    guider = DualModelGuider.execute(model, comfyui.conditioning("ideogram-4", 1), 4.0, other).args[0]
    sigmas = comfyui.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 2)
    noise = torch.randn(1, 128, 6, 5, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        return guider.sample(noise, torch.zeros_like(noise), comfyui.samplers.sampler_object("euler"), sigmas, seed=3)


@pytest.fixture(scope="module")
def other(comfyui):
    """The file of a model with other weights."""
    folder = comfyui.base / "diffusion_models"
    tensors = load_file(folder / comfyui.file("ideogram-4"))
    save_file({name: tensor * 0.9 for name, tensor in tensors.items()}, folder / "ideogram-4-other.safetensors",
              {"format": "pt"})
    return "ideogram-4-other.safetensors"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_branch_without_text_equals_native(comfyui, layout):
    devices, degrees = LAYOUTS[layout]

    result = sampled(comfyui, comfyui.ours("ideogram-4", comfyui.config(devices, **degrees)), None)

    wanted = sampled(comfyui, comfyui.native("ideogram-4"), None)
    assert wanted.abs().max() > 0
    close(result, wanted, 1e-4)


@pytest.mark.parametrize("layout", ["ulysses2", "tensor2"])
def test_a_branch_without_text_of_a_model_of_its_own_equals_native(comfyui, other, layout):
    devices, degrees = LAYOUTS[layout]
    config = comfyui.config(devices, **degrees)

    result = sampled(comfyui, comfyui.ours("ideogram-4", config),
                     comfyui.load_model.execute(other, "fp32", config).args[0])

    native = comfyui.native("ideogram-4")
    wanted = sampled(comfyui, native, comfyui.nodes.UNETLoader().load_unet(other, "default")[0])
    assert (wanted - sampled(comfyui, native, None)).norm() > 1e-3 * wanted.norm()
    close(result, wanted, 1e-4)
