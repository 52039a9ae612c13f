"""Video models with what ComfyUI's own nodes add to a prompt (pictures, CLIP vision tokens, masks) equal ComfyUI's own loader."""

from types import SimpleNamespace

import pytest
import torch

from tests.model_nodes import model_nodes, run_node
from tests.nodes.test_pipefusion import sample_oracle
from tests.tolerances import close, relative_error

TOLERANCE, STALE = 2e-5, 1e-5              # relative, float32
LAYOUTS = {"one": ("cpu", {}), "ulysses2": ("cpu,cpu", {"ulysses": 2}), "cfg2": ("cpu,cpu", {"cfg": 2}),
           "pipefusion2": ("cpu,cpu", {"pipefusion": 2, "num_patches": 3, "warmup_steps": 100})}
SIZES = {"wide": (96, 48), "odd": (56, 72), "tall": (40, 104)}                 # pixels, width and height


def picture(seed, width, height, frames=1):
    return torch.rand(frames, height, width, 3, generator=torch.Generator().manual_seed(seed))


def clip_vision(seed, tokens=5):
    states = torch.randn(1, tokens, 1280, generator=torch.Generator().manual_seed(seed))
    return SimpleNamespace(penultimate_hidden_states=states, last_hidden_state=states)


def wan_start(vae, size):
    return "WanImageToVideo", {"vae": vae, "start_image": picture(3, *size, frames=2), "clip_vision_output": clip_vision(4)}


def wan_start_without_vision(vae, size):
    return "WanImageToVideo", {"vae": vae, "start_image": picture(3, *size)}


def wan_nothing(vae, size):
    return "WanImageToVideo", {"vae": vae}


def wan_first_last(vae, size):
    return "WanFirstLastFrameToVideo", {
        "vae": vae, "start_image": picture(3, *size), "end_image": picture(5, *size),
        "clip_vision_start_image": clip_vision(4), "clip_vision_end_image": clip_vision(6)}


def wan_last(vae, size):
    return "WanFirstLastFrameToVideo", {"vae": vae, "end_image": picture(5, *size), "clip_vision_end_image": clip_vision(6, tokens=9)}


def wan_fun_control(vae, size):
    return "WanFunControlToVideo", {"vae": vae, "start_image": picture(3, *size), "control_video": picture(7, *size, frames=9),
                                    "clip_vision_output": clip_vision(4)}


def wan22_start(vae, size):
    return "Wan22ImageToVideoLatent", {"vae": vae, "start_image": picture(3, *size)}


# (kind of model, kind of VAE, what ComfyUI's node adds)
CASES = {"wan-i2v": ("wan-i2v", "vae-wan", wan_start), "wan-i2v-blind": ("wan-i2v", "vae-wan", wan_start_without_vision),
         "wan-i2v-bare": ("wan-i2v", "vae-wan", wan_nothing),
         "wan-flf": ("wan-flf", "vae-wan", wan_first_last), "wan-flf-last": ("wan-flf", "vae-wan", wan_last),
         "wan22-i2v": ("wan22-i2v", "vae-wan", wan_start), "wan-text": ("wan", "vae-wan", wan_start),
         "wan-fun-control": ("wan-fun-control", "vae-wan", wan_fun_control), "wan22-ti2v": ("wan22-ti2v", "vae-wan22", wan22_start)}


@pytest.fixture(scope="module")
def asked(comfyui, vae_of):
    """asked(case, size): positive, negative and latent as ComfyUI's node gives them."""
    nodes, made = None, {}

    def ask(case, size):
        nonlocal nodes
        if nodes is None:
            model_nodes(comfyui)
            nodes = comfyui.nodes.NODE_CLASS_MAPPINGS
        if (case, size) not in made:
            kind, vae, add = CASES[case]
            width, height = SIZES[size]
            prompts = {"positive": comfyui.conditioning(kind, 1), "negative": comfyui.conditioning(kind, 2)}
            with torch.inference_mode():
                name, arguments = add(vae_of(vae), (width, height))
                given = {"width": width, "height": height, "length": 9, "batch_size": 1, **arguments}
                *changed, latent = run_node(nodes[name], {**prompts, **given})
            prompts |= dict(zip(prompts, changed))
            made[case, size] = {**prompts, "latent": latent}
        return kind_of(case), made[case, size]
    return ask


def kind_of(case):
    return CASES[case][0]


@pytest.fixture(scope="module")
def native(comfyui, asked):
    made = {}

    def sample(case, size):
        if (case, size) not in made:
            kind, arguments = asked(case, size)
            made[case, size] = comfyui.sample(comfyui.native(kind), kind, **arguments)
        return made[case, size]
    return sample


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout, size", [("one", "odd"), ("ulysses2", "wide"), ("cfg2", "odd"), ("pipefusion2", "tall")])
def test_latents_equal_native_ksampler(comfyui, asked, native, case, layout, size):
    devices, degrees = LAYOUTS[layout]
    kind, arguments = asked(case, size)

    result = comfyui.sample(comfyui.ours(kind, comfyui.config(devices, **degrees)), kind, **arguments)

    close(result, native(case, size), TOLERANCE)


@pytest.mark.parametrize("case", ["wan-i2v", "wan22-ti2v"])
def test_stale_patches_equal_the_oracle(comfyui, asked, native, case):
    kind, arguments = asked(case, "wide")
    model = comfyui.ours(kind, comfyui.config("cpu,cpu", pipefusion=2, num_patches=3, warmup_steps=1))
    want = sample_oracle(comfyui, kind, 3, 1, **arguments)

    close(comfyui.sample(model, kind, **arguments), want, STALE)
    assert relative_error(want, native(case, "wide")) > 10 * STALE


def test_pictures_and_their_tokens_change_the_result(native):
    """Else the cases above would compare models that do not look at them."""
    assert relative_error(native("wan-i2v", "odd"), native("wan-i2v-blind", "odd")) > 1e-2
    assert relative_error(native("wan-i2v-blind", "odd"), native("wan-i2v-bare", "odd")) > 1e-2


def test_frames_of_other_pictures_are_refused_by_name(comfyui):
    """Of nodes for other models: frames after the video's own, and references in the context."""
    model = comfyui.ours("wan", comfyui.config("cpu"))
    for key, value in (("time_dim_concat", torch.zeros(1, 16, 1, 16, 18)), ("context_latents", [torch.zeros(1, 16, 1, 16, 18)])):
        positive = comfyui.conditioning("wan", 1)
        positive[0][1][key] = value

        with pytest.raises(comfyui.errors.UnsupportedError, match=f"runs Wan without {key}"):
            comfyui.sample(model, "wan", positive=positive)
