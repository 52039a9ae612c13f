"""ControlNet: our MODEL with what ComfyUI's ControlNets give draws what the native MODEL draws with it,
under every method."""

import functools

import pytest
import torch
from safetensors.torch import save_file

from tests.integration.sampling.test_pipefusion import sample_oracle, staged, transformer
from tests.support.control_zoo import CONTROLNETS, residuals, save_controlnet
from tests.support.tiers import by_default
from tests.support.tiny_checkpoints import VARIANTS, families, save_gguf, save_scaled
from tests.support.tolerances import close, relative_error

TOLERANCE = 2e-5                           # relative, float32 on both sides
VAES = {"sd3-instantx": "vae-taesd", "flux-instantx": "vae-taesd", "qwen-instantx": "vae-wan",
        "qwen-inpaint": "vae-wan", "qwen-fun": "vae-wan", "sd35-stability": "vae-taesd"}
LAYOUTS = {"one": ("cpu", {}), "cfg2": ("cpu,cpu", {"cfg": 2}), "data2": ("cpu,cpu", {"data": 2}),
           "ulysses2": ("cpu,cpu", {"ulysses": 2}),
           "ring2": ("cpu,cpu", {"ring": 2}), "tensor2": ("cpu,cpu", {"tensor": 2}),
           "pipefusion2": ("cpu,cpu", {"pipefusion": 2, "warmup_steps": 9}),
           "displaced2": ("cpu,cpu", {"displaced": 2, "warmup_steps": 9}),
           "pipefusion2-ulysses2": ("cpu,cpu,cpu,cpu", {"pipefusion": 2, "ulysses": 2, "warmup_steps": 9}),
           "cfg2-displaced2": ("cpu,cpu,cpu,cpu", {"cfg": 2, "displaced": 2, "warmup_steps": 9})}


class Controls:
    """Prompts with ControlNets, as ComfyUI's nodes make them."""

    def __init__(self, comfyui, vae_of):
        self.comfyui, self.vae_of = comfyui, vae_of
        self.folder = comfyui.base / "made_controlnets"
        self.folder.mkdir()

    def load(self, name):
        """A new object of a ControlNet's file, by ComfyUI's loader."""
        import comfy.controlnet
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            save_controlnet(name, path)
        return comfy.controlnet.load_controlnet(str(path))

    def apply(self, prompts, name, net=None, seed=5, strength=0.8, start=0.0, end=1.0):
        """(positive, negative) after ComfyUI's Apply ControlNet."""
        image = torch.rand(1, 72, 64, 3, generator=torch.Generator().manual_seed(seed))
        vae = self.vae_of(VAES[name], encoder=VAES[name] != "vae-wan") if name in VAES else None
        if name == "qwen-inpaint":
            from comfy_extras.nodes_controlnet import ControlNetInpaintingAliMamaApply
            mask = torch.zeros(1, 72, 64)
            mask[:, 20:60] = 1
            return ControlNetInpaintingAliMamaApply.execute(
                *prompts, self.load(name), vae, image, mask, strength, start, end).args
        return self.comfyui.nodes.ControlNetApplyAdvanced().apply_controlnet(
            *prompts, net or self.load(name), image, strength, start, end, vae)

    def prompts(self, kind, **lengths):
        return self.comfyui.conditioning(kind, 1, **lengths), self.comfyui.conditioning(kind, 2)


@pytest.fixture(scope="module")
def controls(comfyui, vae_of):
    return Controls(comfyui, vae_of)


def compare(comfyui, kind, config, prompts, **arguments):
    positive, negative = prompts
    arguments = {"positive": positive, "negative": negative, "steps": 2, **arguments}

    result = comfyui.sample(comfyui.ours(kind, config), kind, **arguments)

    reference = comfyui.sample(comfyui.native(kind), kind, **arguments)
    plain = comfyui.sample(comfyui.native(kind), kind, **{**arguments, "positive": None, "negative": None})
    close(result, reference, TOLERANCE)
    assert relative_error(reference, plain) > 1e-3, "a ControlNet that changes nothing"


FILES = [("sd3-instantx", "cfg2"), ("sd15", "displaced2"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (
    ("sdxl", "data2"), ("sd15-t2i", "displaced2"), ("sdxl-t2i", "cfg2"), ("sdxl-t2i", "data2"),
    ("sd35-stability", "ulysses2"), ("sdxl", "cfg2-displaced2"), ("sd3-instantx", "ring2"),
    ("sd3-instantx", "pipefusion2-ulysses2"), ("flux-instantx", "ulysses2"), ("flux-xlabs", "pipefusion2"),
    ("qwen-instantx", "ring2"), ("sdxl-lora", "displaced2"), ("sdxl-lora", "data2"), ("qwen-fun", "pipefusion2"),
    ("qwen-fun", "tensor2"), ("qwen-fun", "ulysses2"),
    ("qwen-inpaint", "ring2")))]


