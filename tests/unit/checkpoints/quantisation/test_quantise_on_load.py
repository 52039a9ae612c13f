"""Weights quantised when they are loaded: our model computes with what the libraries make of them,
and holds what that takes."""

import pytest
import torch

from tests.support.model_zoo import example
from tests.support.tiny_checkpoints import families, matrices, save_dequantised
from tests.support.tolerances import close, relative_error
from tests.unit.checkpoints.quantisation.test_layerwise_casting import ours
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.checkpoints.quantisation.quantised_weights import SCALED, unpacked
from xdit_backend.checkpoints.weight_table import weight_table

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind, quantisation", [
    pytest.param("sd3", "int8", id="comfy-kitchen"), *(pytest.param(*case, marks=pytest.mark.quantisers) for case in (
        ("sd3", "int8"), ("sd3", "nf4"), ("flux", "nf4"), ("sd15", "int8")))])
def test_quantised_weights_equal_the_dequantised_ones(file_of, tmp_path, kind, quantisation):
    """A matrix takes a byte a number and four a row, or 36 bytes for 64 numbers;
    what the host plans is what is held."""
    family, path, plain = families()[kind], file_of(kind), tmp_path / "plain.safetensors"
    save_dequantised(plain, path, quantisation)

    with torch.inference_mode():
        result = ours(path, family, "float32", quantisation=quantisation)
        want, exact = (ours(file, family, "float32") for file in (plain, path))
        half, half_want = (ours(file, family, *2 * ["bfloat16"], quantisation=how)
                           for file, how in ((path, quantisation), (plain, "")))

    close(result, want, 1e-5)
    assert relative_error(result, exact) > 1e-3
    # a number is rounded to bfloat16 once, where it is unpacked
    close(half, half_want, 1e-5)
    header = open_checkpoint(path)
    spec = header.spec("float32", "float32", quantisation=quantisation)
    table = header.weight_table(spec)
    held = table.resident_bytes
    loaded = load_transformer(spec, CPU).model
    assert held == sum(tensor.nbytes for tensor in (*loaded.parameters(), *loaded.buffers()))
    assert table.block_bytes == weight_table(loaded, family, spec).block_bytes
    shapes = [header.shapes[name.removeprefix(header.prefix)] for name in matrices(path)]
    rows_columns = [shape for shape in shapes if quantisation == "int8" or shape[1] % 64 == 0]
    saved = sum(3 * rows * columns - 4 * rows if quantisation == "int8" else rows * columns // 64 * (256 - 36)
                for rows, columns in rows_columns)
    assert len(rows_columns) > 10 and held == weight_table(header.meta_model(), family, spec).resident_bytes - saved


@pytest.mark.parametrize("type_", ["INT8", "F8_E4M3"])
@pytest.mark.parametrize("num_scales", [1, 5])
def test_numbers_with_scales_are_rounded_once(type_, num_scales):
    held = torch.randint(-128, 128, (5, 7), generator=torch.Generator().manual_seed(0)).to(SCALED[type_])
    before, scale = held.clone(), torch.rand(num_scales, 1, generator=torch.Generator().manual_seed(1))

    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        want = held.to(dtype) * scale.to(torch.promote_types(dtype, torch.float32))
        assert torch.equal(unpacked(held, type_, scale, dtype), want.to(dtype))
    assert torch.equal(held.float(), before.float())


@pytest.mark.quantisers
def test_a_diffusers_folder_is_quantised_too(tmp_path):
    """Beside other layers in half precision."""
    example("SD3", torch.float32).model.save_pretrained(tmp_path / "transformer")
    header = open_checkpoint(tmp_path)
    spec = header.spec("bfloat16", "bfloat16", quantisation="int8")

    model = load_transformer(spec, CPU).model

    linears, others = ({module.weight.dtype for module in model.modules() if isinstance(module, kind)} for kind in (
        torch.nn.Linear, torch.nn.Conv2d))
    assert linears == {torch.int8} and others == {torch.bfloat16}
