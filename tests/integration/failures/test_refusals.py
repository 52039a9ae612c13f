"""Bad input gets an error that says what to do; nothing is dropped; the group survives and the next prompt runs."""

import json
import math
import struct

import pytest
import torch

from tests.support.tiny_checkpoints import metadata_of, state_dict

TEXTS = ("model_name", "weight_dtype", "label", "text", "ckpt_name")           # which a reroute can bring anything to


@pytest.fixture
def model(comfyui):
    return comfyui.ours("sd3", comfyui.config("cpu,cpu"))


def write_safetensors(path, shapes, truncate_bytes=0):
    """A safetensors file with zeros in it."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        num_bytes = 2 * int(torch.Size(shape).numel())
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    raw = json.dumps(header).encode()
    path.write_bytes((struct.pack("<Q", len(raw)) + raw
                      + bytes(offset))[:None if not truncate_bytes else -truncate_bytes])


@pytest.mark.parametrize("settings, message", [
    ({"devices": "gpu0"}, '"gpu0" is not a device'),
    ({"devices": ""}, "devices is empty"),
    ({"devices": "cuda:31", "mode": "manual"}, "names cuda:31, and this machine has"),
    ({"devices": "cpu,cpu", "mode": "manual"}, "multiply to 1, and there are 2 devices"),
    ({"devices": "cpu,cpu", "mode": "manual", "cfg_degree": 3}, "Set cfg_degree to 1 or 2"),
    ({"devices": "cpu,cpu", "mode": "manual", "pipefusion_degree": 2, "stage_blocks": "1,2,3"},
     "has 3 stages, and pipefusion_degree=2"),
    ({"devices": "cpu,cpu", "mode": "manual", "pipefusion_degree": 2, "stage_blocks": "half"},
     'stage_blocks="half" is not a list'),
    ({"devices": "cpu,cpu", "mode": "manual", "tensor_degree": 4},
     "(tensor_degree=4) multiply to 4, and there are 2 devices"),
    ({"devices": "cpu", "ulysses_degree": 0}, "Set ulysses_degree to 1 or more"),
], ids=str)
def test_config_that_cannot_work_is_refused_when_queued(comfyui, settings, message):
    with pytest.raises(comfyui.errors.ConfigError) as refusal:
        comfyui.parallel_config.validate_inputs(**settings)

    assert message in str(refusal.value)


def test_defaults_are_accepted_when_queued(comfyui):
    assert comfyui.parallel_config.validate_inputs() is True


def test_ulysses_degree_that_does_not_divide_heads_is_refused_when_loading(comfyui):
    with pytest.raises(comfyui.errors.ConfigError,
                       match=r"Set ulysses_degree to 1, 2 or 4, or use ring_degree: ulysses_degree=3 does not"):
        comfyui.ours("sd3", comfyui.config("cpu,cpu,cpu", ulysses=3))


def test_truncated_file_is_refused(comfyui):
    name = comfyui.file("sd3")
    broken = comfyui.base / "diffusion_models" / "broken.safetensors"
    broken.write_bytes((comfyui.base / "diffusion_models" / name).read_bytes()[:-1000])

    with pytest.raises(comfyui.errors.CheckpointError, match="broken.safetensors again, it is cut short"):
        comfyui.load_model.execute("broken.safetensors", "default")


@pytest.mark.parametrize("content, words", [
    (b"", "Download junk.safetensors again: it is empty"),
    (b"<!DOCTYPE html><html></html>", "download junk.safetensors again: it is a web page"),
    (b"not a safetensors file at all", "Choose a .* file of a diffusion model: junk.safetensors is not"),
    (b"\x10" + bytes(7) + b"{" * 16, "Download junk.safetensors again: it has a header that cannot be read")])
def test_file_that_is_no_safetensors_file_is_refused(comfyui, content, words):
    (comfyui.base / "diffusion_models" / "junk.safetensors").write_bytes(content)

    with pytest.raises(comfyui.errors.CheckpointError, match=words):
        comfyui.load_model.execute("junk.safetensors", "default")


@pytest.mark.parametrize("shapes, message", [
    ({"input_blocks.0.0.weight": (320, 4, 3, 3)},
     "is a U-Net of a kind that xDiT does not run. For a model that ComfyUI"),
    ({"lora_unet_double_blocks_0.lora_up.weight": (1, 1)}, "is a LoRA: load it with a LoRA node.$"),
    ({"taesd_decoder.1.weight": (1, 1)}, "is a VAE: load it with Load VAE.$"),
    ({"double_blocks.0.img_attn.qkv.weight": (9, 3), "double_blocks.0.img_attn.qkv.scale_weight": (1,)}, "scaled"),
    ({"t_block.1.weight": (1, 1), "y_embedder.y_proj.fc1.weight": (1, 1), "ar_embedder.mlp.0.weight": (1, 1)},
     "lacks the tensor .* which a PixArt-Alpha model needs"),
], ids=["unet", "lora", "vae", "scaled", "pixart-alpha"])
def test_file_of_an_unsupported_model_is_refused(comfyui, shapes, message):
    write_safetensors(comfyui.base / "diffusion_models" / "other.safetensors", shapes)

    with pytest.raises(comfyui.errors.CheckpointError, match=message):
        comfyui.load_model.execute("other.safetensors", "default")


def test_metadata_that_changes_a_model_is_refused(comfyui):
    """ComfyUI's detection takes a Wan model's settings from the file's metadata."""
    from safetensors.torch import load_file, save_file
    tensors = load_file(comfyui.base / "diffusion_models" / comfyui.file("wan"))
    save_file(tensors, comfyui.base / "diffusion_models" / "said.safetensors",
              {"config": json.dumps({"transformer": {"eps": 1e-3}})})

    with pytest.raises(comfyui.errors.CheckpointError,
                       match="describes a variant of Wan that"):
        comfyui.load_model.execute("said.safetensors", "default")


