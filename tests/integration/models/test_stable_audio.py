"""Stable Audio through ComfyUI's nodes: how long a sound is to be, a part of a sound that stays, a batch; and a file
without what says numbers to the model."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.layouts import LAYOUTS
from tests.support.tolerances import close, relative_error

TOLERANCE = 2e-5
KINDS = "stable-audio-open", "stable-audio-3"


def sampled(comfyui, model, kind, seconds=30.0):
    """Of two sounds, of which a part stays. seconds: as ConditioningStableAudio says them."""
    from comfy_extras.nodes_audio import ConditioningStableAudio
    positive, negative = ConditioningStableAudio.execute(comfyui.conditioning(kind, 1), comfyui.conditioning(kind, 2),
                                                         1.0, seconds).args
    latent = comfyui.latent(kind, batch=2)
    latent["samples"] += torch.randn(latent["samples"].shape, generator=torch.Generator().manual_seed(4))
    latent["noise_mask"] = (torch.arange(latent["samples"].shape[2]) > 20).float()[None, None]
    return comfyui.sample(model, kind, positive=positive, negative=negative, latent=latent)


@pytest.fixture(scope="module")
def wanted(comfyui):
    return {kind: sampled(comfyui, comfyui.native(kind), kind) for kind in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_of_a_audio_equals_native(comfyui, wanted, kind, layout):
    devices, degrees = LAYOUTS[layout]

    result = sampled(comfyui, comfyui.ours(kind, comfyui.config(devices, **degrees)), kind)

    close(result, wanted[kind], TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_another_length_is_another_audio(comfyui, wanted, kind):
    other = sampled(comfyui, comfyui.ours(kind, comfyui.config("cpu,cpu", ring=2)), kind, seconds=12.0)

    assert relative_error(other, wanted[kind]) > 10 * TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_without_what_says_seconds_is_refused(comfyui, kind):
    folder = comfyui.base / "diffusion_models"
    tensors = load_file(folder / comfyui.file(kind))
    save_file({name: tensor for name, tensor in tensors.items() if not name.startswith("conditioner.")},
              folder / f"{kind}-alone.safetensors")

    with pytest.raises(comfyui.errors.CheckpointError, match="^Use the all-in-one checkpoint .* lacks conditioner"):
        comfyui.load_model.execute(f"{kind}-alone.safetensors", "fp32", comfyui.config("cpu"))
