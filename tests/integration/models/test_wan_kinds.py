"""Kinds of Wan that are ComfyUI's own modules, with what ComfyUI's nodes for them give (pictures, poses, masks, sound),
equal ComfyUI's own loader at odd sizes, under every method."""

import pytest
import torch

from tests.integration.models.test_video import ImageVAE, clip_vision, image
from tests.integration.sampling.test_pipefusion import sample_oracle
from tests.programs.model_nodes import model_nodes, run_node
from tests.support.tiers import by_default
from tests.support.tolerances import close, relative_error

TOLERANCE, STALE = 2e-5, 1e-5              # relative, float32
LAYOUTS = {"one": ("cpu", {}), "cfg2": ("cpu,cpu", {"cfg": 2}), "ulysses2": ("cpu,cpu", {"ulysses": 2}),
           "ring2": ("cpu,cpu", {"ring": 2}), "usp4": ("cpu,cpu,cpu,cpu", {"ulysses": 2, "ring": 2}),
           "tensor2": ("cpu,cpu", {"tensor": 2}),
           "pipefusion2": ("cpu,cpu", {"pipefusion": 2, "num_patches": 3, "warmup_steps": 100}),
           "displaced2": ("cpu,cpu", {"displaced": 2, "displaced_mode": "full_sync"})}
VAE, ODD = ImageVAE(16, 8), (56, 88)                         # pixels, width and height

VAE.spacial_compression_encode, VAE.latent_channels = (lambda: 8), 16       # which the node of Wan 2.2 Fun asks for


def who(seed, frames=1, size=ODD):
    """Images in the colours of SCAIL-2's masks, half of each of one."""
    colours = torch.tensor([[0.0, 0, 1], [1, 0, 0], [0, 1, 0], [1, 1, 1]])
    halves = colours[torch.randint(0, 4, (frames, 2), generator=torch.Generator().manual_seed(seed))]
    return halves.repeat_interleave(size[0] // 2, 1)[:, None].expand(frames, size[1], size[0], 3)


POSE = {"pose_video": image(3, *ODD, frames=9), "reference_image": image(4, *ODD),
        "clip_vision_output": clip_vision(5)}
MASKS = {"pose_video_mask": who(6, 9), "reference_image": image(4, *ODD, frames=3),
         "reference_image_mask": who(7, 3)}
SCAIL = {"pose_strength": 1.0, "pose_start": 0.0, "pose_end": 1.0, "video_frame_offset": 0, "previous_frame_count": 5}
HEARD = {"audio_encoder_output": {"encoded_audio_all_layers": [
    torch.randn(1, 40, 1024, generator=torch.Generator().manual_seed(layer)) for layer in range(25)]}}
S2V = {"width": 80, "height": 112}         # even sides of a latent that no square of 64 pixels fits
BESIDE = {"ref_image": image(9, 80, 112), "control_video": image(10, 80, 112, frames=5),
          "ref_motion": image(11, 80, 112, frames=9)}
FUN = {"width": 80, "height": 112, "control_video": image(10, 80, 112, frames=9)}
MUSIC = {"audio_feature": torch.randn(1, 90, 35, generator=torch.Generator().manual_seed(13)), "fps": 10.0,
         "audio_inject_scale": 0.7}
# eight parts of a frame, of odd sides
DANCER = {"width": 56, "height": 88, "start_image": image(14, 56, 88, frames=2), "audio_encoder_output": MUSIC,
          "clip_vision_output": clip_vision(15), "clip_vision_output_ref": clip_vision(16, tokens=3)}
# name -> (kind of model, node, what it is given); of a kind, the first has most
CASES = {
    "scail": ("wan-scail", "WanSCAILToVideo", SCAIL | POSE),
    "scail nothing": ("wan-scail", "WanSCAILToVideo", SCAIL),
    "scail in the middle": ("wan-scail", "WanSCAILToVideo", SCAIL | POSE | {
        "pose_strength": 0.7, "pose_start": 0.4, "pose_end": 0.8}),
    "scail one frame": ("wan-scail", "WanSCAILToVideo", SCAIL | POSE | {"length": 1}),
    "scail-2": ("wan-scail-2", "WanSCAILToVideo", SCAIL | POSE | MASKS),
    "scail-2 replacing": ("wan-scail-2", "WanSCAILToVideo", SCAIL | POSE | MASKS | {"replacement_mode": True}),
    "scail-2 going on": ("wan-scail-2", "WanSCAILToVideo", SCAIL | POSE | MASKS | {
        "replacement_mode": True, "previous_frames": image(8, *ODD, frames=7), "video_frame_offset": 7}),
    "scail-2 of a pose": ("wan-scail-2", "WanSCAILToVideo", SCAIL | {"pose_video": POSE["pose_video"]}),
    "s2v": ("wan-s2v", "WanSoundImageToVideo", S2V | HEARD | BESIDE),
    "s2v silent": ("wan-s2v", "WanSoundImageToVideo", S2V | BESIDE),
    "s2v without a picture": ("wan-s2v", "WanSoundImageToVideo", S2V | HEARD),
    "s2v of a picture": ("wan-s2v", "WanSoundImageToVideo", S2V | HEARD | {"ref_image": BESIDE["ref_image"]}),
    "s2v going on": ("wan-s2v", "WanSoundImageToVideoExtend", S2V | HEARD | {
        "ref_image": BESIDE["ref_image"],
        "video_latent": {"samples": torch.randn(1, 16, 7, 14, 10, generator=torch.Generator().manual_seed(12))}}),
    "wandancer": ("wandancer", "WanDancerVideo", DANCER),
    "wandancer of 30 frames a second": ("wandancer", "WanDancerVideo", DANCER | {
        "audio_encoder_output": MUSIC | {"fps": 30.0}}),
    "wandancer of a long frame": ("wandancer", "WanDancerVideo", DANCER | {
        "audio_encoder_output": MUSIC | {"fps": 30 / 7}}),
    "fun": ("wan-fun-control", "Wan22FunControlToVideo", FUN | {"ref_image": BESIDE["ref_image"]}),
    "fun without a picture": ("wan-fun-control", "WanFunControlToVideo", {
        "control_video": image(17, *ODD, frames=9), "clip_vision_output": clip_vision(5)}),
    "wandancer silent": ("wandancer", "WanDancerVideo", DANCER | {"audio_encoder_output": None})}
FIRST = list({kind: case for case, (kind, *_) in reversed(CASES.items())}.values())


@pytest.fixture(scope="module")
def requested(comfyui):
    """asked(case): kind of model; positive, negative and latent as ComfyUI's node gives them."""
    model_nodes(comfyui)

    def ask(case):
        kind, name, given = CASES[case]
        prompts = {"positive": comfyui.conditioning(kind, 1), "negative": comfyui.conditioning(kind, 2)}
        prompts = {of: [[text, {}] for text, _ in prompt] for of, prompt in prompts.items()}
        with torch.inference_mode():
            positive, negative, latent, *_ = run_node(comfyui.nodes.NODE_CLASS_MAPPINGS[name], {
                **prompts, "vae": VAE, "width": ODD[0], "height": ODD[1], "length": 9, "batch_size": 1, **given})
        return kind, {"positive": positive, "negative": negative, "latent": latent}
    return ask


@pytest.fixture(scope="module")
def native(comfyui, requested):
    made = {}

    def sample(case):
        if case not in made:
            kind, arguments = requested(case)
            made[case] = comfyui.sample(comfyui.native(kind), kind, **arguments)
        return made[case]
    return sample


@pytest.mark.parametrize("layout", by_default(("one", "pipefusion2"), LAYOUTS))
@pytest.mark.parametrize("case", FIRST)
def test_every_method_equals_native_ksampler(comfyui, requested, native, case, layout):
    devices, degrees = LAYOUTS[layout]
    kind, arguments = requested(case)

    result = comfyui.sample(comfyui.ours(kind, comfyui.config(devices, **degrees)), kind, **arguments)

    close(result, native(case), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("case, layout", [
    (case, ("ulysses2", "ring2")[number % 2]) for number, case in enumerate(CASES) if case not in FIRST])
def test_what_else_a_node_gives_equals_native_ksampler(comfyui, requested, native, case, layout):
    kind, arguments = requested(case)

    for name in ("one", layout):
        devices, degrees = LAYOUTS[name]
        result = comfyui.sample(comfyui.ours(kind, comfyui.config(devices, **degrees)), kind, **arguments)

        close(result, native(case), TOLERANCE, name)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("scail in the middle", "scail one frame")])
