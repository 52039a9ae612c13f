"""Video models with what ComfyUI's own nodes add to a prompt (pictures, CLIP vision tokens,
masks) equal ComfyUI's own loader."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.integration.sampling.test_pipefusion import sample_oracle
from tests.programs.model_nodes import model_nodes, run_node
from tests.support.tolerances import close, relative_error

TOLERANCE, STALE = 2e-5, 1e-5              # relative, float32
LAYOUTS = {"one": ("cpu", {}), "ulysses2": ("cpu,cpu", {"ulysses": 2}), "cfg2": ("cpu,cpu", {"cfg": 2}),
           "pipefusion2": ("cpu,cpu", {"pipefusion": 2, "num_patches": 3, "warmup_steps": 100})}
SIZES = {"wide": (96, 48), "odd": (56, 72), "tall": (40, 104)}                 # pixels, width and height
SCALES = {"ltx": 4, "hunyuanvideo": 2, "wan-vace": 2, "kandinsky": 2, "cosmos-predict1": 2,
          "cosmos-predict1-video": 2}     # of families whose latents are smaller, or of even sides only


def image(seed, width, height, frames=1):
    return torch.rand(frames, height, width, 3, generator=torch.Generator().manual_seed(seed))


def clip_vision(seed, tokens=5, width=1280):
    states = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(seed))
    return SimpleNamespace(penultimate_hidden_states=states, last_hidden_state=states)


class ImageVAE:
    """In the place of a VAE that takes too long to make or to use.
    scale: pixels of the picture to one of the latent."""

    def __init__(self, channels, scale):
        self.channels, self.scale = channels, scale

    def encode(self, pixels):
        frames, height, width, _ = pixels.shape
        shape = 1, self.channels, (frames - 1) // 4 + 1, height // self.scale, width // self.scale
        return torch.randn(shape, generator=torch.Generator().manual_seed(9))


def wan_start(vae, size):
    return "WanImageToVideo", {"vae": vae, "start_image": image(3, *size, frames=2),
                               "clip_vision_output": clip_vision(4)}


def wan_start_without_vision(vae, size):
    return "WanImageToVideo", {"vae": vae, "start_image": image(3, *size)}


def wan_nothing(vae, size):
    return "WanImageToVideo", {"vae": vae}


def wan_first_last(vae, size):
    return "WanFirstLastFrameToVideo", {
        "vae": vae, "start_image": image(3, *size), "end_image": image(5, *size),
        "clip_vision_start_image": clip_vision(4), "clip_vision_end_image": clip_vision(6)}


def wan_last(vae, size):
    return "WanFirstLastFrameToVideo", {"vae": vae, "end_image": image(5, *size),
                                        "clip_vision_end_image": clip_vision(6, tokens=9)}


def wan_bernini(vae, size):
    """A video of the latent's size, one of another size and fewer frames, and a picture of odd sides."""
    return "BerniniConditioning", {"vae": vae, "source_video": image(3, *size, frames=9), "reference_video":
                                   image(4, 64, 48, frames=5), "reference_images": {"reference_image_0": image(
                                       5, 56, 72)}}


def wan_fun_control(vae, size):
    return "WanFunControlToVideo", {"vae": vae, "start_image": image(3, *size),
                                    "control_video": image(7, *size, frames=9), "clip_vision_output": clip_vision(4)}


def wan22_start(vae, size):
    return "Wan22ImageToVideoLatent", {"vae": vae, "start_image": image(3, *size)}


def wan_vace(vae, size):
    width, height = size
    masks = (torch.rand(9, height, width, generator=torch.Generator().manual_seed(8)) > 0.5).float()
    return "WanVaceToVideo", {"vae": vae, "strength": 0.7, "control_video": image(7, *size, frames=9),
                              "control_masks": masks, "reference_image": image(3, *size)}


def wan_vace_nothing(vae, size):
    return "EmptyHunyuanLatentVideo", {}


def hunyuan_concat(vae, size):
    return "HunyuanImageToVideo", {"vae": vae, "start_image": image(3, *size), "guidance_type": "v1 (concat)"}


def hunyuan_replace(vae, size):
    return "HunyuanImageToVideo", {"vae": vae, "start_image": image(3, *size), "guidance_type": "v2 (replace)"}