def test_native_model_in_parallel_sampler_is_refused(comfyui):
    with pytest.raises(comfyui.errors.ConfigError, match="^Connect Load xDiT Model, or use KSampler"):
        comfyui.parallel_sampler.execute(
            comfyui.native("sd3"), 7, 2, 4.0, "euler", "simple", comfyui.conditioning("sd3", 1),
            comfyui.conditioning("sd3", 2), comfyui.latent("sd3"), 1.0)


@pytest.mark.parametrize("value", [None, 3, "abc", {}, {"samples": 3}, [[3, {}]]], ids=str)
def test_a_value_in_the_place_of_a_link_is_refused_by_name(comfyui, model, value):
    """ComfyUI compares the types of links, and hands any other value of a prompt to the node as it is."""
    classes = comfyui.nodes.NODE_CLASS_MAPPINGS
    sample = {"model": model, "seed": 7, "steps": 1, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple",
              "denoise": 1.0, "positive": comfyui.conditioning("sd3", 1), "negative": comfyui.conditioning("sd3", 2),
              "latent_image": comfyui.latent("sd3")}
    nodes = [(comfyui.parallel_sampler, sample, ("model", "positive", "negative", "latent_image")),
             (comfyui.vae_decode, {"samples": comfyui.latent("sd3"), "vae": object()}, ("samples", "vae", "parallel")),
             (comfyui.vae_encode, {"pixels": torch.zeros(1, 8, 8, 3), "vae": object()}, ("pixels", "vae", "parallel")),
             (comfyui.load_model, {"model_name": comfyui.file("sd3"), "weight_dtype": "default"},
              ("parallel", *TEXTS[:2])),
             (classes["XDiTClassLabel"], {"model": model, "label": "207"}, ("model", "label")),
             (classes["XDiTUpscaleImage"], {"image": torch.zeros(1, 8, 8, 3), "upscale_model": object()},
              ("image", "upscale_model", "parallel")),
             (classes["XDiTDemoPrompt"], {}, ("text",)), (classes["XDiTLoadClipVae"], {}, ("ckpt_name",))]
    for node, given, links in nodes:
        for name in links:
            # the first: as not connected
            if (name, value) != ("parallel", None) and (name not in TEXTS or value != "abc"):
                with pytest.raises(comfyui.errors.ConfigError, match=f": {name} is .* must be"):
                    node.execute(**given | {name: value})


def test_latent_of_another_model_is_refused(comfyui, model):
    with pytest.raises(comfyui.errors.ConfigError, match="shape .1, 4, 16, 16., and SD3 needs .batch, 16 channels"):
        comfyui.sample(model, "sd3", latent={"samples": torch.ones(1, 4, 16, 16)})


@pytest.mark.parametrize("degrees", [{}, {"pipefusion": 2}], ids=str)
@pytest.mark.parametrize("shape", [(1, 4, 16, 16), (1, 16, 2, 16, 16)], ids=str)
def test_latent_of_another_model_is_refused_in_any_sampler_node(comfyui, degrees, shape):
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", **degrees))

    with torch.inference_mode(), pytest.raises(comfyui.errors.ConfigError,
                                               match="latent has the shape .*SD3 needs .batch, 16 chan"):
        comfyui.nodes.KSampler().sample(model, 7, 2, 4.0, "euler", "simple", comfyui.conditioning("sd3", 1),
                                        comfyui.conditioning("sd3", 2), {"samples": torch.ones(shape)}, 1.0)


