"""Networks that ComfyUI's nodes put inside of a model and that add to the image after its blocks: our MODEL draws what
the native MODEL draws with them, under every method."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.sampling.test_control import LAYOUTS
from tests.programs.model_nodes import run_node
from tests.support.model_patch_zoo import save_model_patch, thin_classes
from tests.support.tolerances import close, relative_error

TOLERANCE = 2e-5                           # relative, float32 on both sides
DEEP = "z-image-deep.safetensors"          # of as many layers as the published one, which the node takes for granted
NUM_LAYERS = 30
LLLITE = "AnimaLLLiteApply", "lllite", None
NODES = {"wan": ("WanUni3CControlnetApply", "uni3c", "vae-wan"),
         "z-image": ("ZImageFunControlnet", "z-image-fun", "vae-flux"),
         "qwen-image": ("QwenImageDiffsynthControlnet", "qwen-blockwise", "vae-wan"),
         "anima": LLLITE, "cosmos-predict2": LLLITE}
QUICK = ("wan", "cfg2"), ("z-image", "ulysses2"), ("qwen-image", "ring2")


class Networks:
    """Applies ComfyUI's nodes to MODELs."""

    def __init__(self, comfyui, vae_of):
        self.comfyui, self.vae_of, self.folder = comfyui, vae_of, comfyui.base / "made_patches"
        self.folder.mkdir(exist_ok=True)
        comfyui.folder_paths.add_model_folder_path("model_patches", str(self.folder), is_default=True)
        from tests.programs.model_nodes import model_nodes
        model_nodes(comfyui)
        self.nodes = comfyui.nodes.NODE_CLASS_MAPPINGS

    def load(self, name, control_layers):
        """A new object of a network, by ComfyUI's loader: its nodes keep what they have computed in it."""
        loader, file = self.nodes["ModelPatchLoader"], f"{name}-{control_layers}.safetensors"
        with thin_classes(loader, control_layers):
            if not (self.folder / file).exists():
                save_model_patch(name, self.folder / file, loader)
            return loader().load_model_patch(file)[0]

    def apply(self, kind, model, control_layers=1, **settings):
        node, name, vae = NODES[kind]
        generator = torch.Generator().manual_seed(5)
        image = torch.rand(5 if kind == "wan" else 1, 72, 64, 3, generator=generator)
        taken = {"render_video": image, "start_percent": 0.0, "end_percent": 1.0} if kind == "wan" else {
            "image": image}
        taken |= {"start_percent": 0.0, "end_percent": 1.0} if vae is None else {
            "vae": self.vae_of(vae, encoder=True)}
        return run_node(self.nodes[node], {"model": model, "model_patch": self.load(name, control_layers),
                                           "strength": 0.8, **taken, **settings})[0]


@pytest.fixture(scope="module")
def networks(comfyui, vae_of):
    return Networks(comfyui, vae_of)


def compare(networks, kind, ours, native, settings, **sampled):
    """With the network, latents are the same, and others than without."""
    comfyui = networks.comfyui
    sampled = {"steps": 2, **sampled}

    result, reference = (comfyui.sample(networks.apply(kind, model, **settings), kind, **sampled)
                         for model in (ours, native))

    close(result, reference, TOLERANCE)
    assert relative_error(reference, comfyui.sample(native, kind, **sampled)) > 1e-3, "a network that adds nothing"


@pytest.mark.parametrize("kind, layout", [
    *QUICK, *(pytest.param(kind, layout, marks=pytest.mark.slow) for kind in NODES for layout in LAYOUTS
              if (kind, layout) not in QUICK)])
def test_every_method_equals_native_ksampler(comfyui, networks, kind, layout):
    """A latent of odd sides, and a batch under the data method."""
    devices, degrees = LAYOUTS[layout]

    latent = comfyui.latent(kind, batch=2 if layout == "data2" else 1, size=(18, 15))
    if NODES[kind] == LLLITE:                                  # which is for pictures
        latent["samples"] = latent["samples"][:, :, :1]

    compare(networks, kind, comfyui.ours(kind, comfyui.config(devices, **degrees)), comfyui.native(kind), {},
            latent=latent)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cfg2", "pipefusion2-ulysses2"])