def kandinsky_start(vae, size):
    return "Kandinsky5ImageToVideo", {"vae": vae, "start_image": image(3, *size)}


def hunyuan15_start(vae, size):
    return "HunyuanVideo15ImageToVideo", {"vae": vae, "start_image": image(3, *size),
                                          "clip_vision_output": clip_vision(4, width=1152)}


def hunyuan15_nothing(vae, size):
    return "EmptyHunyuanVideo15Latent", {}


def hunyuan15_larger(vae, size):
    """A video that was enlarged, to be drawn anew, and its first picture."""
    width, height = size
    latent = torch.randn(1, 32, 3, height // 16, width // 16, generator=torch.Generator().manual_seed(8))
    return "HunyuanVideo15SuperResolution", {"vae": vae, "latent": {"samples": latent}, "noise_augmentation": 0.7,
                                             "start_image": image(3, *size),
                                             "clip_vision_output": clip_vision(4, width=1152)}


def cosmos_start(vae, size):
    return "CosmosPredict2ImageToVideoLatent", {"vae": vae, "start_image": image(3, *size)}


def cosmos1_start(vae, size):
    return "CosmosImageToVideoLatent", {"vae": vae, "start_image": image(3, *size)}


def cosmos1_nothing(vae, size):
    return "EmptyCosmosLatentVideo", {}


def ltx_start(vae, size):
    return "LTXVImgToVideo", {"vae": vae, "image": image(3, *size), "strength": 0.8}


def frame_rate(vae, size):
    return "LTXVConditioning", {"frame_rate": 12.5}


def ltx_guide(vae, size):
    width, height = size
    latent = torch.randn(1, 128, 3, height // 32, width // 32, generator=torch.Generator().manual_seed(8))
    return "LTXVAddGuide", {"vae": vae, "latent": {"samples": latent}, "image": image(3, *size), "frame_idx": 8,
                            "strength": 1.0}


def ltx_weak_guide(vae, size):
    """Its tokens and the video's read each other less."""
    name, arguments = ltx_guide(vae, size)
    return name, {**arguments, "strength": 0.4}


def ltx_masked_guide(vae, size):
    """Of several frames: some of its tokens are not read, some more than the video's own."""
    name, arguments = ltx_guide(vae, size)
    width, height = size
    mask = (torch.rand(17, height, width, generator=torch.Generator().manual_seed(4)) * 3 - 1).clamp(min=0)
    mask[:, :height // 2] = 0
    return name, {**arguments, "image": image(3, *size, frames=17), "frame_idx": 0, "attention_mask": mask}


def audio():
    """An audio latent, the beginning of which is to stay."""
    samples = torch.randn(1, 8, 7, 16, generator=torch.Generator().manual_seed(9))
    return {"samples": samples, "noise_mask": (torch.arange(7) > 2).float()[:, None].expand(1, 8, 7, 16)}


# (kind of model, kind of VAE, what ComfyUI's node adds)
CASES = {"wan-i2v": ("wan-i2v", "vae-wan", wan_start),
         "wan-i2v-blind": ("wan-i2v", "vae-wan", wan_start_without_vision),
         "wan-i2v-bare": ("wan-i2v", "vae-wan", wan_nothing),
         "wan-flf": ("wan-flf", "vae-wan", wan_first_last), "wan-flf-last": ("wan-flf", "vae-wan", wan_last),
         "wan22-i2v": ("wan22-i2v", "vae-wan", wan_start), "wan-text": ("wan", "vae-wan", wan_start),
         "wan-bernini": ("wan", "vae-wan", wan_bernini),
         "wan-control": ("wan-control", "vae-wan", wan_fun_control),
         "wan22-ti2v": ("wan22-ti2v", "vae-wan22", wan22_start),
         "wan-vace": ("wan-vace", "vae-wan", wan_vace), "wan-vace-bare": ("wan-vace", "vae-wan", wan_vace_nothing),
         "hunyuan-i2v": ("hunyuanvideo-i2v", "vae-hunyuan", hunyuan_concat),
         "hunyuan-replace": ("hunyuanvideo", "vae-hunyuan", hunyuan_replace),
         "hunyuan-skyreels": ("hunyuanvideo-skyreels", "vae-hunyuan", hunyuan_concat),
         "hunyuan15-i2v": ("hunyuanvideo-1.5", ImageVAE(32, 16), hunyuan15_start),
         "hunyuan15-text": ("hunyuanvideo-1.5", ImageVAE(32, 16), hunyuan15_nothing),
         "hunyuan15-sr": ("hunyuanvideo-1.5-distilled", ImageVAE(32, 16), hunyuan15_larger),
         "kandinsky-i2v": ("kandinsky-5", "vae-hunyuan", kandinsky_start),
         "cosmos-i2v": ("cosmos-predict2-video", "vae-wan", cosmos_start),
         "cosmos-text": ("cosmos-predict2", "vae-wan", cosmos_start),
         "cosmos1-i2v": ("cosmos-predict1-video", ImageVAE(16, 8), cosmos1_start),
         "cosmos1-text": ("cosmos-predict1-video", None, cosmos1_nothing),
         "cosmos1-rate": ("cosmos-predict1", None, frame_rate),
         "ltx-i2v": ("ltx-video", "vae-ltx095", ltx_start), "ltx-rate": ("ltx-video", "vae-ltx095", frame_rate),
         "ltx-guide": ("ltx-video", "vae-ltx095", ltx_guide),
         "ltx-weak-guide": ("ltx-video", "vae-ltx095", ltx_weak_guide),
         "ltx-masked-guide": ("ltx-video", "vae-ltx095", ltx_masked_guide),
         "ltx-causal": ("ltx-video-causal", "vae-ltx095", ltx_start),
         "ltx2-i2v": ("ltx-2", "vae-ltx095", ltx_start), "ltx2-guide": ("ltx-2.3", "vae-ltx095", ltx_guide),
         "ltx2-weak-guide": ("ltx-2.3", "vae-ltx095", ltx_weak_guide),
         "ltx2-rate": ("ltx-2-plain", "vae-ltx095", frame_rate)}


@pytest.fixture(scope="module")
def requested(comfyui, vae_of):
    """asked(case, size): positive, negative and latent as ComfyUI's node gives them."""
    nodes, made = None, {}

    def ask(case, size):
        nonlocal nodes
        if nodes is None:
            model_nodes(comfyui)
            nodes = comfyui.nodes.NODE_CLASS_MAPPINGS
        if (case, size) not in made:
            kind, vae, add = CASES[case]
            width, height = (side * SCALES.get(kind if kind in SCALES else kind.partition("-")[0], 1)
                             for side in SIZES[size])
            prompts = {"positive": comfyui.conditioning(kind, 1), "negative": comfyui.conditioning(kind, 2)}
            with torch.inference_mode():
                name, arguments = add(vae_of(vae) if isinstance(vae, str) else vae, (width, height))
                given = {"width": width, "height": height, "length": 9, "batch_size": 1, **arguments}
                outputs = run_node(nodes[name], {**prompts, **given})
            latents = [output for output in outputs if isinstance(output, dict)] or [comfyui.latent(kind, size=(6, 8))]
            if kind.startswith("ltx-2") and not latents[0]["samples"].is_nested:
                latents = run_node(nodes["LTXVConcatAVLatent"], {"video_latent": latents[0], "audio_latent": audio()})
            changed = [output for output in outputs if isinstance(output, list)]
            made[case, size] = {**prompts, **dict(zip(prompts, changed)), "latent": latents[0]}
        return kind_of(case), made[case, size]
    return ask


def kind_of(case):
    return CASES[case][0]


@pytest.fixture(scope="module")
def native(comfyui, requested):
    made = {}

    def sample(case, size):
        if (case, size) not in made:
            kind, arguments = requested(case, size)
            made[case, size] = comfyui.sample(comfyui.native(kind), kind, **arguments)
        return made[case, size]
    return sample


# Of the cases of one kind of model, the first under one of the layouts of two workers, in turn; the others on one.
FIRST = list({kind_of(case): case for case in reversed(CASES)}.values())
ON_TWO = (("pipefusion2", "tall"), ("ulysses2", "wide"), ("cfg2", "odd"))
RUNS = [*((case, "one", "odd") for case in CASES if case not in FIRST),
        *((case, *ON_TWO[number % len(ON_TWO)]) for number, case in enumerate(FIRST))]


@pytest.mark.parametrize("case, layout, size", [
    pytest.param(*run, marks=() if run[0] in ("wan-text", "wan-i2v") else pytest.mark.slow)
    for run in RUNS])
def test_latents_equal_native_ksampler(comfyui, requested, native, case, layout, size):
    devices, degrees = LAYOUTS[layout]
    kind, arguments = requested(case, size)

    result = comfyui.sample(comfyui.ours(kind, comfyui.config(devices, **degrees)), kind, **arguments)

    close(result, native(case, size), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [
    {"cfg": 2}, {"ulysses": 2}, {"ring": 2}, {"tensor": 2}, {"pipefusion": 2, "num_patches": 3, "warmup_steps": 100},
    {"displaced": 2, "warmup_steps": 100}], ids=str)
@pytest.mark.parametrize("case", ["ltx-weak-guide", "ltx-masked-guide", "ltx2-weak-guide"])
def test_guides_of_other_strengths_equal_native_under_every_method(comfyui, requested, native, case, degrees):
    kind, arguments = requested(case, "wide")

    result = comfyui.sample(comfyui.ours(kind, comfyui.config("cpu,cpu", **degrees)), kind, **arguments)

    close(result, native(case, "wide"), TOLERANCE)


@pytest.mark.parametrize("degrees", [
    {"ulysses": 2}, *(pytest.param(degrees, marks=pytest.mark.slow) for degrees in (
        {}, {"cfg": 2}, {"data": 2}, {"ring": 2}, {"tensor": 2}, {"pipefusion": 2, "num_patches": 3,
                                                                  "warmup_steps": 100},
        {"displaced": 2, "warmup_steps": 100}))], ids=str)
def test_references_of_bernini_equal_native_under_every_method(comfyui, requested, native, degrees):
    kind, arguments = requested("wan-bernini", "odd")
    model = comfyui.ours(kind, comfyui.config("cpu,cpu" if degrees else "cpu", **degrees))

    close(comfyui.sample(model, kind, **arguments), native("wan-bernini", "odd"), TOLERANCE)
    bare = {**arguments, "positive": comfyui.conditioning(kind, 1), "negative": comfyui.conditioning(kind, 2)}
    assert relative_error(comfyui.sample(model, kind, **bare), native("wan-bernini", "odd")) > 50 * TOLERANCE


def scaled(comfyui, model):
    model_nodes(comfyui)
    return run_node(comfyui.nodes.NODE_CLASS_MAPPINGS["ScaleROPE"], {
        "model": model, "scale_x": 1.3, "shift_x": -2.0, "scale_y": 0.7, "shift_y": 3.1, "scale_t": 7.0,
        "shift_t": 0.0})[0]


@pytest.mark.parametrize("case, degrees", [
    pytest.param("wan-text", {"ulysses": 2}),
    *(pytest.param("wan-i2v", degrees, marks=pytest.mark.slow) for degrees in (
        {}, {"cfg": 2}, {"ring": 2}, {"tensor": 2}, {"pipefusion": 2, "num_patches": 3, "warmup_steps": 100},
        {"displaced": 2, "warmup_steps": 100})),
    *(pytest.param("wan-vace", degrees, marks=pytest.mark.slow) for degrees in (
        {"ulysses": 2}, {"pipefusion": 2, "num_patches": 3, "warmup_steps": 100}))], ids=str)
def test_scaled_places_equal_native(comfyui, requested, native, case, degrees):
    kind, arguments = requested(case, "wide")
    model = scaled(comfyui, comfyui.ours(kind, comfyui.config("cpu,cpu" if degrees else "cpu", **degrees)))

    want = comfyui.sample(scaled(comfyui, comfyui.native(kind)), kind, **arguments)

    close(comfyui.sample(model, kind, **arguments), want, TOLERANCE)
    assert relative_error(want, native(case, "wide")) > 50 * TOLERANCE
    plain = comfyui.sample(comfyui.ours(kind, comfyui.config("cpu,cpu" if degrees else "cpu", **degrees)), kind,
                           **arguments)
    close(plain, native(case, "wide"), TOLERANCE)              # the workers' model is as it was


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ltx-weak-guide", "ltx-masked-guide"])
def test_without_the_strengths_of_its_tokens_a_guide_gives_another_result(comfyui, requested, native, case):
    kind, arguments = requested(case, "wide")
    identical = {name: [(tensor, {**options, "guide_attention_entries": [
        {**entry, "strength": 1.0, "pixel_mask": None} for entry in options["guide_attention_entries"]]})
        for tensor, options in arguments[name]] for name in ("positive", "negative")}

    result = comfyui.sample(comfyui.native(kind), kind, **arguments | identical)

    assert relative_error(result, native(case, "wide")) > 50 * TOLERANCE


@pytest.mark.parametrize("case", ["wan-i2v", "wan22-ti2v", "wan-vace", "ltx-guide", "ltx-weak-guide",
                                  "hunyuan-replace"])
def test_stale_patches_equal_the_oracle(comfyui, requested, native, case):
    kind, arguments = requested(case, "wide")
    model = comfyui.ours(kind, comfyui.config("cpu,cpu", pipefusion=2, num_patches=3, warmup_steps=1))
    want = sample_oracle(comfyui, kind, 3, 1, **arguments)

    close(comfyui.sample(model, kind, **arguments), want, STALE)
    assert relative_error(want, native(case, "wide")) > 10 * STALE


def test_images_and_their_tokens_change_the_result(native):
    """Else the cases above would compare models that do not look at them."""
    assert relative_error(native("wan-i2v", "odd"), native("wan-i2v-blind", "odd")) > 1e-2
    assert relative_error(native("wan-i2v-blind", "odd"), native("wan-i2v-bare", "odd")) > 1e-2


def test_frames_of_other_images_are_refused_by_name(comfyui):
    """Of nodes for other models: frames after the video's own, and references in the context."""
    for kind, key, value in (("wan", "time_dim_concat", torch.zeros(1, 16, 1, 16, 18)),
                             ("wan-vace", "context_latents", [torch.zeros(1, 16, 1, 16, 18)])):
        positive = comfyui.conditioning(kind, 1)
        positive[0][1][key] = value

        with pytest.raises(comfyui.errors.UnsupportedError, match=f"adds {key} .* support it for Wan"):
            comfyui.sample(comfyui.ours(kind, comfyui.config("cpu")), kind, positive=positive)


def test_causal_wan_runs_as_wan_and_without_its_own_sampler(comfyui):
    """As ComfyUI's own, whose model is another class for such a file; frame by frame it is refused by name."""
    model, native = (make("wan-causal") for make in (
        lambda kind: comfyui.ours(kind, comfyui.config("cpu,cpu", ulysses=2)), comfyui.native))
    assert type(native.model.diffusion_model).__name__ == "CausalWanModel"

    close(comfyui.sample(model, "wan-causal"), comfyui.sample(native, "wan-causal"), TOLERANCE)
    guider = comfyui.samplers.CFGGuider(model)
    guider.set_conds(comfyui.conditioning("wan-causal", 1), comfyui.conditioning("wan-causal", 2))
    noise = torch.zeros_like(comfyui.latent("wan-causal")["samples"])
    with pytest.raises(comfyui.errors.UnsupportedError, match="support the sampler ar_video"):
        guider.sample(noise, noise, comfyui.samplers.ksampler("ar_video"), torch.tensor([1.0, 0.0]))


def test_references_of_other_channels_are_refused(comfyui):
    positive = comfyui.conditioning("wan-i2v", 1)
    positive[0][1]["context_latents"] = [torch.zeros(1, 16, 1, 16, 18)]

    with pytest.raises(comfyui.errors.ConfigError, match="have 16 channels, and this Wan model takes 36"):
        comfyui.sample(comfyui.ours("wan-i2v", comfyui.config("cpu")), "wan-i2v", positive=positive)


def test_another_way_to_give_hunyuanvideo_a_image_is_refused_by_name(comfyui, requested, vae_of):
    kind, arguments = requested("hunyuan-i2v", "wide")
    with torch.inference_mode():
        positive, _ = run_node(comfyui.nodes.NODE_CLASS_MAPPINGS["HunyuanImageToVideo"], {
            "positive": comfyui.conditioning(kind, 1), "vae": vae_of("vae-hunyuan"), "width": 192, "height": 96,
            "length": 9, "batch_size": 1, "guidance_type": "custom", "start_image": image(3, 192, 96)})

    with pytest.raises(comfyui.errors.UnsupportedError, match="adds ref_latent.* support it for HunyuanVideo "):
        comfyui.sample(comfyui.ours(kind, comfyui.config("cpu")), kind, **{**arguments, "positive": positive})


def test_guides_without_their_noise_mask_are_refused(comfyui, requested):
    kind, arguments = requested("ltx-guide", "wide")
    arguments = {**arguments, "latent": {"samples": arguments["latent"]["samples"]}}

    with pytest.raises(comfyui.errors.UnsupportedError,
                       match="adds guides with a latent that lacks their noise mask"):
        comfyui.sample(comfyui.ours(kind, comfyui.config("cpu")), kind, **arguments)


def test_several_control_videos_are_refused(comfyui, requested):
    kind, arguments = requested("wan-vace", "tall")
    positive = [[tensor, {**options,
                          **{key: 2 * options[key] for key in ("vace_frames", "vace_mask", "vace_strength")}}]
                for tensor, options in arguments["positive"]]

    with pytest.raises(comfyui.errors.UnsupportedError, match="adds several control videos, .* Wan VACE"):
        comfyui.sample(comfyui.ours(kind, comfyui.config("cpu")), kind, **{**arguments, "positive": positive})


@pytest.mark.parametrize("fit", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["both fit", "one fits"])
def test_two_models_of_one_workflow_share_the_workers(comfyui, requested, fit):
    """Wan 2.2's high and low model: two loaders, two KSamplerAdvanced. Both stay, so the second run loads nothing;
    where ComfyUI unloads one for the other, they change places in the same workers, and no file is opened."""
    _, arguments = requested("wan22-i2v", "odd")
    config = comfyui.config("cpu,cpu", ulysses=2)

    def sample(high, low):
        latent = arguments["latent"]
        with torch.inference_mode():
            for model, noise, first, last, rest in ((high, "enable", 0, 2, "enable"),
                                                    (low, "disable", 2, 4, "disable")):
                if not fit:
                    comfyui.management.unload_all_models()
                latent, = comfyui.nodes.KSamplerAdvanced().sample(
                    model, noise, 7, 4, 3.0, "euler", "simple", arguments["positive"], arguments["negative"], latent,
                    first, last, rest)
        return latent["samples"]

    want = sample(comfyui.native("wan22-i2v"), comfyui.native("wan-i2v"))
    models = comfyui.ours("wan22-i2v", config), comfyui.ours("wan-i2v", config)
    close(sample(*models), want, TOLERANCE)
    client, sent = comfyui.groups.client(("cpu", "cpu")), []
    pids, post = {numbers["pid"] for numbers in client.report_memory().values()}, client.group.post
    names = {model.model.remote.spec.name for model in models}

    def counted(make_command, *args, **kwargs):
        def noted(request):
            command = make_command(request)
            of = {getattr(command, "model", None), getattr(command, "name", None),
                  getattr(getattr(command, "spec", None), "name", None)}
            # a model that another test has let go of is dropped at any time
            if of & names:
                sent.append(type(command).__name__)
            return command
        return post(noted, *args, **kwargs)
    client.group.post = counted
    files = [comfyui.base / "diffusion_models" / comfyui.file(kind) for kind in ("wan22-i2v", "wan-i2v")]
    for file in files:
        file.rename(f"{file}.away")
    try:
        close(sample(*models), want, TOLERANCE)
    finally:
        for file in files:
            Path(f"{file}.away").rename(file)
    client.group.post = post

    assert {numbers["pid"] for numbers in client.report_memory().values()} == pids
    assert "Predict" in sent and not {"LoadModel", "DropModel"} & set(sent)
    assert ({"ParkModel", "RestoreModel"} & set(sent) == set()) == fit