@pytest.mark.slow
@pytest.mark.parametrize("name, layout", FILES)
def test_controlnets_equal_native_ksampler(comfyui, controls, name, layout):
    """A latent of odd sides, and a batch, which a hint is repeated for."""
    kind, (devices, degrees) = CONTROLNETS[name][0], LAYOUTS[layout]
    latent = comfyui.latent(kind, batch=2 if layout == "data2" else 1, size=(20, 15) if families()[kind].plan.is_unet
                            else (18, 14))

    compare(comfyui, kind, comfyui.config(devices, **degrees), controls.apply(controls.prompts(kind), name),
            latent=latent)


@pytest.mark.slow
def test_a_prompt_for_controlnets_alone_equals_native_ksampler(comfyui, controls):
    """As CLIP Text Encode Controlnet gives it. The model itself has the other prompt."""
    text = comfyui.conditioning("sd3", 4)[0][0]
    prompts = [[[tensor, {**options, "cross_attn_controlnet": text}] for tensor, options in prompt]
               for prompt in controls.apply(controls.prompts("sd3"), "sd3-instantx")]
    plain = controls.apply(controls.prompts("sd3"), "sd3-instantx")

    compare(comfyui, "sd3", comfyui.config("cpu"), prompts)

    drawn, drawn_plain = (comfyui.sample(comfyui.native("sd3"), "sd3", positive=positive, negative=negative, steps=2)
                          for positive, negative in (prompts, plain))
    assert relative_error(drawn, drawn_plain) > 10 * TOLERANCE


def test_a_controlnet_copies_layers_of_a_quantised_model(comfyui, controls):
    """That of SD3.5 takes an embedder of the model."""
    folder, name = comfyui.base / "diffusion_models", "control-sd35.gguf"
    save_file(save_gguf(folder / name, folder / comfyui.file("sd35-large")), folder / "control-sd35-plain.safetensors")
    model = comfyui.load_model.execute(name, "default", comfyui.config("cpu")).args[0]
    positive, negative = controls.apply(controls.prompts("sd35-large"), "sd35-stability")
    arguments = {"positive": positive, "negative": negative, "steps": 1}

    result = comfyui.sample(model, "sd35-large", **arguments)

    native = comfyui.nodes.UNETLoader().load_unet("control-sd35-plain.safetensors", "default")[0]
    close(result, comfyui.sample(native, "sd35-large", **arguments), TOLERANCE)


def with_residuals(comfyui, kind, prompts, **options):
    """Both prompts with a ControlNet that adds something of its own at every place."""
    control = residuals(families()[kind], comfyui.transformer_config(kind), **options)
    return [[[text, {**given, "control": control, "control_apply_to_uncond": False}] for text, given in prompt]
            for prompt in prompts]


KINDS = [kind for kind, family in families().items()
         if kind not in VARIANTS and family.takes_controlnets and not family.plan.hooks == "replicated"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind if kind == "sd3" else pytest.param(kind, marks=pytest.mark.slow)
                                  for kind in KINDS])
