"""Wan-Animate 2 with what ComfyUI's node for it gives equals ComfyUI's own loader under every method that it has."""

import importlib

import pytest
import torch

from tests.integration.models.test_video import clip_vision, image
from tests.integration.models.test_wan_kinds import LAYOUTS, ODD, VAE
from tests.programs.model_nodes import model_nodes, run_node
from tests.support.model_zoo import lacks_module, takes
from tests.support.tiers import by_default
from tests.support.tolerances import close, relative_error
from xdit_backend.models import FAMILIES

KIND, FAMILY = "wan-animate-2", FAMILIES["Wan Animate 2"]
TOLERANCE = 2e-5                           # relative, float32
ABLE = {name: layout for name, layout in LAYOUTS.items() if takes(FAMILY, layout[1])} | {
    "cfg2-ulysses2": ("cpu,cpu,cpu,cpu", {"cfg": 2, "ulysses": 2})}
POSE = {"reference_image": image(4, *ODD), "pose_video": image(3, *ODD, frames=9),
        "clip_vision_output": clip_vision(5)}
# each changes the result
CASES = {"strengths": POSE | {"pose_strength": 0.7, "reference_image_strength": 1.3,
                              "clip_vision_output_pose": clip_vision(6)},
         "pose": POSE, "no pose": {"reference_image": POSE["reference_image"]},
         "pose at some steps": POSE | {"pose_start_percent": 0.4, "pose_end_percent": 0.8},
         "going on": POSE | {"continue_motion": image(7, *ODD, frames=2)}}

pytestmark = pytest.mark.skipif(lacks_module(FAMILY), reason=f"this ComfyUI has no {FAMILY.transformer}")


@pytest.fixture(scope="module")
def requested(comfyui):
    """requested(case): prompts and latent, as ComfyUI's node gives them."""
    model_nodes(comfyui)

    def ask(case):
        prompts = {of: [[text, {}] for text, _ in comfyui.conditioning(KIND, seed)]
                   for of, seed in (("positive", 1), ("negative", 2), ("positive_pose", 3))}
        with torch.inference_mode():
            positive, negative, latent, *_ = run_node(comfyui.nodes.NODE_CLASS_MAPPINGS["WanAnimate2ToVideo"], {
                **prompts, "vae": VAE, "width": ODD[0], "height": ODD[1], "length": 9, "batch_size": 1,
                "video_frame_offset": 0, **CASES[case]})
        return {"positive": positive, "negative": negative, "latent": latent}
    return ask


@pytest.fixture(scope="module")
def native(comfyui, requested):
    made = {}

    def sample(case):
        if case not in made:
            made[case] = comfyui.sample(comfyui.native(KIND), KIND, **requested(case))
        return made[case]
    return sample


@pytest.mark.parametrize("layout", by_default(("one", "ulysses2"), ABLE))
def test_every_method_equals_native_ksampler(comfyui, requested, native, layout):
    devices, degrees = ABLE[layout]

    result = comfyui.sample(comfyui.ours(KIND, comfyui.config(devices, **degrees)), KIND, **requested("strengths"))

    close(result, native("strengths"), TOLERANCE)


@pytest.mark.parametrize("case", by_default(("no pose",), [case for case in CASES if case != "strengths"]))
def test_what_else_the_node_gives_equals_native_ksampler(comfyui, requested, native, case):
    result = comfyui.sample(comfyui.ours(KIND, comfyui.config("cpu,cpu", ulysses=2)), KIND, **requested(case))

    close(result, native(case), TOLERANCE)
    assert all(relative_error(native(other), native(case)) > 1e-3 for other in CASES if other != case)


def cached(comfyui, model, dtype):
    return comfyui.nodes.NODE_CLASS_MAPPINGS["WanAnimate2Cache"].execute(model, "cpu", dtype).args[0]


def test_a_cache_of_the_pose_changes_nothing_unless_it_rounds(comfyui, requested, native):
    want = comfyui.sample(cached(comfyui, comfyui.native(KIND), "default"), KIND, **requested("pose"))
    model = comfyui.ours(KIND, comfyui.config("cpu,cpu", ulysses=2))

    close(comfyui.sample(cached(comfyui, model, "default"), KIND, **requested("pose")), want, TOLERANCE)
    close(want, native("pose"), TOLERANCE)
    with pytest.raises(comfyui.errors.UnsupportedError, match="WanAnimate2Cache with a dtype other than default"):
        comfyui.sample(cached(comfyui, model, "int8"), KIND, **requested("pose"))


@pytest.mark.parametrize("method", ["ring", "pipefusion"])
def test_methods_without_all_tokens_are_rejected(comfyui, method):
    with pytest.raises(comfyui.errors.ConfigError, match="each of its frames attends to its own frame of the pose"):
        comfyui.ours(KIND, comfyui.config("cpu,cpu", **{method: 2}))


def test_a_pose_of_another_length_is_rejected(comfyui, requested):
    arguments = requested("pose")
    for _, options in (*arguments["positive"], *arguments["negative"]):
        options["pose_video_latent"] = options["pose_video_latent"][:, :, :-1]

    with pytest.raises(comfyui.errors.ConfigError, match="this latent needs a pose of 3 x 11 x 7 .* has 2 x 11 x 7"):
        comfyui.sample(comfyui.ours(KIND, comfyui.config()), KIND, **arguments)


def test_a_frame_that_attends_to_another_frame_of_the_pose_is_found(comfyui, monkeypatch):
    """By the comparison before the first run, of the class with itself as the workers have it."""
    check = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.model.family_check")
    module = importlib.import_module(f"{comfyui.pack.__name__}.xdit_backend.models.wan_animate2")
    family, attend = module.WAN_ANIMATE2, module._by_frames
    monkeypatch.setattr(module, "_by_frames", lambda frames, size, strength, function, q, k, v, *pose: attend(
        frames, size, strength, function, q, k, v, *(each.roll(size, 2) for each in pose)))
    base_model = comfyui.ours(KIND, comfyui.config()).model

    found = check.compare(check.build_pair(family, base_model))

    assert "predicts another latent in a test" in found["prediction"]
