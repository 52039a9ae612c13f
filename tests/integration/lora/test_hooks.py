"""Hooks, which change weights for a prompt and for some steps, on files in every quantised format: through ComfyUI's
own nodes, beside what ComfyUI draws."""

import math

import pytest
import torch
from safetensors.torch import save_file

from tests.integration.lora.test_lora import Loras
from tests.programs.model_nodes import model_nodes, run_node
from tests.support.comfy_quants import WRITTEN, save_comfy_quant
from tests.support.tiers import by_default
from tests.support.tiny_checkpoints import metadata_of, save_dequantised, save_gguf, save_scaled
from tests.support.tolerances import close, relative_error, within
from xdit_backend.checkpoints.quantisation.layer_formats import FORMATS
from xdit_backend.checkpoints.quantisation.quantise_on_load import TYPES

TOLERANCE = 2e-5                           # relative, float32 on both sides
ROUNDING = [how for how, (format_, *_) in WRITTEN.items() if FORMATS[format_].rounds_inputs]
STEPS, GUIDANCE, STRENGTH = 2, 4.0, 1.5
KEYFRAMES = (1.0, 0.4)                     # of the hook's strength, at the first step and from the second on


@pytest.fixture(scope="module")
def loras(comfyui):
    return Loras(comfyui)


@pytest.fixture(scope="module")
def files_of(comfyui):
    """files_of(how): names of a file in this format, or of that to quantise, and of one with the same weights as plain
    numbers."""
    def files(how):
        folder, source = comfyui.base / "diffusion_models", comfyui.base / "diffusion_models" / comfyui.file("sd3")
        is_gguf, plain = how.startswith(("Q", "IQ")), f"hooks-{how}-plain.safetensors"
        name = source.name if how in TYPES else f"hooks-{how}.{'gguf' if is_gguf else 'safetensors'}"
        if (folder / plain).exists():
            return name, plain
        if how in TYPES:
            save_dequantised(folder / plain, source, how)
        else:
            made = (save_gguf(folder / name, source, how) if is_gguf else save_scaled(folder / name, source)
                    if how == "scaled" else save_comfy_quant(folder / name, source, how)[0])
            save_file(made, folder / plain, metadata_of(source))
        return name, plain
    return files


def with_hook(comfyui, prompt, lora, strengths=()):
    """The prompt as Create Hook LoRA, Create Hook Keyframe and Cond Set Props make it. strengths: of the keyframes,
    which are spread evenly over the steps."""
    model_nodes(comfyui)                                       # which has ComfyUI load its further nodes
    nodes, keyframes = comfyui.nodes.NODE_CLASS_MAPPINGS, None
    hooks, = run_node(nodes["CreateHookLora"], {"lora_name": lora, "strength_model": STRENGTH, "strength_clip": 1.0})
    for number, strength in enumerate(strengths):
        keyframes, = run_node(nodes["CreateHookKeyframe"], {"strength_mult": strength, "prev_hook_kf": keyframes,
                                                            "start_percent": number / len(strengths)})
    if strengths:
        hooks, = run_node(nodes["SetHookKeyframes"], {"hooks": hooks, "hook_kf": keyframes})
    return run_node(nodes["ConditioningSetProperties"], {"cond_NEW": prompt, "strength": 1.0, "hooks": hooks,
                                                         "set_cond_area": "default"})[0]


def beside_its_layers(comfyui, loras, name, lora, changed=lambda latent: latent):
    """What ComfyUI draws of its quantised file with the LoRA in bypass mode, beside layers that stay as they are, for
    the positive prompt alone."""
    from comfy_extras.nodes_custom_sampler import DualModelGuider
    bypass = model_nodes(comfyui)["LoraLoaderBypassModelOnly"]()
    positive, negative = (comfyui.conditioning("sd3", seed) for seed in (1, 2))
    latent = comfyui.latent("sd3")["samples"]
    noise = changed(torch.randn(latent.shape, generator=torch.Generator().manual_seed(7)))
    with torch.inference_mode():                               # from the loader on, as ComfyUI runs nodes
        model, other = (comfyui.nodes.UNETLoader().load_unet(name, "default")[0] for _ in range(2))
        model = bypass.load_lora_model_only(model, lora, STRENGTH)[0]
        guider = DualModelGuider.execute(model, positive, GUIDANCE, other, negative).args[0]
        sigmas = comfyui.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", STEPS)
        return guider.sample(noise, latent, comfyui.samplers.sampler_object("euler"), sigmas, seed=7)


def moved(seed):
    """A function: noise -> the same but for the sixth digit."""
    return lambda noise: noise * (1 + 1e-6 * torch.randn(noise.shape, generator=torch.Generator().manual_seed(seed)))


