"""Families that ComfyUI has no model of equal diffusers' own pipelines, from folders, with ComfyUI's samplers,
under every method."""

import copy
import json
import math

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from tests.integration.lora.test_lora import Loras
from tests.support.model_zoo import example
from tests.support.tolerances import close, relative_error
from tests.unit.checkpoints.test_header import write_header
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.models import FAMILIES

TOLERANCE = 2e-5                           # relative, float32 on both sides
NAMES = [name for name, family in FAMILIES.items() if family.sampled]
GUIDANCE, STEPS, SEED = 4.0, 4, 11
DEGREES = {"one": {}, "auto": {}, "cfg": {"cfg": 2}, "data": {"data": 2}, "ulysses": {"ulysses": 2},
           "ring": {"ring": 2}, "tensor": {"tensor": 2}, "pipefusion": {"pipefusion": 2, "num_patches": 1},
           "displaced": {"displaced": 2, "displaced_mode": "full_sync"}}
# What config.json says of published models, and their parameters. Of DiT, 675,129,632 in its own code, less its table
# of positions (294,912) and with one embedder of time and class (2,777,472) in each block, where that has one.
PUBLISHED = {
    "DiT-XL-2-512": ("DiT", {
        "_class_name": "Transformer2DModel", "_diffusers_version": "0.12.0.dev0", "activation_fn": "gelu-approximate",
        "attention_bias": True, "attention_head_dim": 72, "cross_attention_dim": None, "dropout": 0.0, "in_channels": 4,
        "norm_elementwise_affine": False, "norm_num_groups": 32, "norm_type": "ada_norm_zero",
        "num_attention_heads": 16,
        "num_embeds_ada_norm": 1000, "num_layers": 28, "num_vector_embeds": None, "only_cross_attention": False,
        "out_channels": 8,
        "patch_size": 2, "sample_size": 64, "upcast_attention": False, "use_linear_projection": False}, 749_826_464),
    "Sana_1600M_1024px": ("Sana", {
        "_class_name": "SanaTransformer2DModel", "_diffusers_version": "0.32.0.dev0", "attention_bias": False,
        "attention_head_dim": 32,
        "caption_channels": 2304, "cross_attention_dim": 2240, "cross_attention_head_dim": 112, "dropout": 0.0,
        "in_channels": 32,
        "interpolation_scale": None, "mlp_ratio": 2.5, "norm_elementwise_affine": False, "norm_eps": 1e-06,
        "num_attention_heads": 70,
        "num_cross_attention_heads": 20, "num_layers": 20, "out_channels": 32, "patch_size": 1, "sample_size": 32},
                          1_604_462_752),
    "Latte-1": ("Latte", {
        "_class_name": "LatteTransformer3DModel", "_diffusers_version": "0.27.0.dev0",
        "activation_fn": "gelu-approximate",
        "attention_bias": True, "attention_head_dim": 72, "attention_type": "default", "caption_channels": 4096,
        "cross_attention_dim": 1152, "double_self_attention": False, "dropout": 0.0, "in_channels": 4,
        "norm_elementwise_affine": False,
        "norm_eps": 1e-06, "norm_num_groups": 32, "norm_type": "ada_norm_single", "num_attention_heads": 16,
        "num_embeds_ada_norm": 1000, "num_layers": 28, "num_vector_embeds": None, "only_cross_attention": False,
        "out_channels": 8,
        "patch_size": 2, "sample_size": 64, "upcast_attention": False, "use_linear_projection": False,
        "video_length": 16}, 1_057_246_880),
    # as diffusers' own script converts it
    "SANA-Video_2B_480p": ("Sana-Video", {
        "_class_name": "SanaVideoTransformer3DModel", "_diffusers_version": "0.36.0.dev0", "attention_bias": False,
        "attention_head_dim": 112, "caption_channels": 2304, "cross_attention_dim": 2240,
        "cross_attention_head_dim": 112, "dropout": 0.0, "guidance_embeds": False, "guidance_embeds_scale": 0.1,
        "in_channels": 16, "interpolation_scale": None, "mlp_ratio": 3.0, "norm_elementwise_affine": False,
        "norm_eps": 1e-06, "num_attention_heads": 20, "num_cross_attention_heads": 20, "num_layers": 20,
        "out_channels": 16, "patch_size": [1, 2, 2], "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 1024,
        "sample_size": 30}, 2_056_862_144)}


