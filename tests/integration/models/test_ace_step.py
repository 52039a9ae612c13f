"""ACE-Step 1.5 through ComfyUI's nodes, at a length of which a layer with a window sees a part: with codes of its
language model, sound to sing like, neither, and a prompt that is nothing."""

import math

import pytest
import torch

import xdit_backend.parallel.sequence_parallel as usp
from tests.support.tolerances import close, relative_error

KIND, TOLERANCE = "ace-step-1.5", 2e-5
LAYOUTS = {"one": ("cpu", {}), "cfg2": ("cpu,cpu", {"cfg": 2}), "ulysses2": ("cpu,cpu", {"ulysses": 2}),
           "ring2": ("cpu,cpu", {"ring": 2}), "tensor2": ("cpu,cpu", {"tensor": 2}),
           "stages2": ("cpu,cpu", {"pipefusion": 2, "num_patches": 1}),
           "displaced2": ("cpu,cpu", {"displaced": 2, "displaced_mode": "full_sync"})}


def prompts(comfyui):
    """As TextEncodeAceStepAudio1.5 gives it, with codes; and as Conditioning Zero Out makes a negative of it."""
    (text, options), = comfyui.conditioning(KIND, 2)
    options |= {"audio_codes": [[7 * number % 64000 for number in range(40)]]}
    nothing = options | {"conditioning_lyrics": torch.zeros_like(options["conditioning_lyrics"])}
    return [[text, options]], [[torch.zeros_like(text), nothing]]


@pytest.fixture(scope="module")
def wanted(comfyui):
    positive, negative = prompts(comfyui)
    return comfyui.sample(comfyui.native(KIND), KIND, positive=positive, negative=negative)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_and_a_negative_of_nothing_equal_native(comfyui, wanted, layout):
    devices, degrees = LAYOUTS[layout]
    positive, negative = prompts(comfyui)

    result = comfyui.sample(comfyui.ours(KIND, comfyui.config(devices, **degrees)), KIND, positive=positive,
                            negative=negative)

    close(result, wanted, TOLERANCE)


@pytest.mark.slow
def test_another_window_is_another_audio(comfyui, wanted, monkeypatch):
    """So the comparison above is of some tokens beyond it."""
    model = comfyui.native(KIND)
    for module in model.model.diffusion_model.modules():
        if getattr(module, "sliding_window", None):
            monkeypatch.setattr(module, "sliding_window", 1000)
    positive, negative = prompts(comfyui)

    other = comfyui.sample(model, KIND, positive=positive, negative=negative)

    assert relative_error(other, wanted) > 10 * TOLERANCE


def test_a_window_is_of_places_in_the_whole():
    for before, after in ((2, 2), (2, 0), (math.inf, 0)):
        near = usp.Window((before, after), 5).mask(2, 9, "cpu")[0, 0]

        assert near.tolist() == [[-before <= key - query <= after for key in range(9)] for query in (5, 6)]


def test_parts_of_a_batch_on_ranks_of_their_own_are_refused(comfyui):
    with pytest.raises(comfyui.errors.ConfigError, match="Set data_degree to 1.*timbres of all images of a batch"):
        comfyui.ours(KIND, comfyui.config("cpu,cpu", data=2))
