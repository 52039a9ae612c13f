"""U-Nets as MODELs: the latents of ComfyUI's own KSampler for SD 1.5, SD 2, SDXL, its refiner and inpainting models;
refusals."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.support.tiny_checkpoints import families, state_dict
from tests.support.tolerances import close, relative_error

TOLERANCE = 2e-5                           # relative, float32 on both sides
KINDS = [kind for kind, family in families().items() if family.plan.takes_unet_patches and kind != "sd15-ip2p"]
LAYOUTS = {"one": ("cpu", {}), "cfg2": ("cpu,cpu", {"cfg": 2}), "data2": ("cpu,cpu", {"data": 2}),
           "displaced2": ("cpu,cpu", {"displaced": 2, "displaced_mode": "full_sync"})}
MATRIX = [*((kind, "one") for kind in KINDS), ("sdxl", "cfg2"), ("sdxl-inpaint", "data2"),
          ("ssd-1b", "displaced2"), ("koala-700m", "displaced2"),
          *((kind, layout) for kind in ("svd", "sv3d-u", "sv3d-p") for layout in ("cfg2", "displaced2"))]
# sampler, scheduler, size, images
RUNS = [("euler", "normal", (16, 18), 1), ("dpmpp_2m", "karras", (17, 23), 2),
        ("dpmpp_2s_ancestral", "simple", (9, 16), 3)]


@pytest.mark.slow
@pytest.mark.parametrize("kind, layout", MATRIX)
def test_latents_equal_native_ksampler(comfyui, kind, layout):
    devices, degrees = LAYOUTS[layout]
    model = comfyui.ours(kind, comfyui.config(devices, **degrees))
    for sampler, scheduler, size, batch in RUNS:
        arguments = {"sampler": sampler, "scheduler": scheduler, "steps": 2,
                     "latent": comfyui.latent(kind, batch, size)}

        result = comfyui.sample(model, kind, **arguments)

        close(result, comfyui.sample(comfyui.native(kind), kind, **arguments), TOLERANCE, (sampler, size))


@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_prompts_of_different_length_equal_native_ksampler(comfyui, kind):
    """Guidance of two prompts that ComfyUI cannot put into one batch, on two devices;
    and a prompt for a part of the picture."""
    positive, area = comfyui.conditioning(kind, 1, tokens=31), comfyui.conditioning(kind, 3, tokens=20)
    area[0][1]["area"] = (9, 10, 0, 6)
    for prompts in (positive, positive + area):
        arguments = {"positive": prompts, "negative": comfyui.conditioning(kind, 2, tokens=20)}

        result = comfyui.sample(comfyui.ours(kind, comfyui.config("cpu,cpu")), kind, **arguments)

        close(result, comfyui.sample(comfyui.native(kind), kind, **arguments), TOLERANCE)


@pytest.mark.parametrize("kind", ["sd15", "sdxl-inpaint", "sd15-ip2p"])
def test_img2img_with_noise_mask_equals_native_ksampler(comfyui, kind):
    """Models for inpainting and for instructions also read a picture, which ComfyUI puts beside the latent."""
    generator = torch.Generator().manual_seed(3)
    latent = {"samples": torch.randn(1, 4, 16, 18, generator=generator), "noise_mask": torch.zeros(1, 128, 144)}
    latent["noise_mask"][:, 40:, 60:] = 1.0
    prompts = {}
    for seed, name in ((1, "positive"), (2, "negative")):
        prompts[name] = comfyui.conditioning(kind, seed)
        if kind != "sd15":
            prompts[name][0][1].update(concat_latent_image=latent["samples"], concat_mask=latent["noise_mask"][:, None])

    result = comfyui.sample(comfyui.ours(kind, comfyui.config("cpu,cpu")), kind, latent=latent, denoise=0.6, steps=5,
                            **prompts)

    reference = comfyui.sample(comfyui.native(kind), kind, latent=latent, denoise=0.6, steps=5, **prompts)
    close(result, reference, TOLERANCE)


def test_images_as_prompts_equal_native_ksampler(comfyui):
    """Two of them, whose vectors ComfyUI adds noise to and merges; the negative prompt has none."""
    generator, positive = torch.Generator().manual_seed(3), comfyui.conditioning("sd2-unclip", 1)
    for strength, noise in ((1.0, 0.1), (0.7, 0.0)):
        seen = SimpleNamespace(image_embeds=torch.randn(1, 768, generator=generator))
        positive = comfyui.nodes.unCLIPConditioning().apply_adm(positive, seen, strength, noise)[0]
    plain = comfyui.conditioning("sd2-unclip", 1)
    model, native = comfyui.ours("sd2-unclip", comfyui.config("cpu,cpu")), comfyui.native("sd2-unclip")

    result = comfyui.sample(model, "sd2-unclip", positive=positive)

    reference = comfyui.sample(native, "sd2-unclip", positive=positive)
    close(result, reference, TOLERANCE)
    assert relative_error(comfyui.sample(native, "sd2-unclip", positive=plain), reference) > 100 * TOLERANCE


@pytest.mark.parametrize("layout", ["one", "cfg2", "data2", "displaced2"])
def test_a_image_from_another_side_equals_native_ksampler(comfyui, layout):
    """Of Stable Zero123, whose projection ComfyUI keeps beside the U-Net. Three places that it is seen from."""
    from comfy_extras.nodes_stable3d import StableZero123_Conditioning_Batched
    kind, (devices, degrees) = "stable-zero123", LAYOUTS[layout]
    generator = torch.Generator().manual_seed(3)
    seen = SimpleNamespace(image_embeds=torch.randn(1, 768, generator=generator))
    vision = SimpleNamespace(encode_image=lambda image: seen)
    vae = SimpleNamespace(encode=lambda pixels: torch.randn(1, 4, 17, 14, generator=generator))
    positive, negative, latent = StableZero123_Conditioning_Batched.execute(
        vision, torch.zeros(1, 8, 8, 3), vae, 112, 136, 3, 5.0, 10.0, 1.0, 40.0).args

    result = comfyui.sample(comfyui.ours(kind, comfyui.config(devices, **degrees)), kind, positive=positive,
                            negative=negative, latent=latent)

    native = comfyui.sample(comfyui.native(kind), kind, positive=positive, negative=negative, latent=latent)
    close(result, native, TOLERANCE)
    assert relative_error(result[:1], native[1:2]) > 0.01


def test_guidance_that_grows_along_a_video_equals_native_ksampler(comfyui):
    """Of VideoLinearCFGGuidance, and of frames that differ."""
    from comfy_extras.nodes_video_model import VideoLinearCFGGuidance
    guide = VideoLinearCFGGuidance().patch
    model, native = comfyui.ours("svd", comfyui.config("cpu,cpu", cfg=2)), comfyui.native("svd")
    latent = comfyui.latent("svd", 4, (12, 10))

    result = comfyui.sample(guide(model, 1.5)[0], "svd", latent=latent)

    wanted = comfyui.sample(guide(native, 1.5)[0], "svd", latent=latent)
    close(result, wanted, TOLERANCE)
    assert relative_error(comfyui.sample(native, "svd", latent=latent), wanted) > 100 * TOLERANCE


def test_frames_of_a_video_are_not_shared_out(comfyui, said):
    """By hand it is refused; by itself a device rests, and nothing else is said."""
    with pytest.raises(comfyui.errors.ConfigError, match="Set data_degree to 1, and use cfg_degree or displaced_de"):
        comfyui.ours("svd", comfyui.config("cpu,cpu", data=2))
    latent = comfyui.latent("svd", 2, (8, 8))

    result = comfyui.sample(comfyui.ours("svd", comfyui.config("cpu,cpu")), "svd", latent=latent, steps=1, cfg=1.0)

    close(result, comfyui.sample(comfyui.native("svd"), "svd", latent=latent, steps=1, cfg=1.0), TOLERANCE)
    assert said[0].startswith("running on cpu, cpu: one device")


SPREAD = "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.norm1.bias"
CHECKPOINTS = {                            # kind, what tells how it is sampled, and how that is
    "eps": ("sd15", {}, "EPS"), "sd2-velocity": ("sd2", {SPREAD: torch.linspace(-1, 1, 64)}, "V_PREDICTION"),
    "sd2-noise": ("sd2", {SPREAD: torch.linspace(-0.1, 0.1, 64)}, "EPS"),
    "sdxl-velocity": ("sdxl", {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}, "V_PREDICTION"),
    "sdxl-edm": ("sdxl", {"edm_vpred.sigma_max": torch.tensor(120.0), "edm_vpred.sigma_min": torch.tensor(0.01)},
                 "V_PREDICTION"),
    "playground": ("sdxl", {"edm_mean": torch.zeros(1, 4, 1, 1), "edm_std": torch.ones(1, 4, 1, 1)}, "EDM")}


@pytest.mark.slow
@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_gives_the_model_that_comfyui_takes_out_of_it(comfyui, case):
    """The diffusion model alone, sampled as some of its weights say, and what stands beside them."""
    kind, marks, expected = CHECKPOINTS[case]
    tensors = {f"model.diffusion_model.{name}": tensor for name, tensor in state_dict(kind).items()} | marks
    others = {"first_stage_model.decoder.conv_in.weight": torch.zeros(8, 4, 3, 3), "cond_stage_model.x": torch.zeros(3)}
    save_file(tensors | others, str(comfyui.base / "checkpoints" / f"{case}.safetensors"))
    assert f"{case}.safetensors" in comfyui.load_model.define_schema().inputs[0].options

    model = comfyui.load_model.execute(f"{case}.safetensors", "fp32", comfyui.config("cpu,cpu")).args[0]
    native = comfyui.native_checkpoint(f"{case}.safetensors")

    for each in (model, native):
        assert expected in [cls.__name__ for cls in type(each.model.model_sampling).__mro__]
    # From a sigma of 4,500, which zero terminal SNR begins at, rounding is enlarged.
    close(comfyui.sample(model, kind), comfyui.sample(native, kind), 5 * TOLERANCE if "ztsnr" in marks else TOLERANCE)


@pytest.mark.parametrize("degree", ["ulysses", "ring", "pipefusion"])
def test_methods_that_need_tokens_are_refused_by_name(comfyui, degree):
    with pytest.raises(comfyui.errors.ConfigError, match=rf"{degree}_degree=2 splits .* SDXL is a U-Net"):
        comfyui.ours("sdxl", comfyui.config("cpu,cpu", **{degree: 2}))


def test_auto_takes_branches_apart(comfyui, said):
    comfyui.sample(comfyui.ours("sd15", comfyui.config("cpu,cpu")), "sd15", steps=1)

    assert said[0].startswith("running on cpu, cpu: CFG 2")


def test_what_reaches_inside_is_refused_by_name(comfyui):
    """ToMe merges tokens of attentions, by lots; what another function does is not known."""
    model = comfyui.ours("sd15", comfyui.config("cpu"))
    from tests.programs.model_nodes import model_nodes, run_node
    merging = run_node(model_nodes(comfyui)["TomePatchModel"], {"model": model, "ratio": 0.3})[0]
    other = model.clone()
    other.set_model_attn1_patch(lambda query, key, value, options: (query, key, value))

    for patched, words in ((merging, "^Remove TomePatchModel, .* at random in every layer"), (other, "model patches")):
        with pytest.raises(comfyui.errors.UnsupportedError, match=words):
            comfyui.sample(patched, "sd15")


@pytest.mark.slow
def test_attention_along_frames_is_not_read_as_a_images(comfyui):
    from tests.programs.model_nodes import model_nodes, run_node
    patched = run_node(model_nodes(comfyui)["SelfAttentionGuidance"], {
        "model": comfyui.ours("svd", comfyui.config("cpu")), "scale": 0.5, "blur_sigma": 2.0})[0]

    with pytest.raises(comfyui.errors.UnsupportedError, match="^Remove Self-Attention Guidance: .* Stable Video Diff"):
        comfyui.sample(patched, "svd", latent=comfyui.latent("svd", 2, (8, 8)), steps=1)
