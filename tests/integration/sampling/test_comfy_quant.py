"""Our MODEL of a file in ComfyUI's quantised formats draws what ComfyUI's own draws of the same file, under every kind
of layout."""

import pytest
import torch

from tests.integration.lora.test_lora import loras  # noqa: F401
from tests.programs.model_nodes import model_nodes
from tests.support.comfy_quants import NEWER, ROTATING, WRITTEN, save_comfy_quant
from tests.support.tiers import by_default
from tests.support.tolerances import relative_error, within

LAYOUTS = {"one": {}, "cfg2": {"cfg": 2}, "ulysses2": {"ulysses": 2}, "ring2": {"ring": 2},
           "patches": {"pipefusion": 2, "num_patches": 2, "warmup_steps": 3}, "tensor2": {"tensor": 2},
           "data2": {"data": 2}, "displaced2": {"displaced": 2, "warmup_steps": 3}}
# inputs, on any device
ROUNDING = "int8_tensorwise", "int8_per_row", "int8_convrot", "convrot_w4a4", "asym_w4a8_int8", "mixed"
CASES = [("sd3", "nvfp4", layout) for layout in LAYOUTS if layout not in ("data2", "displaced2")] + [
    ("sd3", "mixed", layout) for layout in LAYOUTS if layout != "tensor2"] + [
    # "mixed" has a layer of each format but float8_e5m2
    ("sd3", "float8_e5m2", "displaced2"),
    ("sd3", "mxfp8", "tensor2"), ("sd3", "float8_e5m2", "tensor2"), ("sd3", "convrot_w4a4", "patches"),
    ("sd3", "int8_convrot", "cfg2"), ("sd3", "int8_convrot", "tensor2"), ("wan", "int8_per_row", "tensor2"),
    ("flux", "mixed", "ring2"), ("wan", "mixed", "cfg2"), ("pixart", "mixed", "one"),
    ("sdxl", "int8_per_row", "one"), ("flux", "nvfp4", "tensor2"), ("wan", "mxfp8", "tensor2")]
BESIDE = [(format_, layout) for format_ in WRITTEN for layout in ("one", "patches", "tensor2")
          if layout != "tensor2" or format_ not in ROTATING]
# of ComfyUIs that have the format
CASES += [("sd3", format_, layout) for format_ in NEWER if format_ in WRITTEN for layout in LAYOUTS
          if layout != "tensor2"]
DEFAULT = {("sd3", "nvfp4", "tensor2"), ("sd3", "mixed", "patches"), ("sd3", "int8_convrot", "tensor2"),
           ("sd3", "asym_w4a8_int8", "ulysses2"), ("sd3", "asym_w4a8_int8", "one")}


@pytest.fixture(scope="module")
def native_of(comfyui):
    """native_of(kind, format, number of images): (name of the file, ComfyUI's latents of it, by how much they change
    where each call's latent does in the sixth digit)."""
    known = {}

    def made(kind, format_, num_images=1):
        latent = comfyui.latent(kind, num_images)
        folder, name = comfyui.base / "diffusion_models", f"{kind}-{format_}.safetensors"
        save_comfy_quant(folder / name, folder / comfyui.file(kind), format_)
        with torch.inference_mode():                           # as a workflow's nodes run
            model, apart = comfyui.nodes.UNETLoader().load_unet(name, "default")[0], 0
        want = comfyui.sample(model, kind, latent=latent)
        if format_ in ROUNDING:
            generator = torch.Generator().manual_seed(5)

            def otherwise(apply_model, given):
                latent = given["input"]
                latent = latent * (1 + 1e-6 * torch.randn(latent.shape, generator=generator))
                return apply_model(latent, given["timestep"], **given["c"])
            other = model.clone()
            other.set_model_unet_function_wrapper(otherwise)
            apart = max(relative_error(comfyui.sample(other, kind, latent=latent), want) for _ in range(2))
        return name, want, apart
    return lambda *case: known.setdefault(case, None) or known.update({case: made(*case)}) or known[case]


@pytest.mark.parametrize("case", by_default(DEFAULT.__contains__, CASES), ids="-".join)
def test_latents_equal_comfyuis(comfyui, native_of, case):
    """Weights that were parked are the same. Where inputs are rounded, as near as ComfyUI's own are to themselves: see
    tests/unit/checkpoints/quantisation/test_comfy_quant.py."""
    kind, format_, layout = case
    num_images = LAYOUTS[layout].get("data", 1)
    name, want, apart = native_of(kind, format_, num_images)
    config = comfyui.config("cpu,cpu" if LAYOUTS[layout] else "cpu", **LAYOUTS[layout])
    model = comfyui.load_model.execute(name, "default", config).args[0]

    result = comfyui.sample(model, kind, latent=comfyui.latent(kind, num_images))

    within(relative_error(result, want), max(1e-4, 1.5 * apart))
    assert relative_error(result[:1], comfyui.reference(kind)) > 1e-3
    comfyui.unload_all()
    assert torch.equal(comfyui.sample(model, kind, latent=comfyui.latent(kind, num_images)), result)


@pytest.mark.parametrize("format_", ["mixed", pytest.param("convrot_w4a4", marks=pytest.mark.slow)])
def test_layers_that_round_tokens_are_not_shared_out(comfyui, native_of, format_):
    """In auto mode another layout is chosen; in manual mode it is said."""
    name, *_ = native_of("sd3", format_)

    with pytest.raises(comfyui.errors.UnsupportedError, match=r"tensor_degree=2 cannot shard transformer_blocks\S+"
                                                              r"weight, whose matrix multiplications round"):
        comfyui.load_model.execute(name, "default", comfyui.config("cpu,cpu", tensor=2))
    model = comfyui.load_model.execute(name, "default", comfyui.config("cpu,cpu")).args[0]
    assert model.model.remote.spec.tensor_degree == 1


@pytest.mark.parametrize("case", by_default([("int8_convrot", "one")], BESIDE), ids="-".join)
def test_a_lora_is_beside_the_products_as_comfyuis_own_in_bypass_mode(comfyui, native_of, loras, case):  # noqa: F811
    """Load LoRA has ComfyUI round the sum of weight and LoRA to the format again, at random; ours keeps the file's
    numbers, and adds the LoRA's product of inputs that are not rounded. That is what ComfyUI's own model gives in
    bypass mode."""
    format_, layout = case
    name, plain, apart = native_of("sd3", format_)
    config = comfyui.config("cpu,cpu" if LAYOUTS[layout] else "cpu", **LAYOUTS[layout])
    lora = loras.file("sd3", adapter="lora")
    with torch.inference_mode():
        native = comfyui.nodes.UNETLoader().load_unet(name, "default")[0]
        native = model_nodes(comfyui)["LoraLoaderBypassModelOnly"]().load_lora_model_only(native, lora, 0.7)[0]
    ours = comfyui.load_model.execute(name, "default", config).args[0]

    result, want = (comfyui.sample(model, "sd3") for model in (loras.load(ours, lora, 0.7), native))

    within(relative_error(result, want), max(1e-4, 1.5 * apart))
    assert relative_error(want, plain) > max(1e-2, 3 * apart)
