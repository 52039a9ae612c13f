"""Weights held in a smaller type than a model computes in give what ComfyUI's own loader gives, and take the bytes that are planned."""

import functools

import pytest
import torch

from tests.models.zoo import conditioning_of
from tests.tolerances import close, relative_error
from xdit_backend.checkpoints.header import model_spec, read_header, recognise
from xdit_backend.checkpoints.transformer import load_transformer
from xdit_backend.models import FAMILIES
from xdit_backend.parallel.collectives import Traffic
from xdit_backend.parallel.hooks import Hooks
from xdit_backend.parallel.mesh import SINGLE
from xdit_backend.worker.model import Loaded

CPU = torch.device("cpu")
def inputs(kind):
    size, text, pooled = GIVEN[kind]
    generator = torch.Generator().manual_seed(3)
    given = {"context": torch.randn(1, 12, text, generator=generator)}
    if pooled:
        given["y"] = torch.randn(1, pooled, generator=generator)
    if kind == "flux":
        given["guidance"] = torch.tensor([3.5])
    return torch.randn(1, *size, generator=generator), torch.tensor([0.613 if kind == "flux" else 613.0]), given


def ours(path, kind, storage, compute):
    """One prediction of our model, as a worker computes it, and the bytes it holds."""
    header = read_header(path)
    family: Family = recognise(header)
    model, config = load_transformer(model_spec(header, family, storage, compute), family, CPU)
    x, t, given = inputs(kind)
    dtype = getattr(torch, compute)
    arguments = family.inputs(x.to(dtype), t, {name: tensor.to(dtype) for name, tensor in given.items()}, config)
    seams = Seams(model, family.plan)
    output, _ = seams.run(Trip(SINGLE, Traffic(), arguments, range(seams.num_blocks), seams.num_blocks))
    return family.prediction(output, x).float()


def native(path, kind, storage, compute):
    """The same of ComfyUI's own loader."""
    import comfy.sd
    model = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": getattr(torch, storage)}).model
    x, t, given = inputs(kind)
    dtype = getattr(torch, compute)
    assert (model.manual_cast_dtype or model.get_dtype()) == dtype
    return model.diffusion_model(x.to(dtype), t, **{name: tensor.to(dtype) for name, tensor in given.items()}).float()


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    from tests.comfyui_server import comfyui_folder
    from tests.tiny_checkpoints import import_comfyui, save
    if comfyui_folder() is None:
        pytest.skip("no ComfyUI: run `python3 start.py test`, or name one in XDIT_COMFYUI")
    import_comfyui(comfyui_folder())

    def file(kind, dtype=None):
        path = tmp_path_factory.getbasetemp() / f"{kind}-{dtype}.safetensors"
        if not path.exists():
            save(kind, path, dtype=dtype)
        return path
    return file


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", ["float8_e4m3fn", "bfloat16"])
def test_weights_cast_at_use_equal_comfyuis(file_of, kind, storage):
    """Arithmetic in float32 on both sides, so nothing but the weights is rounded."""
    with torch.inference_mode():
        result, want = ours(file_of(kind), kind, storage, "float32"), native(file_of(kind), kind, storage, "float32")
        exact = ours(file_of(kind), kind, "float32", "float32")

    close(result, want, 1e-4)
    assert relative_error(want, exact) > 1e-3
