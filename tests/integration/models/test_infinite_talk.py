"""InfiniteTalk, whose network has each token of a video hear the sound of its frame: our MODEL draws what the native
MODEL draws with ComfyUI's node, under every method, with one speaker and with two."""

import pytest
import torch

from tests.integration.sampling.test_additions import Networks
from tests.integration.sampling.test_control import LAYOUTS
from tests.programs.model_nodes import run_node
from tests.support.tolerances import close, relative_error

TOLERANCE, KIND = 2e-5, "wan-i2v"          # relative, float32 on both sides
OF_TWO = {"width": 80, "height": 64}
# in the last, two ranks share the tokens of the first frame
LAYOUTS_OF_TWO = LAYOUTS | {"ulysses2-ring2": ("cpu,cpu,cpu,cpu", {"ulysses": 2, "ring": 2})}


@pytest.fixture(scope="module")
def talk(comfyui, vae_of):
    """talk(model, more of the node's inputs): (MODEL, positive, negative, latent) as ComfyUI's node gives them."""
    networks = Networks(comfyui, vae_of)
    patch = networks.load("infinite-talk", 1)

    def heard(seed):
        generator = torch.Generator().manual_seed(seed)
        return {"encoded_audio_all_layers": [torch.randn(1, 50, 768, generator=generator) for _ in range(13)]}

    def apply(model, masks=None, **more):
        image = torch.rand(1, 56, 72, 3, generator=torch.Generator().manual_seed(5))
        [[text, others]] = comfyui.conditioning(KIND, 2)
        mode = {"mode": "single_speaker"} if masks is None else {
            "mode": "two_speakers", "audio_encoder_output_2": heard(2), "mask_1": masks[:1], "mask_2": masks[1:]}
        with torch.inference_mode():
            return run_node(networks.nodes["WanInfiniteTalkToVideo"], {
                "mode": mode, "model": model, "model_patch": patch,
                # of unlike lengths: ComfyUI's own fails where it runs both prompts in one batch
                "positive": comfyui.conditioning(KIND, 1), "negative": [[text[:, :-1], others]],
                "vae": vae_of("vae-wan", encoder=True), "width": 72, "height": 56, "length": 9,
                "audio_encoder_output_1": heard(1), "motion_frame_count": 5, "start_image": image,
                "audio_scale": 0.8} | more)
    return apply


def sample(comfyui, made, **more):
    model, positive, negative, latent = made[:4]
    return comfyui.sample(model, KIND, positive=positive, negative=negative, latent=latent, steps=2, **more)


@pytest.fixture(scope="module")
def native(comfyui, talk):
    return sample(comfyui, talk(comfyui.native(KIND)))


@pytest.mark.parametrize("layout", [layout if layout == "ulysses2" else pytest.param(layout, marks=pytest.mark.slow)
                                    for layout in LAYOUTS])
def test_every_method_equals_native_ksampler(comfyui, talk, native, layout):
    devices, degrees = LAYOUTS[layout]
    model = comfyui.ours(KIND, comfyui.config(devices, **degrees))

    close(sample(comfyui, talk(model)), native, TOLERANCE)
    silent = talk(model, audio_scale=0.0)
    assert relative_error(sample(comfyui, silent), native) > 50 * TOLERANCE


@pytest.fixture(scope="module")
def masks():
    """Two speakers, side by side; of an image that is a whole number of tokens."""
    left = (torch.arange(80) < 32).expand(1, 64, 80).float()
    return torch.cat([left, 1 - left])


@pytest.fixture(scope="module")
def native_of_two(comfyui, talk, masks):
    return sample(comfyui, talk(comfyui.native(KIND), masks, **OF_TWO))


@pytest.mark.parametrize("layout", [layout if layout in ("one", "ulysses2") else pytest.param(
    layout, marks=pytest.mark.slow) for layout in LAYOUTS_OF_TWO])
def test_two_speakers_equal_native_ksampler(comfyui, talk, masks, native_of_two, layout):
    devices, degrees = LAYOUTS_OF_TWO[layout]
    model = comfyui.ours(KIND, comfyui.config(devices, **degrees))

    close(sample(comfyui, talk(model, masks, **OF_TWO)), native_of_two, TOLERANCE)
    exchanged = talk(model, masks.flip(0), **OF_TWO)
    assert relative_error(sample(comfyui, exchanged), native_of_two) > 50 * TOLERANCE


@pytest.mark.slow
def test_a_video_that_goes_on_equals_native_ksampler(comfyui, talk):
    frames = torch.rand(9, 56, 72, 3, generator=torch.Generator().manual_seed(6))
    results = [sample(comfyui, talk(model, previous_frames=frames)) for model in (
        comfyui.ours(KIND, comfyui.config("cpu,cpu", ring=2)), comfyui.native(KIND))]

    close(*results, TOLERANCE)


def test_what_is_not_run_is_refused_by_name(comfyui, talk, masks):
    model = comfyui.ours(KIND, comfyui.config("cpu"))
    longer = comfyui.latent("wan", size=(7, 9))                # of 3 frames, and the sound is of 2

    with pytest.raises(comfyui.errors.ConfigError, match="masks have 12 tokens for each frame, and this latent has 20"):
        sample(comfyui, talk(model, masks))
    with pytest.raises(comfyui.errors.ConfigError, match="it has 3 masks for two speakers"):
        sample(comfyui, talk(model, torch.cat([masks, masks[:1]]), **OF_TWO))
    with pytest.raises(comfyui.errors.ConfigError, match="for 2 latent frames, and this latent has 3"):
        comfyui.sample(talk(comfyui.ours("wan", comfyui.config("cpu")), length=5)[0], "wan", latent=longer)
    with pytest.raises(comfyui.errors.UnsupportedError, match="it is for Wan, and this is Wan VACE"):
        comfyui.sample(talk(comfyui.ours("wan-vace", comfyui.config("cpu")), width=144, height=128)[0], "wan-vace")