@pytest.mark.parametrize("kind", ["sd3", "sd15"])
def test_an_area_outside_of_the_image_is_refused(comfyui, kind):
    """ComfyUI cuts it down to nothing, and its models fail."""
    (text, options), = comfyui.conditioning(kind, 1)
    positive = [[text, {**options, "area": (8, 8, 0, comfyui.latent(kind)["samples"].shape[-1])}],
                *comfyui.conditioning(kind, 3)]

    with pytest.raises(comfyui.errors.ConfigError,
                       match="^Move, enlarge or remove an area .*or the area of it that a prompt is for, is empty"):
        comfyui.sample(comfyui.ours(kind, comfyui.config("cpu,cpu")), kind, positive=positive, steps=1)


def test_cfg_degree_without_guidance_is_refused(comfyui):
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", cfg=2))

    with pytest.raises(comfyui.errors.ConfigError, match="cfg_degree=2 needs two branches"):
        comfyui.sample(model, "sd3", cfg=1.0)


def test_gligen_is_refused_before_anything_runs(comfyui, model):
    positive = comfyui.conditioning("sd3", 1)
    positive[0][1]["gligen"] = object()

    with pytest.raises(comfyui.errors.UnsupportedError, match="GLIGEN"):
        comfyui.sample(model, "sd3", positive=positive)


@pytest.mark.slow
def test_reference_latents_are_refused(comfyui):
    positive = comfyui.conditioning("lumina-2", 1)
    positive[0][1]["reference_latents"] = [torch.zeros(1, 16, 8, 8)]

    with pytest.raises(comfyui.errors.UnsupportedError, match="adds ref_latents"):
        comfyui.sample(comfyui.ours("lumina-2", comfyui.config("cpu,cpu")), "lumina-2", positive=positive)


def test_model_patches_are_refused(comfyui, model):
    patched = model.clone()
    patched.set_model_attn1_patch(lambda q, k, v, extra_options: (q, k, v))

    with pytest.raises(comfyui.errors.UnsupportedError, match="model patches"):
        comfyui.sample(patched, "sd3")


def test_more_sequence_ranks_than_tokens_are_refused_and_the_group_survives(comfyui):
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", ring=2))
    comfyui.sample(model, "sd3")
    pids = {numbers["pid"] for numbers in comfyui.groups.client(("cpu", "cpu")).report_memory().values()}

    with pytest.raises(comfyui.errors.ConfigError, match="it has 1 tokens, too few"):
        comfyui.sample(model, "sd3", latent=comfyui.latent("sd3", size=(2, 2)))

    comfyui.sample(model, "sd3")
    assert {numbers["pid"] for numbers in comfyui.groups.client(("cpu", "cpu")).report_memory().values()} == pids


@pytest.mark.parametrize("tokens, text, pooled, message", [
    (20, 50, 64, r"has text of 50 channels, and this SD3 model needs 96"), (20, 200, 64, "text of 200 channels"),
    (20, 96, 30, r"has pooled text of 30 channels, and this SD3 model needs 64"),
    (0, 96, 64, r"has no text tokens \(its shape is \(1, 0, 96\)\), and SD3 needs at least one"),
], ids=["narrow", "wide", "pooled", "no tokens"])
def test_conditioning_of_another_model_is_refused_by_name_and_the_group_survives(
    comfyui, model, tokens, text, pooled, message):
    with pytest.raises(comfyui.errors.ConfigError, match=message):
        comfyui.sample(model, "sd3",
                       positive=[[torch.zeros(1, tokens, text), {"pooled_output": torch.zeros(1, pooled)}]])

    comfyui.sample(model, "sd3")


def test_missing_packages_are_named_with_the_remedy(comfyui, monkeypatch):
    groups = __import__("sys").modules[type(comfyui.groups).__module__]
    monkeypatch.setattr(groups, "WORKER_PACKAGES", ("diffusers", "a_package_that_nobody_has"))

    with pytest.raises(comfyui.errors.ConfigError,
                       match="^Install a_package_that_nobody_has.*pip install -r requirements.txt"):
        comfyui.ours("sd3", comfyui.config("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ltx-video", "omnigen-2", "boogu-image"])
def test_text_that_is_longer_than_its_mask_is_refused(comfyui, kind):
    """As Conditioning (Concat) makes it, which joins the text and keeps the mask of the first."""
    (text, options), = comfyui.conditioning(kind, 1)

    with pytest.raises(comfyui.errors.UnsupportedError, match="53 text tokens and an attention mask for 20"):
        comfyui.sample(comfyui.ours(kind, comfyui.config()), kind, steps=1,
                       positive=[[torch.cat([text, torch.zeros(1, 33, text.shape[2])], 1), options]])