class Identity(torch.nn.Module):
    """A VAE for pipelines that end in one: what it is given is kept."""

    device, dtype = torch.device("cpu"), torch.float32
    config = type("Config", (), {"scaling_factor": 1.0, "block_out_channels": [1] * 4})

    def decode(self, latents):
        self.latents = latents.clone()
        return type("Decoded", (), {"sample": latents})


def _dit(module, prompts, batch):
    """(the latents that the pipeline begins with, those it ends with, the noise levels between,
    as ComfyUI counts them)."""
    scheduler = diffusers.DDIMScheduler(beta_start=0.0001, beta_end=0.02, clip_sample=False,
                                        timestep_spacing="trailing")
    vae, size = Identity(), module.config.sample_size
    noise = torch.randn(batch, 4, size, size, generator=torch.Generator().manual_seed(SEED))
    pipeline = diffusers.DiTPipeline(module, vae, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    pipeline([prompts[0]] * batch, GUIDANCE, torch.Generator().manual_seed(SEED), STEPS, output_type="pt")
    cached = scheduler.alphas_cumprod[scheduler.timesteps]
    return noise, vae.latents, torch.cat([((1 - cached) / cached).sqrt(), torch.zeros(1)])


def _dit_prompts(comfyui, model):
    label = comfyui.nodes.NODE_CLASS_MAPPINGS["XDiTClassLabel"]
    return [label.execute(model, text).args[0] for text in ("207", "")]


def _sana(module, prompts, batch):
    scheduler, (positive, negative) = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), prompts
    noise = torch.randn(batch, module.config.in_channels, 5, 7, generator=torch.Generator().manual_seed(SEED))
    pipeline = diffusers.SanaPipeline(None, None, None, module, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    latents, = pipeline(
        prompt_embeds=positive.expand(batch, -1, -1), prompt_attention_mask=MASKS[0].expand(batch, -1), height=5 * 32,
        width=7 * 32, negative_prompt=None, negative_prompt_embeds=negative.expand(batch, -1, -1), latents=noise,
        guidance_scale=GUIDANCE,
        negative_prompt_attention_mask=MASKS[1].expand(batch, -1), num_inference_steps=STEPS, output_type="latent",
        use_resolution_binning=False, return_dict=False)
    return noise, latents, scheduler.sigmas


def _sana_video(module, prompts, batch):
    scheduler, (positive, negative) = diffusers.FlowMatchEulerDiscreteScheduler(shift=8.0), prompts
    noise = torch.randn(batch, 16, 3, 6, 10, generator=torch.Generator().manual_seed(SEED))
    pipeline = diffusers.SanaVideoPipeline(None, None, None, module, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.check_inputs = lambda *arguments: None            # which wants an even number of tokens a side
    latents, = pipeline(
        prompt_embeds=positive.expand(batch, -1, -1), prompt_attention_mask=MASKS[0].expand(batch, -1), height=48,
        width=80, frames=9, negative_prompt=None, negative_prompt_embeds=negative.expand(batch, -1, -1),
        negative_prompt_attention_mask=MASKS[1].expand(batch, -1), latents=noise, guidance_scale=GUIDANCE,
        num_inference_steps=STEPS, output_type="latent", use_resolution_binning=False, return_dict=False)
    return noise, latents, scheduler.sigmas


def _texts(width):
    return [torch.randn(1, 9, width, generator=torch.Generator().manual_seed(seed)) for seed in (8, 9)]


def _latte(module, prompts, batch):
    scheduler = diffusers.DDIMScheduler(beta_start=0.0001, beta_end=0.02, clip_sample=False,
                                        timestep_spacing="trailing")
    noise = torch.randn(batch, 4, 3, 6, 10, generator=torch.Generator().manual_seed(SEED))
    pipeline = diffusers.LattePipeline(None, None, Identity(), module, scheduler)
    pipeline.vae_scale_factor = 8
    pipeline.set_progress_bar_config(disable=True)
    positive, negative = (text.expand(batch, -1, -1) for text in prompts)
    latents, = pipeline(prompt_embeds=positive, negative_prompt=None, negative_prompt_embeds=negative, height=48,
                        width=80, video_length=3,
                        latents=noise, guidance_scale=GUIDANCE, num_inference_steps=STEPS, output_type="latent",
                        return_dict=False)
    cached = scheduler.alphas_cumprod[scheduler.timesteps]
    return noise, latents, torch.cat([((1 - cached) / cached).sqrt(), torch.zeros(1)])


def _anyflow(module, prompts, batch):
    scheduler = diffusers.FlowMapEulerDiscreteScheduler(shift=5.0)
    noise = torch.randn(batch, 16, 3, 6, 10, generator=torch.Generator().manual_seed(SEED))
    vae = type("VAE", (Identity,), {"config": type("Config", (), {"scale_factor_temporal": 4,
                                                                  "scale_factor_spatial": 8})})()
    pipeline = diffusers.AnyFlowPipeline(None, None, module, vae, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    positive, negative = (text.expand(batch, -1, -1) for text in prompts)
    latents, = pipeline(prompt_embeds=positive, negative_prompt_embeds=negative, height=48, width=80, num_frames=9,
                        latents=noise.clone(), guidance_scale=GUIDANCE, num_inference_steps=STEPS,
                        output_type="latent", return_dict=False)
    return noise, latents, scheduler.sigmas.float()


MASKS = torch.tensor([[[1] * 9], [[1] + [0] * 6 + [1] * 2]])


def _masked_prompts(comfyui, model):
    return [[[text, {"attention_mask": mask}]] for text, mask in zip(PIPELINES["Sana"][2], MASKS)]


def _plain_prompts(comfyui, model):
    return [[[text, {}]] for text in _texts(24)]


# family -> (its pipeline, the tiny model's arguments that differ for that, prompts for the pipeline, prompts for
# ComfyUI)
PIPELINES = {"DiT": (_dit, {"num_embeds_ada_norm": 1000}, (207, 1000), _dit_prompts),
             "Sana": (_sana, {"in_channels": 32, "out_channels": 32}, _texts(24), _masked_prompts),
             "Sana-Video": (_sana_video, {}, _texts(24), _masked_prompts),
             "Latte": (_latte, {}, _texts(24), _plain_prompts), "AnyFlow": (_anyflow, {}, _texts(24), _plain_prompts)}


@pytest.fixture(scope="module")
def folder_of(comfyui):
    """folder_of(name): (the folder of a tiny model, the model of diffusers in it)."""
    made = {}
    comfyui.folder_paths.add_model_folder_path("diffusers", str(comfyui.base / "diffusers"), is_default=True)

    def folder(name):
        if name not in made:
            family, path = FAMILIES[name], comfyui.base / "diffusers" / f"own {name}"
            torch.manual_seed(0)
            config = family.testing.config | PIPELINES[name][1]
            module = getattr(diffusers, family.transformer)(**config).eval().requires_grad_(False)
            for parameter in module.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(torch.randn(parameter.shape) / math.sqrt(parameter[0].numel()))
            module.save_pretrained(path / "transformer")
            (path / "model_index.json").write_text(json.dumps({"id2label": {
                "207": "golden retriever", "134": "crane", "517": "crane", "0": "tench, Tinca tinca"}}))
            made[name] = path.name, module
        return made[name]
    return folder


@pytest.fixture(scope="module")
def expected(folder_of):
    """expected(name, batch): what the pipeline gives, as of `_dit`; computed once."""
    known = {}

    def of(name, batch):
        if (name, batch) not in known:
            make, _, prompts, _ = PIPELINES[name]
            known[name, batch] = make(folder_of(name)[1], prompts, batch)
        return known[name, batch]
    return of


def sample(comfyui, model, name, noise, sigmas):
    """The latents of ComfyUI's Euler steps, before its latent format takes them back to what a VAE takes."""
    guider = comfyui.samplers.CFGGuider(model)
    guider.set_conds(*PIPELINES[name][3](comfyui, model))
    guider.set_cfg(GUIDANCE)
    with torch.inference_mode():
        latents = guider.sample(noise, torch.zeros_like(noise), comfyui.samplers.sampler_object("euler"), sigmas,
                                seed=1)
        return model.model.process_latent_in(latents)


@pytest.mark.parametrize("name, method",
                         [(name, method) for name in NAMES for method in DEGREES
                          if method not in FAMILIES[name].refused])
def test_latents_equal_diffusers_own_pipeline(comfyui, folder_of, expected, name, method):
    devices = "cpu" if method == "one" else "cpu,cpu"
    model = comfyui.load_model.execute(folder_of(name)[0], "fp32", comfyui.config(devices, **DEGREES[method])).args[0]
    noise, want, sigmas = expected(name, 2 if method == "data" else 1)

    close(sample(comfyui, model, name, noise, sigmas), want, TOLERANCE)


@pytest.mark.parametrize("name, prefix",
                         [("DiT", "lora_unet_"), ("Sana", "transformer."), ("Latte", "diffusion_model."),
                          ("AnyFlow", "transformer."), ("Sana-Video", "diffusion_model.")])
def test_a_lora_equals_diffusers_pipeline_of_the_merged_model(comfyui, folder_of, name, prefix):
    """Under the names of kohya's scripts, diffusers' and ComfyUI's."""
    loras, (folder, module) = Loras(comfyui), folder_of(name)
    merged, factors, generator = copy.deepcopy(module), {}, torch.Generator().manual_seed(SEED)
    for path, layer in merged.named_modules():
        if path.endswith(("to_q", "to_out.0")):
            up, down = (torch.randn(size, generator=generator) * 0.1
                        for size in ((layer.out_features, 2), (2, layer.in_features)))
            layer.weight += 0.7 * up @ down
            key = prefix + (path.replace(".", "_") if prefix == "lora_unet_" else path)
            factors |= {f"{key}.lora_B.weight": up, f"{key}.lora_A.weight": down}
    save_file(factors, loras.folder / "own.safetensors")
    make, _, prompts, _ = PIPELINES[name]
    noise, want, sigmas = make(merged, prompts, 1)
    model = comfyui.load_model.execute(folder, "fp32", comfyui.config("cpu")).args[0]

    close(sample(comfyui, loras.load(model, "own.safetensors", 0.7), name, noise, sigmas), want, TOLERANCE)
    assert relative_error(want, make(module, prompts, 1)[1]) > 1e-3


@pytest.mark.parametrize("name, method", [(name, method) for name in NAMES for method in FAMILIES[name].refused])
def test_methods_that_a_family_cannot_have_are_refused_by_name(comfyui, folder_of, name, method):
    config = comfyui.config("cpu,cpu", **{"displaced_mode": "full_sync", "num_patches": 1, method: 2})

    with pytest.raises(comfyui.errors.ConfigError,
                       match=f"^Set {method}_degree to 1, and use cfg_degree.*=2 .*is not supported for {name}: "):
        comfyui.load_model.execute(folder_of(name)[0], "fp32", config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_folders_are_recognised_and_load(comfyui, tmp_path, name):
    """Of headers alone: nothing holds bytes."""
    family_name, config, num_parameters = PUBLISHED[name]
    with torch.device("meta"):
        module = getattr(diffusers, FAMILIES[family_name].transformer).from_config(config)
    folder = tmp_path / name / "transformer"
    folder.mkdir(parents=True)
    write_header(folder / "diffusion_pytorch_model.safetensors",
                 {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()})
    (folder / "config.json").write_text(json.dumps(config))

    header = open_checkpoint(tmp_path / name)
    family = header.family
    header.meta_model()
    model = comfyui.proxy.load_proxy(str(tmp_path / name), "default", comfyui.config())

    assert family.name == family_name and sum(parameter.numel() for parameter in module.parameters()) == num_parameters
    assert model.model.latent_format.latent_channels == family.num_channels(config)
    assert {f"diffusion_model.{key}" for key in module.state_dict()} == {
        key for key in model.model.state_dict() if key.startswith("diffusion_model.")}
    with pytest.raises(comfyui.errors.CheckpointError,
                       match=f"is a {family_name} model, but a single file lacks settings"):
        comfyui.proxy.load_proxy(str(folder / "diffusion_pytorch_model.safetensors"), "default", comfyui.config())


def test_the_model_of_sana_video_with_other_patches_is_refused(comfyui, tmp_path):
    """As published for 720p, whose latents are another VAE's."""
    _, config, _ = PUBLISHED["SANA-Video_2B_480p"]
    folder = tmp_path / "720p" / "transformer"
    folder.mkdir(parents=True)
    write_header(folder / "diffusion_pytorch_model.safetensors", {"patch_embedding.weight": (2240, 32, 1, 1, 1)})
    (folder / "config.json").write_text(json.dumps(config | {"patch_size": [1, 1, 1], "in_channels": 32}))

    with pytest.raises(comfyui.errors.CheckpointError, match="patch_size"):
        comfyui.proxy.load_proxy(str(tmp_path / "720p"), "default", comfyui.config())


@pytest.mark.parametrize("size", [(8, 8), (12, 12), (8, 32), (18, 2)], ids=str)
def test_dit_at_other_sizes_is_diffusers_own_model(size):
    """Whose forward takes the tokens of any picture for those of a square, which this undoes."""
    one = example("DiT", rows=size[0], columns=size[1])
    module = diffusers.DiTTransformer2DModel(**one.config).double().eval()
    module.load_state_dict(one.model.state_dict())
    with torch.inference_mode():
        marks = one.conditioning["context"][:, 0]
        label = marks.argmax(1) if marks.any() else torch.tensor([one.config["num_embeds_ada_norm"]])
        square = module(one.latent, one.timestep, label, return_dict=False)[0]
        side = math.isqrt(size[0] * size[1] // 4)
        tokens = square.view(1, 8, side, 2, side, 2).permute(0, 2, 4, 1, 3, 5).reshape(
            1, size[0] // 2, size[1] // 2, 8, 2, 2)
        want = tokens.permute(0, 3, 1, 4, 2, 5).reshape(1, 8, *size)[:, :4]

        assert (one.run() - want).abs().max() < 1e-12


@pytest.mark.parametrize("frames", [3, 1])
@pytest.mark.parametrize("size", [(6, 10), (7, 5), (2, 12)], ids=str)
def test_latte_with_blocks_in_pairs_is_diffusers_own_model(size, frames):
    one = example("Latte", rows=size[0], columns=size[1], frames=frames, batch=2)
    module = diffusers.LatteTransformer3DModel(**one.config).double().eval()
    module.load_state_dict(one.model.state_dict())
    inputs = one.family.forward_arguments(one.latent, one.timestep, one.conditioning, one.config)
    with torch.inference_mode():
        want = module(**inputs | {"enable_temporal_attentions": True},
                      return_dict=False)[0][:, :4, :, :size[0], :size[1]]

        assert (one.run() - want).abs().max() < 1e-12


@pytest.mark.parametrize("frames", [5, 2, 1])
@pytest.mark.parametrize("size", [(6, 10), (7, 5), (2, 12)], ids=str)
def test_sana_video_by_sums_is_diffusers_own_model(monkeypatch, size, frames):
    """Whose attention is made to compute in float64 here."""
    one = example("Sana-Video", rows=size[0], columns=size[1], frames=frames, batch=2, masked=True)
    module = diffusers.SanaVideoTransformer3DModel(**one.config).double().eval()
    module.load_state_dict(one.model.state_dict())
    inputs = one.family.forward_arguments(one.latent, one.timestep, one.conditioning, one.config)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    with torch.inference_mode():
        want = module(**inputs, return_dict=False)[0][..., :size[0], :size[1]]

        assert (one.run() - want).abs().max() < 1e-12


def test_a_class_is_a_number_or_a_name(comfyui, folder_of):
    model = comfyui.load_model.execute(folder_of("DiT")[0], "fp32", comfyui.config()).args[0]
    label = comfyui.nodes.NODE_CLASS_MAPPINGS["XDiTClassLabel"]

    for text, number in ((" 0", 0), ("999", 999), ("Golden Retriever", 207), ("tinca tinca", 0), ("tench", 0)):
        marks = label.execute(model, text).args[0][0][0]
        assert marks.shape == (1, 1, 1000) and marks.nonzero().tolist() == [[0, 0, number]]
    assert not label.execute(model, "").args[0][0][0].any()
    for text, words in (("1000", "0 to 999"), ("-1", "0 to 999"), ("9" * 5000, "0 to 999"),
                        ("golden retreiver", "such as golden retriever"), ("crane", "one of the numbers 134 and 517")):
        with pytest.raises(comfyui.errors.ConfigError, match=words):
            label.execute(model, text)
    with pytest.raises(comfyui.errors.ConfigError, match="is not class-conditional"):
        label.execute(comfyui.ours("sd3", comfyui.config()), "1")


@pytest.mark.parametrize("marks, words", [
    (torch.randn(1, 77, 768), "adds a text or a mix of classes"),
    (torch.full((1, 1, 1000), 0.5), "adds a text or a mix of classes"),
    (torch.eye(1, 1000).expand(1, 2, 1000), "adds a text or a mix of classes"),
    (torch.eye(1, 99)[None], "^Use xDiT Class Label: "),
    (torch.eye(1, 1001)[None], "^Use xDiT Class Label: ")], ids=["text", "average", "two", "fewer", "more"])
def test_a_prompt_that_is_no_class_is_refused(comfyui, folder_of, marks, words):
    model = comfyui.load_model.execute(folder_of("DiT")[0], "fp32", comfyui.config()).args[0]

    with pytest.raises((comfyui.errors.ConfigError, comfyui.errors.UnsupportedError), match=words):
        model.model.diffusion_model.forward(torch.zeros(1, 4, 8, 8), torch.tensor([500.0]), context=marks)