def test_every_place_of_every_family_is_comfyuis(comfyui, controls, kind):
    """Something else at every block, of both kinds that ComfyUI's models take; prompts of unequal length."""
    config = comfyui.config() if families()[kind].plan.is_unet else comfyui.config("cpu,cpu", ring=2)

    compare(comfyui, kind, config, with_residuals(comfyui, kind, controls.prompts(kind, tokens=31)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", pytest.param("pipefusion2", marks=pytest.mark.slow)])
def test_several_controlnets_with_strengths_and_ranges_equal_native_ksampler(comfyui, controls, layout):
    """One for the first steps, one for the last ones, one for the positive prompt alone;
    KSampler, whose batch is of both branches."""
    devices, degrees = LAYOUTS[layout]
    prompts = controls.apply(controls.prompts("sd3"), "sd3-instantx", strength=0.5, end=0.5)
    prompts = controls.apply(prompts, "sd3-instantx", seed=6, strength=1.3, start=0.3)
    positive = with_residuals(comfyui, "sd3", prompts[:1])[0] if layout == "one" else prompts[0]

    compare(comfyui, "sd3", comfyui.config(devices, **degrees), (positive, prompts[1]), steps=4, sampler="heun")


def test_stale_patches_equal_the_oracle(comfyui, controls, said):
    """Each patch has its own rows of what a ControlNet adds, which reads the whole latent:
    the steps run one after the other."""
    _, blocks, _ = transformer(comfyui.base / "diffusion_models" / comfyui.file("sd3"))
    positive, negative = controls.apply(controls.prompts("sd3"), "sd3-instantx")
    arguments = {"positive": positive, "negative": negative, "latent": comfyui.latent("sd3", size=(22, 13))}
    now = {}

    def noting_control(model):
        net = model.model.diffusion_model
        predict = net.forward

        def forward(*args, control=None, **options):
            now.update(control=control)
            return predict(*args, **options)
        net.forward = model.remote.modules[""][1]["forward"] = forward
        return model

    def added(module, args, output, number):
        return ((output[0], output[1] + now["control"]["output"][number]) if number < len(now["control"]["output"])
                else None)
    hooks = [block.register_forward_hook(functools.partial(added, number=number))
             for number, block in enumerate(blocks.transformer_blocks)]
    try:
        reference = sample_oracle(comfyui, "sd3", 4, 1, noting_control, **arguments)
    finally:
        for hook in hooks:
            hook.remove()

    close(comfyui.sample(staged(comfyui, "sd3"), "sd3", **arguments), reference, TOLERANCE)
    assert any("steps not overlapped, because this workflow uses a ControlNet" in text for text in said)


OF_THE_MODEL = {"sdxl-lora": "input_blocks.0.0.weight", "qwen-fun": "img_in.weight"}


@pytest.mark.parametrize("name", by_default(["sdxl-lora"], OF_THE_MODEL))
def test_controlnets_that_compute_with_the_models_own_layers_equal_native_ksampler(comfyui, controls, name,
                                                                                   monkeypatch):
    """And of a layer that a node has patched, they take the patched weight."""
    kind, place = CONTROLNETS[name][0], f"diffusion_model.{OF_THE_MODEL[name]}"
    change = torch.randn(comfyui.native(kind).model.state_dict()[place].shape,
                         generator=torch.Generator().manual_seed(3))

    def drawn(model):
        model = model.clone()
        model.add_patches({place: ("diff", (0.3 * change,))})
        positive, negative = controls.apply(controls.prompts(kind), name)
        return comfyui.sample(model, kind, positive=positive, negative=negative, steps=2)
    reference, ours = drawn(comfyui.native(kind)), comfyui.ours(kind, comfyui.config("cpu,cpu", cfg=2))

    close(drawn(ours), reference, TOLERANCE)
    with monkeypatch.context() as patched:                     # the mutant: of the file alone
        patched.setattr(type(ours), "patched_weights", lambda self, weights, quantised: weights)
        assert relative_error(drawn(ours), reference) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("write", [save_gguf, save_scaled])
@pytest.mark.parametrize("name", OF_THE_MODEL)
def test_controlnets_compute_with_layers_of_quantised_files(comfyui, controls, name, write):
    kind, folder = CONTROLNETS[name][0], comfyui.base / "diffusion_models"
    file = f"control-{kind}-{write.__name__}" + (".gguf" if write is save_gguf else ".safetensors")
    plain = write(folder / file, folder / comfyui.file(kind))
    save_file(plain, folder / f"plain-{file}.safetensors")
    model = comfyui.load_model.execute(file, "default", comfyui.config("cpu")).args[0]
    positive, negative = controls.apply(controls.prompts(kind), name)
    arguments = {"positive": positive, "negative": negative, "steps": 2}

    result = comfyui.sample(model, kind, **arguments)

    native = comfyui.nodes.UNETLoader().load_unet(f"plain-{file}.safetensors", "default")[0]
    close(result, comfyui.sample(native, kind, **arguments), TOLERANCE)


def test_a_controlnet_of_another_model_is_refused_by_name_and_the_group_survives(comfyui, controls):
    sd3, sd15, hydit = (comfyui.ours(kind, comfyui.config("cpu,cpu")) for kind in ("sd3", "sd15", "hunyuandit"))
    for model, kind, other, message in ((sd3, "sd3", "sd15", "outputs for input blocks. Supported are output only"),
                                        (sd15, "sd15", "sdxl",
                                         r"input block 5 of this SD 1.5 model is .128, 4, 5., and it must be"),
                                        (comfyui.ours("pixart", comfyui.config("cpu,cpu")), "pixart", "sd3",
                                         "PixArt-Sigma supports no Con"),
                                        (hydit, "hunyuandit", "hunyuandit", "1 outputs for the 2 skip connections")):
        positive, negative = controls.prompts(kind)
        control = with_residuals(comfyui, other, (positive, negative))[0][0][1]["control"]
        positive[0][1]["control"] = control
        if kind == other:                                      # of fewer blocks
            get = control.get_control
            control.get_control = lambda *arguments, get=get: {
                name: tensors[:1] for name, tensors in get(*arguments).items()}
        with pytest.raises(comfyui.errors.XDiTError, match=message):
            comfyui.sample(model, kind, positive=positive, steps=1)

    comfyui.sample(sd3, "sd3", steps=1)