def test_two_lllites_of_which_one_ends_early_equal_native_ksampler(comfyui, networks, layout):
    """One after the other, the second from its first step to the middle of the run; with a picture for each of two
    latents."""
    devices, degrees = LAYOUTS[layout]
    latent = {"samples": comfyui.latent("anima", batch=2, size=(18, 15))["samples"][:, :, :1]}
    images, results = torch.rand(2, 72, 64, 3, generator=torch.Generator().manual_seed(6)), []
    for model in (comfyui.ours("anima", comfyui.config(devices, **degrees)), comfyui.native("anima")):
        twice = networks.apply("anima", networks.apply("anima", model), strength=-0.6, image=images, end_percent=0.5)
        results.append(comfyui.sample(twice, "anima", steps=4, latent=latent))
    whole = networks.apply("anima", networks.apply("anima", model), strength=-0.6, image=images)

    close(*results, TOLERANCE)
    assert relative_error(comfyui.sample(whole, "anima", steps=4, latent=latent), results[1]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind, frames, words", [
    ("anima", 3, "Use a latent of one frame"), ("wan", 1, "Remove the node that adds an LLLite: it does not")])
def test_an_lllite_for_another_latent_or_model_is_refused(comfyui, networks, kind, frames, words):
    latent = {"samples": comfyui.latent(kind)["samples"][:, :, :frames]}
    model = run_node(networks.nodes["AnimaLLLiteApply"], {
        "model": comfyui.ours(kind, comfyui.config()), "model_patch": networks.load("lllite", 1), "strength": 1.0,
        "image": torch.rand(1, 72, 64, 3), "start_percent": 0.0, "end_percent": 1.0})[0]

    with pytest.raises((comfyui.errors.ConfigError, comfyui.errors.UnsupportedError), match=words):
        comfyui.sample(model, kind, latent=latent)


def lora(model, name, strength=0.7):
    """The MODEL with a LoRA for two of its layers that are read where ComfyUI samples, and one that is not."""
    generator, found = torch.Generator().manual_seed(9), {}
    for layer in ("x_embedder", "noise_refiner.0.attention.qkv", "layers.1.attention.out"):
        rows, columns = model.model.state_dict()[f"diffusion_model.{layer}.weight"].shape
        found |= {f"diffusion_model.{layer}.lora_up.weight": 0.3 * torch.randn(rows, 4, generator=generator),
                  f"diffusion_model.{layer}.lora_down.weight": 0.3 * torch.randn(4, columns, generator=generator)}
    import comfy.sd
    return comfy.sd.load_lora_for_models(model, None, found, strength, 0)[0]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"latent_batch": 1}, {"latent_batch": 2}], ids=str)
def test_with_lora_masks_and_two_prompts_equals_native_ksampler(comfyui, networks, settings):
    """The network is given what the model's embedder and refiner make, with the LoRA; a picture to fill in, and a
    mask. Of two prompts each is a call of its own."""
    first, second = comfyui.conditioning("z-image", 1), comfyui.conditioning("z-image", 4, 45)
    first[0][1] |= {"area": (12, 18, 0, 0), "strength": 1.0, "set_area_to_bounds": False}
    mask = torch.zeros(1, 72, 64)
    mask[:, 20:60, 10:40] = 1
    filling = {"inpaint_image": torch.rand(1, 72, 64, 3, generator=torch.Generator().manual_seed(8)), "mask": mask}
    ours, native = (lora(model, "z-image") for model in (
        comfyui.ours("z-image", comfyui.config("cpu,cpu", cfg=2)), comfyui.native("z-image")))

    compare(networks, "z-image", ours, native, filling, positive=first + second,
            latent=comfyui.latent("z-image", batch=settings["latent_batch"], size=(18, 15)))


