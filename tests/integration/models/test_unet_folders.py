"""U-Nets in diffusers folders, as published, equal ComfyUI's own KSampler on the same weights in its own file;
what a scheduler says."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.lora_zoo import adapters
from tests.support.tolerances import close, relative_error

TOLERANCE = 2e-5                           # relative, float32 on both sides
CROSS, PLAIN = "CrossAttnDownBlock2D", "DownBlock2D"
XL = {"addition_embed_type": "text_time", "addition_time_embed_dim": 256, "use_linear_projection": True,
      "layers_per_block": 1}
# arguments of diffusers' class, in the words of the published config.json
PUBLISHED = {
    "sd15": {"block_out_channels": (32, 64, 64, 64), "layers_per_block": 1, "cross_attention_dim": 768,
             "attention_head_dim": 8, "down_block_types": (CROSS, CROSS, CROSS, PLAIN)},
    "sd2": {"block_out_channels": (64,) * 4, "layers_per_block": 2, "cross_attention_dim": 1024,
            "attention_head_dim": (1,) * 4,
            "down_block_types": (CROSS, CROSS, CROSS, PLAIN), "use_linear_projection": True, "upcast_attention": True},
    "sdxl": {**XL, "block_out_channels": (32, 64, 128), "cross_attention_dim": 2048, "attention_head_dim": (0, 1, 2),
             "down_block_types": (PLAIN, CROSS, CROSS), "transformer_layers_per_block": (1, 1, 2),
             "projection_class_embeddings_input_dim": 2816},
    "sdxl-refiner": {**XL, "block_out_channels": (32, 64, 64, 64), "cross_attention_dim": 1280,
                     "attention_head_dim": (0, 1, 1, 1),
                     "down_block_types": (PLAIN, CROSS, CROSS, PLAIN), "transformer_layers_per_block": 2,
                     "projection_class_embeddings_input_dim": 2560}}
PUBLISHED |= {
    "sd-x4-upscaler": {"block_out_channels": (32, 64, 64, 64), "layers_per_block": 1, "cross_attention_dim": 1024,
                       "attention_head_dim": 8, "in_channels": 7, "num_class_embeds": 1000,
                       "only_cross_attention": (True, True, True, False), "use_linear_projection": True,
                       "down_block_types": (PLAIN, CROSS, CROSS, CROSS)},
    "ssd-1b": {**PUBLISHED["sdxl"], "layers_per_block": 2, "transformer_layers_per_block": (1, (1, 1), (2, 2)),
               "reverse_transformer_layers_per_block": ((2, 2, 3), (2, 1, 1), 1), "mid_block_type": "UNetMidBlock2D"},
    "koala-700m": {**PUBLISHED["sdxl"], "transformer_layers_per_block": (1, 2, 2), "mid_block_type": None}}
PUBLISHED |= {f"{kind}-inpaint": {**PUBLISHED[kind], "in_channels": 9} for kind in ("sd15", "sdxl")}
# by which ComfyUI tells velocity from noise
BIAS = "up_blocks.3.attentions.2.transformer_blocks.0.norm1.bias"
SD_NOISE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
OTHERWISE = {"sd-x4-upscaler": {"beta_start": 0.0001, "beta_end": 0.02, "prediction_type": "v_prediction"}}


@pytest.fixture(scope="module")
def folder_of(comfyui):
    """folder_of(kind, name, **scheduler): (the path of a folder as diffusers saves it, its name).
    Weights are those of the tiny file."""
    import diffusers

    import comfy.utils
    comfyui.folder_paths.add_model_folder_path("diffusers", str(comfyui.base / "diffusers"), is_default=True)

    def make(kind, name=None, **scheduler):
        name = name or f"unet-{kind}"
        path = comfyui.base / "diffusers" / name
        if not path.exists():
            config = {"up_block_types": tuple(kind.replace("Down", "Up")
                                              for kind in reversed(PUBLISHED[kind]["down_block_types"]))}
            unet = diffusers.UNet2DConditionModel(sample_size=96, **PUBLISHED[kind] | config)
            tensors = load_file(comfyui.base / "diffusion_models" / comfyui.file(kind))
            native = comfyui.native(kind).model.model_config.unet_config
            names = comfy.utils.unet_to_diffusers(
                {**native, "num_res_blocks": [PUBLISHED[kind]["layers_per_block"]] * len(
                    PUBLISHED[kind]["block_out_channels"])})
            names |= {"class_embedding.weight": "label_emb.weight"}            # which ComfyUI reads from no folder
            unet.load_state_dict({key: tensors[own] for key, own in names.items() if key in unet.state_dict()})
            unet.save_pretrained(path / "unet", max_shard_size="2MB")
            said = SD_NOISE | OTHERWISE.get(kind, {}) | scheduler
            diffusers.DDIMScheduler(**said).save_pretrained(path / "scheduler")
            (path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
        return path, name
    return make


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_folder_equals_native_ksampler(comfyui, folder_of, kind):
    from comfy_extras.nodes_model_advanced import ModelSamplingDiscrete
    path, name = folder_of(kind)
    assert (len(list((path / "unet").glob("*.safetensors"))) > 1
            and name in comfyui.load_model.define_schema().inputs[0].options)

    model = comfyui.load_model.execute(name, "fp32", comfyui.config()).args[0]

    assert type(model.model) is type(comfyui.native(kind).model)
    # Of SD 2 ComfyUI guesses from its tensors; the folder's scheduler says that it predicts noise.
    native = comfyui.native(kind)
    if kind not in OTHERWISE:
        native, = ModelSamplingDiscrete().patch(native, "eps", False)
    close(comfyui.sample(model, kind), comfyui.sample(native, kind), TOLERANCE)


def one_file(comfyui, folder, kind):
    """The name of a file with the tensors of a folder's U-Net, under diffusers' names."""
    name = f"diffusers-{kind}.safetensors"
    shards = sorted((folder / "unet").glob("*.safetensors"))
    save_file({key: tensor for shard in shards for key, tensor in load_file(shard).items()},
              comfyui.base / "diffusion_models" / name)
    return name


@pytest.mark.parametrize("kind", [kind for kind in PUBLISHED if kind != "sd2"])
def test_a_file_under_diffusers_names_equals_native_ksampler(comfyui, folder_of, kind):
    """As some are published, SDXL-Lightning among them."""
    model = comfyui.load_model.execute(one_file(comfyui, folder_of(kind)[0], kind), "fp32", comfyui.config()).args[0]

    close(comfyui.sample(model, kind), comfyui.sample(comfyui.native(kind), kind), TOLERANCE)


def test_lora_on_weights_under_diffusers_names_equals_native(comfyui, folder_of):
    import comfy.sd
    native, (path, folder) = comfyui.native("sdxl"), folder_of("sdxl")
    state = native.model.state_dict()
    shapes = {name: list(state[key].shape)
              for name, key in sorted(comfy.lora.model_lora_keys_unet(native.model, {}).items())
              if name.startswith("lora_unet_") and key in state and state[key].ndim == 2}
    lora = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        lora |= adapters("lora", {name: shape}, seed)

    def with_lora(model):
        return comfyui.sample(comfy.sd.load_lora_for_models(model, None, dict(lora), 0.7, 0.0)[0], "sdxl")
    reference = with_lora(native)

    assert relative_error(reference, comfyui.reference("sdxl")) > 1e-3
    for name in (folder, one_file(comfyui, path, "sdxl")):
        close(with_lora(comfyui.load_model.execute(name, "fp32", comfyui.config()).args[0]), reference, TOLERANCE, name)


@pytest.mark.parametrize("kind, zsnr", [("sd15", False), ("sd2", False), ("sdxl", True)])
def test_a_scheduler_that_predicts_velocity_is_heeded(comfyui, folder_of, kind, zsnr):
    """As ComfyUI samples its own model where ModelSamplingDiscrete says so; of SD 2 whatever its tensors look like."""
    from comfy_extras.nodes_model_advanced import ModelSamplingDiscrete
    _, name = folder_of(kind, f"velocity-{kind}", prediction_type="v_prediction", rescale_betas_zero_snr=zsnr)
    native, = ModelSamplingDiscrete().patch(comfyui.native(kind), "v_prediction", zsnr)

    model = comfyui.load_model.execute(name, "fp32", comfyui.config()).args[0]

    (kind_of, sigmas), (expected, others) = (([cls.__name__ for cls in type(one).__mro__], one.sigmas) for one in (
        each.get_model_object("model_sampling") for each in (model, native)))
    assert {"V_PREDICTION", "ModelSamplingDiscrete"} <= {*kind_of} & {*expected} and torch.allclose(sigmas, others)


def test_a_scheduler_that_predicts_noise_is_heeded(comfyui, folder_of):
    """Of SD 2 ComfyUI tells velocity by the spread of one bias; the scheduler knows."""
    path, name = folder_of("sd2", "noise-sd2")
    for file in (path / "unet").glob("*.safetensors"):
        tensors = load_file(file)
        if BIAS in tensors:
            tensors[BIAS] = torch.linspace(-1, 1, len(tensors[BIAS]))
            save_file(tensors, file, metadata={"format": "pt"})

    model = comfyui.load_model.execute(name, "fp32", comfyui.config()).args[0]
    (path / "scheduler" / "scheduler_config.json").unlink()
    unsaid = comfyui.load_model.execute(name, "fp32", comfyui.config()).args[0]

    assert [one.model.model_type.name for one in (model, unsaid)] == ["EPS", "V_PREDICTION"]


@pytest.mark.parametrize("kind, scheduler, expected", [
    ("sdxl", {"_class_name": "EDMEulerScheduler", "prediction_type": "v_prediction", "sigma_max": 120.0},
     "V_PREDICTION_EDM"),
    ("sdxl", {"_class_name": "EDMDPMSolverMultistepScheduler"}, "EDM"), ("sdxl", {"prediction_type": "sample"}, None),
    ("sd15", {"_class_name": "EDMEulerScheduler"}, None), ("sd15", {"beta_schedule": "linear"}, None),
    ("sdxl", {"_class_name": "FlowMatchEulerDiscreteScheduler"}, None),
    ("sdxl-refiner", {"prediction_type": "v_prediction"}, None)],
    ids=str)
def test_other_schedulers_are_heeded_or_refused(comfyui, folder_of, tmp_path, kind, scheduler, expected):
    folder = tmp_path / "other"
    shutil.copytree(folder_of(kind)[0], folder)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    if expected is None:
        with pytest.raises(comfyui.errors.CheckpointError,
                           match="other (needs the sampling of its scheduler_config|is a SDXL model whose scheduler)"):
            comfyui.proxy.load_proxy(str(folder), "fp32", comfyui.config())
        return

    model = comfyui.proxy.load_proxy(str(folder), "fp32", comfyui.config()).model

    assert model.model_type.name == expected
    assert round(float(model.model_sampling.sigma_max), 2) == scheduler.get("sigma_max", 80.0)
    assert type(model.latent_format).__name__ == ("SDXL" if expected != "EDM" else "SDXL_Playground_2_5")


@pytest.mark.parametrize("change, words", [
    ({"time_cond_proj_dim": 256}, "time_cond_proj_dim = 256"),
    ({"attention_head_dim": 4}, r"attention_head_dim = \(4, 4, 4, 4\)"),
    ({"use_linear_projection": True}, "use_linear_projection = True"),
    ({"down_block_types": 5}, "of other types than diffusers writes"),
    ({"encoder_hid_dim_type": "ip_image_proj"}, "encoder_hid_dim_type"),
    ({"_class_name": "UNet3DConditionModel"}, "is a UNet3DCond"),
    ({"_class_name": "AutoencoderKL"}, "is a VAE: load"), ({"_class_name": ["x"]}, "is a x, which"),
    ({"_class_name": 3}, "does not say which"),
    ({"_class_name": None, "architectures": ["CLIPTextModel"]}, "CLIPTextModel, which is a text encoder")], ids=str)
def test_settings_of_a_u_net_that_are_not_honoured_are_refused(comfyui, folder_of, tmp_path, change, words):
    folder = tmp_path / "changed"
    shutil.copytree(folder_of("sd15")[0], folder)
    path = folder / "unet" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    with pytest.raises(comfyui.errors.CheckpointError, match=words):
        comfyui.proxy.load_proxy(str(folder), "fp32", comfyui.config())
