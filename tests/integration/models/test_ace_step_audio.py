"""ACE-Step 1.0 through ComfyUI's nodes: lyrics of a strength, a batch of songs, and a song of which a part stays; what
it cannot have is refused with the reason."""

import pytest
import torch

from tests.support import layouts
from tests.support.tolerances import close, relative_error

KIND, TOLERANCE = "ace-step-1.0", 2e-5
LAYOUTS = {name: layouts.LAYOUTS[name] for name in ("one", "cfg2", "data2", "ulysses2", "ring2", "tensor2")} | {
    "ring4": ("cpu,cpu,cpu,cpu", {"ring": 4})}


def sampled(comfyui, model, strength=0.99):
    """Of two songs. strength: of lyrics, as TextEncodeAceStepAudio says it."""
    positive, negative = (comfyui.conditioning(KIND, seed) for seed in (1, 2))
    positive[0][1]["lyrics_strength"] = strength
    nothing = [[torch.zeros_like(negative[0][0]), {  # as Conditioning Zero Out makes a negative
        **negative[0][1], "conditioning_lyrics": torch.zeros_like(negative[0][1]["conditioning_lyrics"])}]]
    latent = comfyui.latent(KIND, batch=2)
    latent["samples"] += torch.randn(latent["samples"].shape, generator=torch.Generator().manual_seed(4))
    latent["noise_mask"] = (torch.arange(latent["samples"].shape[3]) > 20).float()[None, None]
    return comfyui.sample(model, KIND, positive=positive, negative=nothing, latent=latent)


@pytest.fixture(scope="module")
def wanted(comfyui):
    return sampled(comfyui, comfyui.native(KIND))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_songs_equal_native(comfyui, wanted, layout):
    devices, degrees = LAYOUTS[layout]

    result = sampled(comfyui, comfyui.ours(KIND, comfyui.config(devices, **degrees)))

    close(result, wanted, TOLERANCE)


@pytest.mark.slow
def test_lyrics_of_another_strength_are_another_song(comfyui, wanted):
    other = sampled(comfyui, comfyui.ours(KIND, comfyui.config("cpu,cpu", ring=2)), strength=0.5)

    assert relative_error(other, wanted) > 10 * TOLERANCE


@pytest.mark.parametrize("method", ["pipefusion", "displaced"])
def test_parts_that_are_left_from_the_step_before_are_refused(comfyui, method):
    with pytest.raises(comfyui.errors.ConfigError, match=f"Set {method}_degree to 1.*sums over all tokens"):
        comfyui.ours(KIND, comfyui.config("cpu,cpu", **{method: 2}))


@pytest.mark.parametrize("rows", [3, 8, 20])
def test_a_latent_that_is_no_audio_of_its_is_refused(comfyui, rows):
    """At which ComfyUI's own model ends in an error of torch's."""
    latent = {"samples": torch.zeros(1, 8, rows, 21)}

    with pytest.raises(comfyui.errors.ConfigError, match=f"^Connect Empty Ace Step.* 16 rows, and this one has {rows}"):
        comfyui.sample(comfyui.ours(KIND, comfyui.config()), KIND, steps=1, latent=latent)
    with pytest.raises(RuntimeError):
        comfyui.sample(comfyui.native(KIND), KIND, steps=1, latent=latent)


@pytest.mark.parametrize("strength", [0.99, 1.0, 0.1, 3.7])
def test_a_strength_is_told_in_half_precision_without_a_loss(strength):
    from xdit_backend.models.ace_step import _split_strength
    pieces = _split_strength({"lyrics_strength": strength})["lyrics_strength"]

    assert torch.equal(pieces.bfloat16().float(), pieces) and pieces.sum() == torch.tensor(strength)