def deep(comfyui, monkeypatch):
    """MODELs of a file of Z-Image with thirty layers."""
    import comfy.supported_models
    detected = comfy.supported_models.ZImage
    monkeypatch.setattr(detected, "unet_extra_config", detected.unet_extra_config | {"n_layers": NUM_LAYERS})
    path = comfyui.base / "diffusion_models" / DEEP
    if not path.exists():
        tensors = load_file(path.with_name(comfyui.file("z-image")))
        for name, tensor in [pair for pair in tensors.items() if pair[0].startswith("layers.")]:
            _, number, rest = name.split(".", 2)
            tensors |= {f"layers.{layer}.{rest}": tensor.clone() for layer in range(int(number), NUM_LAYERS, 2)}
        save_file(tensors, path)
    return (comfyui.load_model.execute(DEEP, "fp32", comfyui.config("cpu,cpu", pipefusion=2, warmup_steps=9)).args[0],
            comfyui.nodes.UNETLoader().load_unet(DEEP, "default")[0])


@pytest.mark.slow
@pytest.mark.parametrize("control_layers", [6, 15])
def test_networks_of_several_layers_equal_native_ksampler(comfyui, networks, monkeypatch, control_layers):
    """As published: one layer for five blocks, and one for two with a refiner of its own. Over two stages."""
    compare(networks, "z-image", *deep(comfyui, monkeypatch), {"control_layers": control_layers})


def test_a_hook_changes_what_the_network_is_given(comfyui, networks):
    """A LoRA that is in effect for one prompt alone, of layers that are read where ComfyUI samples."""
    import comfy.hooks
    generator = torch.Generator().manual_seed(9)
    added = {f"diffusion_model.x_embedder.lora_{side}.weight": 0.3 * torch.randn(*shape, generator=generator)
             for side, shape in (("up", (384, 4)), ("down", (4, 64)))}
    results = []
    for model in (comfyui.ours("z-image", comfyui.config()), comfyui.native("z-image")):
        positive = comfyui.conditioning("z-image", 1)
        positive[0][1]["hooks"] = comfy.hooks.create_hook_lora(added, 1.0, 0.0)
        changed = networks.apply("z-image", model)
        changed.register_all_hook_patches(positive[0][1]["hooks"], comfy.hooks.create_target_dict(
            comfy.hooks.EnumWeightTarget.Model))
        results.append(comfyui.sample(changed, "z-image", steps=2, positive=positive))
    plain = comfyui.sample(networks.apply("z-image", comfyui.native("z-image")), "z-image", steps=2)

    close(*results, TOLERANCE)
    assert relative_error(results[1], plain) > 1e-3, "a hook that changes nothing"


def test_a_network_of_blocks_with_references_and_two_prompts_equals_native_ksampler(comfyui, networks):
    """It adds to the latent's tokens, not to those of a reference picture beside them; over two stages."""
    first, second = comfyui.conditioning("qwen-image", 1), comfyui.conditioning("qwen-image", 4, 45)
    first[0][1]["reference_latents"] = [torch.randn(1, 16, 1, 10, 12, generator=torch.Generator().manual_seed(3))]
    ours = comfyui.ours("qwen-image", comfyui.config("cpu,cpu", pipefusion=2, warmup_steps=9))

    compare(networks, "qwen-image", ours, comfyui.native("qwen-image"), {}, positive=first + second,
            latent=comfyui.latent("qwen-image", size=(18, 15)))


HYPERNETWORKS = {"plain": {}, "deep": {"activation_func": "mish", "is_layer_norm": True, "activate_output": True},
                 "dropout": {"activation_func": "relu", "use_dropout": True, "last_layer_dropout": True}}