def ours(comfyui, how, name, streamed=False, **degrees):
    """Our MODEL. come: of the weights comes from host memory what can."""
    def loaded(**more):
        config = comfyui.config("cpu,cpu" if degrees else "cpu", **degrees, **more)
        return comfyui.load_model.execute(name, how if how in TYPES else "default", config).args[0]
    model = loaded()
    if not streamed:
        return model
    kilobytes = math.ceil(1.01 * model.model.remote.memory.group.least_bytes / 1e3)
    model = loaded(weights_memory=f"{kilobytes / 1e6}", **{} if degrees else {"mode": "manual"})
    assert max(model.model.remote.memory.offloaded_bytes) > 0
    return model


def _words(case):
    *words, degrees = case
    return "-".join((*words, *degrees))


EXACT = [(how, adapter, {}) for how in ("nvfp4", "mxfp8", "float8_e4m3fn", "float8_e5m2", "scaled", "Q4_K", "Q8_0",
                                        "IQ2_XS", "int8") for adapter in ("lora", "loha")] + [
    ("nvfp4", "lora", {"tensor": 2}), ("Q4_K", "lora", {"pipefusion": 2}), ("mxfp8", "loha", {"displaced": 2}),
    ("scaled", "lora", {"cfg": 2}), ("nvfp4", "lora", {"streamed": True}),
    ("mxfp8", "loha", {"tensor": 2, "streamed": True}),
    ("Q4_K", "lora", {"cfg": 2, "streamed": True}), ("float8_e4m3fn", "loha", {"streamed": True})]


@pytest.mark.parametrize("case", by_default([("nvfp4", "lora", {})], EXACT), ids=_words)
def test_hooks_on_quantised_weights_equal_those_on_plain_numbers(comfyui, loras, files_of, case):
    """Of another strength from the second step on. Without them, bit for bit as before."""
    how, adapter, degrees = case
    (name, plain), lora = files_of(how), loras.file("sd3", "publisher", adapter)
    model, native = ours(comfyui, how, name, **degrees), comfyui.nodes.UNETLoader().load_unet(plain, "default")[0]
    before, prompts = comfyui.sample(model, "sd3", steps=STEPS), comfyui.conditioning("sd3", 1)
    always, changing = (with_hook(comfyui, prompts, lora, strengths) for strengths in ((), KEYFRAMES))

    result, want, other = (comfyui.sample(each, "sd3", steps=STEPS, positive=positive)
                           for each, positive in ((model, changing), (native, changing), (native, always)))

    close(result, want, TOLERANCE)
    assert min(relative_error(want, each) for each in (before, other)) > 1e-2, "a hook that changes nothing"
    assert torch.equal(comfyui.sample(model, "sd3", steps=STEPS), before)


@pytest.mark.parametrize("case", by_default(
    [("int8_convrot", {})], [*((how, {}) for how in ROUNDING), ("int8_convrot", {"cfg": 2}),
                             ("int8_tensorwise", {"tensor": 2}), ("convrot_w4a4", {"pipefusion": 2}),
                             ("int8_per_row", {"streamed": True}),
                             ("int8_convrot", {"ulysses": 2, "streamed": True})]), ids=_words)
def test_hooks_beside_products_that_round_are_as_comfyuis_layers(comfyui, loras, files_of, case):
    """ComfyUI's hooks end in an error on such a file. A product that rounds makes steps of its inputs, so ComfyUI's own
    result of noise that differs in the sixth digit says how far off two can be."""
    how, degrees = case
    (name, _), lora = files_of(how), loras.file("sd3", "publisher", "lora")
    model = ours(comfyui, how, name, **degrees)
    before, prompt = comfyui.sample(model, "sd3", steps=STEPS), with_hook(comfyui, comfyui.conditioning("sd3", 1), lora)
    want, *others = (beside_its_layers(comfyui, loras, name, lora, *changed)
                     for changed in ((), *((moved(seed),) for seed in range(3))))

    result = comfyui.sample(model, "sd3", steps=STEPS, positive=prompt)

    apart = max(relative_error(other, want) for other in others)
    within(relative_error(result, want), 1.5 * apart)
    assert relative_error(want, before) > 5 * apart, "a hook that changes nothing"
    assert torch.equal(comfyui.sample(model, "sd3", steps=STEPS), before)


@pytest.mark.parametrize("how", by_default(["int8_convrot"], [*WRITTEN, "scaled", "Q4_K"]))
def test_a_model_as_a_hook_is_refused_by_name(comfyui, files_of, how):
    """Create Hook Model as LoRA mixes whole weights."""
    import comfy.hooks
    model = ours(comfyui, how, files_of(how)[0])
    hooks = comfy.hooks.create_hook_model_as_lora(comfyui.native("sd3").model_state_dict("diffusion_model."), None,
                                                  1.0, 1.0)

    with pytest.raises(comfyui.errors.UnsupportedError, match="Remove Create Hook Model as LoRA"):
        comfyui.sample(model, "sd3", steps=1, positive=comfy.hooks.set_hooks_for_conditioning(
            comfyui.conditioning("sd3", 1), hooks))
