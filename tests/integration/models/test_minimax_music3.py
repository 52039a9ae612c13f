"""MiniMax Music 3 with what ComfyUI's nodes for it give equals ComfyUI's own loader under every method that it has."""

import pytest
import torch

from tests.support.layouts import LAYOUTS
from tests.support.model_zoo import lacks_module, takes
from tests.support.tiers import by_default
from tests.support.tolerances import close, relative_error
from xdit_backend.models import FAMILIES

KIND, FAMILY = "minimax-music-3", FAMILIES["MiniMax Music 3"]
TOLERANCE = 2e-5                           # relative, float32
ABLE = {name: layout for name, layout in LAYOUTS.items() if takes(FAMILY, layout[1])} | {
    "ulysses2-ring2": ("cpu,cpu,cpu,cpu", {"ulysses": 2, "ring": 2}),
    "ulysses2-tensor2": ("cpu,cpu,cpu,cpu", {"ulysses": 2, "tensor": 2})}
# seconds of audio, number of songs, and frames of 1/25 s of what the text encoder gives: 3 windows, whose last ones
# have zeros as conditioning; one, of less than the conditioning; one of all that a window can have; two, of a batch
CASES = {"windows": (24.0, 1, 400), "short": (3.0, 1, 120), "one window": (8.0, 1, 200), "batch": (9.0, 2, 225)}

pytestmark = pytest.mark.skipif(lacks_module(FAMILY), reason=f"this ComfyUI has no {FAMILY.transformer}")


@pytest.fixture(scope="module")
def requested(comfyui):
    """requested(case): prompts and latent, as ComfyUI's nodes give them."""
    from comfy_extras.nodes_minimax_music import EmptyMiniMaxMusic3LatentAudio

    def request(case):
        seconds, batch, frames = CASES[case]
        return {"latent": EmptyMiniMaxMusic3LatentAudio.execute(seconds, batch).args[0],
                **{name: comfyui.conditioning(KIND, seed, frames) for name, seed in (("positive", 1),
                                                                                     ("negative", 2))}}
    return request


@pytest.fixture(scope="module")
def native(comfyui, requested):
    made = {}

    def sample(case):
        if case not in made:
            made[case] = comfyui.sample(comfyui.native(KIND), KIND, **requested(case))
        return made[case]
    return sample


@pytest.mark.parametrize("layout", by_default(("one", "ulysses2", "ring2"), ABLE))
def test_every_method_equals_native_ksampler(comfyui, requested, native, layout):
    devices, degrees = ABLE[layout]

    result = comfyui.sample(comfyui.ours(KIND, comfyui.config(devices, **degrees)), KIND, **requested("windows"))

    assert result.shape[2] > 2 * 689
    close(result, native("windows"), TOLERANCE)


@pytest.mark.parametrize("case", by_default(("batch",), [case for case in CASES if case != "windows"]))
def test_other_lengths_equal_native_ksampler(comfyui, requested, native, case):
    result = comfyui.sample(comfyui.ours(KIND, comfyui.config("cpu,cpu", ulysses=2)), KIND, **requested(case))

    close(result, native(case), TOLERANCE)


def test_the_strength_of_the_conditioning_changes_the_result_as_natively(comfyui, requested, native):
    arguments = requested("short")
    for _, options in arguments["positive"]:
        options["conditioning_scale"] = torch.full((1, 1, 1), 0.5)

    wanted = comfyui.sample(comfyui.native(KIND), KIND, **arguments)
    result = comfyui.sample(comfyui.ours(KIND, comfyui.config("cpu,cpu", ring=2)), KIND, **arguments)

    close(result, wanted, TOLERANCE)
    assert relative_error(wanted, native("short")) > 1e-3


@pytest.mark.parametrize("degrees", [{"pipefusion": 2}, {"displaced": 2}])
def test_methods_that_reuse_keys_of_a_window_are_rejected(comfyui, degrees):
    with pytest.raises(comfyui.errors.ConfigError, match="each of its windows of 689 latent frames passes through all"):
        comfyui.ours(KIND, comfyui.config("cpu,cpu", **degrees))