def with_hypernetwork(comfyui, model, name, strength=0.8):
    folder = comfyui.base / "made_hypernetworks"
    folder.mkdir(exist_ok=True)
    comfyui.folder_paths.add_model_folder_path("hypernetworks", str(folder), is_default=True)
    if not (folder / f"{name}.pt").exists():
        settings, generator = HYPERNETWORKS[name], torch.Generator().manual_seed(9)

        def layers(width):
            made, wide = {}, 2 * width
            for number, shape in enumerate(((wide, width), (width, wide))):
                made[f"{2 * number}.weight"] = 0.3 * torch.randn(*shape, generator=generator) / shape[1] ** 0.5
                made[f"{2 * number}.bias"] = 0.1 * torch.randn(shape[0], generator=generator)
                if settings.get("is_layer_norm"):
                    made[f"{2 * number + 1}.weight"] = 1 + 0.1 * torch.randn(shape[0], generator=generator)
                    made[f"{2 * number + 1}.bias"] = 0.1 * torch.randn(shape[0], generator=generator)
            return made
        config = comfyui.transformer_config("sd15")
        widths = {config["cross_attention_dim"], *config["block_out_channels"]}
        torch.save({**settings, **{width: [layers(width), layers(width)] for width in widths}}, folder / f"{name}.pt")
    from tests.programs.model_nodes import model_nodes
    return run_node(model_nodes(comfyui)["HypernetworkLoader"], {
        "model": model, "hypernetwork_name": f"{name}.pt", "strength": strength})[0]


@pytest.mark.parametrize("name, layout", [
    ("deep", "cfg2"), *(pytest.param("plain", layout, marks=pytest.mark.slow) for layout in ("one", "data2")),
    *(pytest.param("deep", layout, marks=pytest.mark.slow) for layout in ("displaced2", "cfg2-displaced2"))])
def test_hypernetworks_equal_native_ksampler(comfyui, name, layout):
    """On keys and values of both attentions, at odd sides; two of them, one after the other."""
    devices, degrees = LAYOUTS[layout]
    latent = comfyui.latent("sd15", batch=2 if layout == "data2" else 1, size=(18, 15))
    models = comfyui.ours("sd15", comfyui.config(devices, **degrees)), comfyui.native("sd15")

    result, reference = (comfyui.sample(
        with_hypernetwork(comfyui, with_hypernetwork(comfyui, model, "plain", -0.5), name), "sd15", steps=2,
        latent=latent) for model in models)

    close(result, reference, TOLERANCE)
    assert relative_error(reference, comfyui.sample(models[1], "sd15", steps=2, latent=latent)) > 1e-3


def test_a_hypernetwork_that_draws_at_random_or_is_for_other_models_is_refused_by_name(comfyui):
    for kind, name, words in (("sd15", "dropout", "has layers that xDiT does not support .Dropout"),
                              ("sd3", "plain", "it does not support SD3")):
        model = with_hypernetwork(comfyui, comfyui.ours(kind, comfyui.config()), name)
        with pytest.raises(comfyui.errors.UnsupportedError, match=words):
            comfyui.sample(model, kind, steps=1)


def test_what_is_added_elsewhere_draws_something_else(comfyui, networks, monkeypatch):
    """A mutant: each token gets what is for the one before it."""
    import sys
    additions = sys.modules[f"{comfyui.pack.__name__}.nodes.bridge.sampling.host_residuals"].Additions
    residuals = additions.residuals
    monkeypatch.setattr(additions, "residuals", lambda *given: {name: added.roll(1, 1)
                                                                for name, added in residuals(*given).items()})
    result, reference = (comfyui.sample(networks.apply("wan", model), "wan", steps=1)
                         for model in (comfyui.ours("wan", comfyui.config()), comfyui.native("wan")))

    assert relative_error(result, reference) > 10 * TOLERANCE


def test_stale_patches_go_one_step_after_the_other_and_say_why(comfyui, networks, said):
    model = networks.apply("wan", comfyui.ours("wan", comfyui.config("cpu,cpu", pipefusion=2, warmup_steps=1)))

    assert comfyui.sample(model, "wan").isfinite().all()
    assert any("steps not overlapped, because this workflow uses model patches" in text for text in said)


def test_a_network_of_another_model_is_refused_by_name(comfyui, networks):
    model = networks.apply("z-image", comfyui.ours("wan", comfyui.config()))

    with pytest.raises(comfyui.errors.UnsupportedError, match="Wan does not support all of them"):
        comfyui.sample(model, "wan", steps=1)