def test_types_that_a_familys_numbers_do_not_fit_in_are_refused(comfyui, monkeypatch):
    """As a device computes that has float16: ComfyUI keeps part of this family in float32 then."""
    monkeypatch.setattr(comfyui.management, "should_use_fp16", lambda *args, **options: True)

    with pytest.raises(comfyui.errors.UnsupportedError, match="values of Cosmos-Predict2 exceed the range of float16"):
        comfyui.ours("cosmos-predict2", comfyui.config(), weight_dtype="fp16")
    comfyui.ours("cosmos-predict2", comfyui.config(), weight_dtype="fp32")


@pytest.mark.parametrize("degrees", [{}, {"pipefusion": 2}], ids=str)
def test_numbers_that_are_not_finite_are_refused_and_the_workers_live_on(comfyui, degrees):
    """In the latent, in either prompt, in weights."""
    from safetensors.torch import load_file, save_file
    model, config = comfyui.ours("sd3", comfyui.config("cpu,cpu", **degrees)), comfyui.config("cpu,cpu", **degrees)
    before = comfyui.sample(model, "sd3")
    pids = {numbers["pid"] for numbers in comfyui.groups.client(("cpu", "cpu")).report_memory().values()}
    latent, (positive,) = comfyui.latent("sd3"), comfyui.conditioning("sd3", 1)
    latent["samples"][0, 3, 2, 5] = math.nan
    text = positive[0].clone()
    text[0, 3, 1] = math.inf
    weights = load_file(comfyui.base / "diffusion_models" / comfyui.file("sd3"))
    weights[next(name for name in weights if name.endswith("0.x_block.attn.qkv.weight"))][5, 7] = math.nan
    save_file(weights, comfyui.base / "diffusion_models" / "sd3-nan.safetensors")
    broken = comfyui.load_model.execute("sd3-nan.safetensors", "fp32", config).args[0]

    with pytest.raises(comfyui.errors.ConfigError, match="the latent contains NaN or infinite values"):
        comfyui.sample(model, "sd3", latent=latent)
    for name in ("positive", "negative"):
        with pytest.raises(comfyui.errors.ConfigError,
                           match="the prediction of SD3 at the first step contains NaN"):
            comfyui.sample(model, "sd3", **{name: [[text, positive[1]]]})
    with pytest.raises(comfyui.errors.ConfigError, match="^Try another weight_dtype than float32 .*, without LoRA: "):
        comfyui.sample(broken, "sd3")

    assert torch.equal(comfyui.sample(model, "sd3"), before)
    assert {numbers["pid"] for numbers in comfyui.groups.client(("cpu", "cpu")).report_memory().values()} == pids


def test_audio_that_is_not_finite_is_refused(comfyui):
    """The second part of LTX-2's latents, and of what it predicts."""
    from safetensors.torch import load_file, save_file
    source, latent = comfyui.base / "diffusion_models" / comfyui.file("ltx-2"), comfyui.latent("ltx-2")
    latent["samples"].unbind()[1][0, 3, 2, 5] = math.nan
    weights = load_file(source)
    weights["audio_proj_out.weight"][5, 7] = math.nan
    save_file(weights, comfyui.base / "diffusion_models" / "ltx-2-nan.safetensors", metadata_of(source))

    with pytest.raises(comfyui.errors.ConfigError, match="the latent contains NaN or infinite values"):
        comfyui.sample(comfyui.ours("ltx-2", comfyui.config("cpu")), "ltx-2", latent=latent)
    with pytest.raises(comfyui.errors.ConfigError,
                       match="the prediction of LTX-2 at the first step contains NaN"):
        comfyui.sample(comfyui.load_model.execute("ltx-2-nan.safetensors", "fp32", comfyui.config("cpu")).args[0],
                       "ltx-2")


def test_ltx_2_without_audio_is_refused_as_comfyui_leaves_parts_of_it_out(comfyui):
    """Which it loads as LTX-Video, where the file says what it is."""
    from safetensors.torch import save_file
    source = comfyui.base / "diffusion_models" / comfyui.file("ltx-2.3")
    of_audio = ("audio", "av_ca_", "_ca_", "connector")
    tensors = {name: tensor for name, tensor in state_dict("ltx-2.3").items()
               if not any(mark in name for mark in of_audio)}
    save_file(tensors, source.with_name("ltx-2.3-silent.safetensors"), metadata_of(source))

    with pytest.raises(comfyui.errors.CheckpointError, match="ignores the attention gates"):
        comfyui.load_model.execute("ltx-2.3-silent.safetensors", "fp32", comfyui.config("cpu"))
    native = comfyui.nodes.UNETLoader().load_unet("ltx-2.3-silent.safetensors", "default")[0].model.diffusion_model
    left_out = tensors.keys() - native.state_dict().keys()
    assert left_out and all("to_gate_logits" in name for name in left_out)
