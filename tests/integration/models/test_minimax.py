"""MiniMax H3 through the nodes equals ComfyUI's own: video and audio, keyframes and references of every kind, text that
images have made, schedules of its node, and files whose times are a curve."""

import itertools

import pytest
import torch

from tests.integration.conftest import in_parts
from tests.support.comfy_quants import save_comfy_quant
from tests.support.tiers import by_default
from tests.support.tolerances import close, relative_error

LAYOUTS = {"one": ("cpu", {}), "cfg2": ("cpu,cpu", {"cfg": 2}), "ulysses2": ("cpu,cpu", {"ulysses": 2}),
           "ring2": ("cpu,cpu", {"ring": 2}), "tensor2": ("cpu,cpu", {"tensor": 2}),
           "stages2": ("cpu,cpu", {"pipefusion": 2, "num_patches": 1}),
           "displaced2": ("cpu,cpu", {"displaced": 2, "displaced_mode": "full_sync"})}
TEXT, FRAMES, AUDIO_LENGTH, CANVAS = 11, 7, 9, (6, 9)          # of more than one group of five frames, odd columns


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def clean_latent(seed, rows=6, columns=10, frames=1):
    return drawn(seed, 1, 24, frames, rows, columns)


def image(seed, rows, columns):
    return {"kind": "image", "latent_h": rows, "latent_w": columns, "latent": clean_latent(seed, rows, columns)}


def video(seed, frames, audio_length=0):
    return {"kind": "video_audio" if audio_length else "video", "latent_t": frames, "latent_h": 4, "latent_w": 6,
            "ref_audio_t": audio_length, "latent": clean_latent(seed, 4, 6, frames),
            "audio_latent": drawn(seed + 1, 1, 32, 2, audio_length) if audio_length else None}


def audio(seed, audio_length):
    return {"kind": "audio", "ref_audio_t": audio_length, "audio_latent": drawn(seed, 1, 32, 2, audio_length)}


def tags(*runs):
    """Of the text's tokens, by runs of (kind, length)."""
    return torch.tensor([[kind for kind, length in runs for _ in range(length)]])


NUM_PIXELS = 1 + 4 * 4 + 1 + 4                                 # of so many frames, the last of which is a keyframe
FIRST, LAST = ({"resolved_frame_index": index, "latent": clean_latent(index + 20)} for index in (0, NUM_PIXELS - 1))
CASES = {
    "text": {}, "tags": {"minimax_token_tags": tags((1, 3), (0, 4), (1, 2), (2, 1), (1, 1))},
    "first": {"minimax_keyframes": [FIRST], "minimax_frame_count": NUM_PIXELS},
    "last": {"minimax_keyframes": [LAST], "minimax_frame_count": NUM_PIXELS},
    "both": {"minimax_keyframes": [FIRST, LAST], "minimax_frame_count": NUM_PIXELS,
             "minimax_token_tags": tags((0, 6), (1, 5))},
    "images": {"minimax_refs": [image(3, 4, 10), image(4, 8, 4)]},
    "video": {"minimax_refs": [video(5, 2)]},
    "all": {"minimax_refs": [image(6, 2, 4), video(7, 6, 4), video(9, 2), audio(11, 5), audio(12, 1)],
            "minimax_token_tags": tags((2, 1), (0, 5), (1, 5))}}
ON_TWO = dict(zip(CASES, itertools.cycle([name for name in LAYOUTS if name != "one"])))


def prompts(case):
    """Positive and negative; of another text, with the same images."""
    return [[[drawn(seed, 1, TEXT, 24), CASES[case]]] for seed in (1, 2)]


def sampled(comfyui, model, case, kind="minimax-h3", steps=3):
    positive, negative = prompts(case)
    columns = CANVAS[1] + CANVAS[1] % 2 if "minimax_keyframes" in CASES[case] else CANVAS[1]
    latent = {"samples": in_parts(torch.zeros(1, 24, FRAMES, CANVAS[0], columns), torch.zeros(1, 32, 2, AUDIO_LENGTH))}
    found = comfyui.sample(model, kind, steps=steps, positive=positive, negative=negative, latent=latent)
    return found.unbind()


@pytest.fixture(scope="module")
def native(comfyui):
    made = {}

    def sample(case, kind="minimax-h3"):
        if (case, kind) not in made:
            made[case, kind] = sampled(comfyui, comfyui.native(kind), case, kind)
        return made[case, kind]
    return sample


def compare(result, want):
    for part, of_native in zip(result, want, strict=True):
        assert of_native.isfinite().all() and of_native.std() > 0.1
        close(part, of_native, 1e-4)


@pytest.mark.parametrize("case, layout", [
    *((case, "one") for case in CASES), *ON_TWO.items(),
    *(pytest.param("all", layout, marks=pytest.mark.slow) for layout in sorted({*LAYOUTS} - {"one", ON_TWO["all"]}))])
def test_video_and_audio_equal_native(comfyui, native, case, layout):
    devices, degrees = LAYOUTS[layout]

    compare(sampled(comfyui, comfyui.ours("minimax-h3", comfyui.config(devices, **degrees)), case), native(case))