def test_stale_patches_equal_the_oracle(comfyui, requested, native, case):
    kind, arguments = requested(case)
    model = comfyui.ours(kind, comfyui.config("cpu,cpu", pipefusion=2, num_patches=3, warmup_steps=1))
    want = sample_oracle(comfyui, kind, 3, 1, **arguments)

    close(comfyui.sample(model, kind, **arguments), want, STALE)
    assert relative_error(want, native(case)) > 10 * STALE


@pytest.mark.slow
def test_what_a_node_gives_changes_the_result(native):
    """Else the cases above would compare models that do not look at it."""
    for kind in {kind for kind, *_ in CASES.values()}:
        found = [native(case) for case, (of, *_) in CASES.items() if of == kind]
        assert all(relative_error(one, other) > 1e-3 for one, other in zip(found, found[1:])
                   if one.shape == other.shape), kind


def test_scail_refuses_what_comfyuis_model_fails_at(comfyui, requested):
    """And one frame under PipeFusion, whose rows its references would be cut into as well."""
    one, two = comfyui.config("cpu"), comfyui.config("cpu,cpu", pipefusion=2, num_patches=2)
    for case, config, changed, words in (
            ("scail", one, {"reference_latents": [torch.zeros(1, 16, 1, 8, 7)]},
             "^Use one node that makes the reference image and the latent with the same .* has 8 x 7, .* needs 11 x 7"),
            ("scail-2", one, {"driving_mask_28ch": torch.zeros(1, 1, 28, 4, 3)},
             "^Use one node that makes the pose, the matching mask "),
            ("scail-2", one, {"ref_mask_28ch": torch.zeros(1, 6, 28, 11, 9)},
             r"^Use one node that makes the reference images, .* has \(6, 11, 9\) .* needs \(6, 11, 7\)"),
            ("scail one frame", two, {}, "^Make a video of 5 frames or more, or set pipefusion_degree to 1")):
        kind, arguments = requested(case)
        positive = [[text, given | changed] for text, given in arguments["positive"]]
        with pytest.raises(comfyui.errors.ConfigError, match=words):
            comfyui.sample(comfyui.ours(kind, config), kind, **arguments | {"positive": positive})


def test_a_rate_that_no_frame_lasts_by_whole_frames_is_refused_by_name(comfyui, requested):
    """ComfyUI's node gives none."""
    kind, arguments = requested("wandancer")
    positive = [[text, given | {"fps": 29.5}] for text, given in arguments["positive"]]

    with pytest.raises(comfyui.errors.UnsupportedError, match="adds fps .* support it for WanDancer"):
        comfyui.sample(comfyui.ours(kind, comfyui.config("cpu")), kind, **arguments | {"positive": positive})
