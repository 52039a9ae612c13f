"""LoRA on compiled blocks, by inductor as people run it: added, changed and taken away again, on weights that are
dense, quantised, or come from host memory."""

import pytest

from tests.integration.lora.test_lora import Loras
from tests.support.tiny_checkpoints import save_scaled
from tests.support.tolerances import close, relative_error

TOLERANCE = 5e-5                           # relative, float32 on both sides; a graph adds up in another order


@pytest.mark.slow
@pytest.mark.parametrize("kind, form, degrees", [
    ("flux", "scaled", {"ulysses": 2}), ("flux", "dense", {"weights_memory": "0.031"}), ("sdxl", "dense", {"cfg": 2})],
    ids=str)
def test_a_lora_that_comes_and_goes_equals_blocks_that_are_not_compiled(comfyui, kind, form, degrees):
    loras = Loras(comfyui)
    config, plain = (comfyui.config("cpu,cpu" if 2 in degrees.values() else "cpu", compile=compile, **degrees)
                     for compile in ("blocks", "off"))

    def load(config):
        if form == "scaled":
            path = comfyui.base / "diffusion_models" / f"{kind}-compiled-scaled.safetensors"
            if not path.exists():
                save_scaled(path, comfyui.base / "diffusion_models" / comfyui.file(kind))
            return comfyui.load_model.execute(path.name, "default", config).args[0]
        return comfyui.ours(kind, config)
    compiled, reference = load(config), load(plain)
    first, images = loras.file(kind, "publisher", "lora"), []
    for strength in (0.0, 0.8, -0.4, 0.0):
        models = [loras.load(model, first, strength) if strength else model for model in (compiled, reference)]
        result, want = (comfyui.sample(model, kind, steps=2) for model in models)
        close(result, want, TOLERANCE, (kind, strength))
        images.append(want)

    assert relative_error(images[1], images[0]) > 1e-3 and relative_error(images[3], images[0]) < 1e-6