@pytest.mark.parametrize("layout", by_default({"one", "ulysses2", "stages2"}, list(LAYOUTS)))
def test_guides_at_any_frame_of_images_and_audio_equal_native(comfyui, native, monkeypatch, layout):
    """As Add Guide for MiniMax H3 gives them, of which ComfyUI 0.33.0 and earlier have only the first and the last
    frame: an image in the middle, a clip, a clip with audio and audio alone, after references."""
    import comfy.ldm.minimax.model
    if not hasattr(comfy.ldm.minimax.model, "_ref_t_span"):
        pytest.skip("this ComfyUI has keyframes at the first and the last frame only")
    guides = [{"resolved_frame_index": 4, "latent": clean_latent(31)},
              {"resolved_frame_index": 2, "latent": clean_latent(32, frames=2), "audio_latent": drawn(33, 1, 32, 2, 3)},
              {"resolved_frame_index": 7, "audio_latent": drawn(34, 1, 32, 2, 2)}]
    monkeypatch.setitem(CASES, "guides", {"minimax_keyframes": guides, "minimax_refs": [image(3, 4, 10), audio(11, 5)]})
    devices, degrees = LAYOUTS[layout]

    result = sampled(comfyui, comfyui.ours("minimax-h3", comfyui.config(devices, **degrees)), "guides")

    compare(result, native("guides"))
    assert relative_error(native("guides")[0], native("first")[0]) > 1e-3


@pytest.mark.parametrize("layout", by_default({"one", "ulysses2", "tensor2"}, list(LAYOUTS)))
@pytest.mark.parametrize("of", [("video", "audio"), *(pytest.param((each,), marks=pytest.mark.slow)
                                                      for each in ("video", "audio"))])
def test_inpainting_with_a_time_of_each_token_equals_native(comfyui, monkeypatch, layout, of):
    """Masks with values between 0 and 1. ComfyUI 0.33.0 and earlier do not tell the model of them."""
    from comfy import model_base
    if not hasattr(model_base.MiniMaxH3, "_denoise_mask_conds"):
        pytest.skip("this ComfyUI inpaints without times of tokens")
    parts = drawn(40, 1, 24, FRAMES, *CANVAS), drawn(41, 1, 32, 2, AUDIO_LENGTH)
    masks = [torch.ones(part.shape) for part in parts]
    if "video" in of:
        masks[0][:, :, 2:, :3], masks[0][:, :, 1, :, 4:] = 0.0, 0.4
    if "audio" in of:
        masks[1][..., :4], masks[1][..., 5] = 0.0, 0.7
    latent = {"samples": in_parts(*parts)}
    config = comfyui.config(LAYOUTS[layout][0], **LAYOUTS[layout][1])

    def inpainted(model, masked=True):
        positive, negative = prompts("text")
        return comfyui.sample(model, "minimax-h3", positive=positive, negative=negative,
                              latent=latent | ({"noise_mask": in_parts(*masks)} if masked else {})).unbind()
    want = inpainted(comfyui.native("minimax-h3"))

    compare(inpainted(comfyui.ours("minimax-h3", config)), want)
    assert relative_error(want[0], inpainted(comfyui.native("minimax-h3"), masked=False)[0]) > 1e-3


@pytest.mark.parametrize("case, other", [
    ("tags", "text"), ("last", "first"), ("both", "last"), ("images", "text"), ("video", "images"), ("all", "video")])
def test_what_is_given_changes_the_video_and_the_audio(native, case, other):
    assert min(relative_error(one, another) for one, another in zip(native(case), native(other))) > 1e-3


@pytest.mark.parametrize("layout", ["one", "ulysses2", "stages2", "tensor2"])
def test_a_file_whose_times_are_a_curve_equals_native(comfyui, native, layout):
    devices, degrees = LAYOUTS[layout]
    ours = comfyui.ours("minimax-h3-curve", comfyui.config(devices, **degrees))

    compare(sampled(comfyui, ours, "all", "minimax-h3-curve"), native("all", "minimax-h3-curve"))


def test_schedules_of_its_node_are_honoured(comfyui, native):
    from comfy_extras.nodes_minimax_h3 import MiniMaxH3SigmaShift
    shifted = [sampled(comfyui, MiniMaxH3SigmaShift.execute(model, 5.0, 2.0).args[0], "text")
               for model in (comfyui.ours("minimax-h3", comfyui.config("cpu,cpu", ulysses=2)),
                             comfyui.native("minimax-h3"))]

    compare(*shifted)
    assert relative_error(shifted[0][1], native("text")[1]) > 1e-2


@pytest.mark.parametrize("layout", by_default({"ulysses2", "tensor2"}, list(LAYOUTS)))
def test_a_file_as_comfy_org_publishes_it_equals_native(comfyui, layout):
    """int8 whose inputs are rotated, and times as a curve. Two roundings that fall to either side are as far apart."""
    folder, name = comfyui.base / "diffusion_models", "minimax-h3-int8_convrot.safetensors"
    if not (folder / name).exists():
        _, quantised = save_comfy_quant(folder / name, folder / comfyui.file("minimax-h3-curve"), "int8_convrot")
        assert len(quantised) > 12
    devices, degrees = LAYOUTS[layout]
    ours = comfyui.load_model.execute(name, "default", comfyui.config(devices, **degrees)).args[0]
    with torch.inference_mode():
        native = comfyui.nodes.UNETLoader().load_unet(name, "default")[0]

    result, want = sampled(comfyui, ours, "all"), sampled(comfyui, native, "all")

    for part, of_native in zip(result, want, strict=True):
        close(part, of_native, 2e-2)
