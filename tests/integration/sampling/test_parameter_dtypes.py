"""Parameters and buffers of ComfyUI's own modules are held in the types, and with the numbers, in which ComfyUI's own
loader holds them, under each weight_dtype."""

import pytest
import torch

from tests.support.tiny_checkpoints import SHORT
from xdit_backend.models import FAMILIES

OWN = [name for name, family in FAMILIES.items() if family.is_comfyuis]
DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3fn": torch.float8_e4m3fn}
DEFAULT = "ACE-Step 1.5", "Wan Animate"                        # of which one has tables, and one float32 beside them


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow)
                                  for name in OWN])
def test_what_is_of_a_module_is_held_as_comfyui_holds_it(comfyui, name):
    import comfy.sd

    from xdit_backend.checkpoints.loader import load_transformer
    file = comfyui.file(SHORT.get(name, name.lower().replace(" ", "-")))
    for weight_dtype, dtype in DTYPES.items():
        if str(dtype).removeprefix("torch.") in FAMILIES[name].unsupported_dtypes:
            continue
        path = comfyui.base / "diffusion_models" / file
        native = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": dtype}).model.diffusion_model
        model = comfyui.load_model.execute(file, weight_dtype, comfyui.config("cpu")).args[0]
        ours = _tensors(load_transformer(model.model.remote.spec, torch.device("cpu")).model)

        held = {name: tensor for name, tensor in _tensors(native).items() if name in ours}
        assert len(held) >= 0.9 * len(ours)                    # what is stacked in ours has other names
        for each, tensor in held.items():
            assert ours[each].dtype == tensor.dtype and torch.equal(ours[each].float(), tensor.float()), each


def _tensors(model):
    return {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if tensor.is_floating_point()}
