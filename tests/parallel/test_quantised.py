"""Layers in ComfyUI's quantised formats under sequence parallelism: each token's inputs are rounded by its own numbers,
so ranks with some tokens each predict what one predicts with all."""

import pytest
import torch

from tests.models.zoo import example
from tests.parallel.test_hooks import EXACT, LAYOUTS, SHAPES, num_ranks, whole
from tests.ranks import run_ranks
from tests.tolerances import within
from xdit_backend.checkpoints.casting import Casts, unpack_at_use
from xdit_backend.checkpoints.layers import FORMATS, W4A4_COLUMNS, Layer
from xdit_backend.checkpoints.packed import Packed
from xdit_backend.distributed.mesh import build_mesh
from xdit_backend.hooks.transformer import Hooks

ROTATED = 16


def quantise(model, names, format_):
    """Have the layers of these blocks hold their weights in a format, and compute with them so."""
    import comfy_kitchen.tensor as kitchen
    packed = {}
    for name, linear in model.named_modules():
        columns = W4A4_COLUMNS if format_ == "convrot_w4a4" else ROTATED
        if type(linear) is not torch.nn.Linear or name.partition(".")[0] not in names or linear.in_features % columns:
            continue
        weight = linear.weight.data.float()
        if format_ == "convrot_w4a4":
            numbers, scale = kitchen.quantize_convrot_w4a4_weight(weight, ROTATED)
        else:
            numbers, params = kitchen.TensorWiseINT8Layout.quantize(weight, per_channel=True, convrot=True,
                                                                    convrot_groupsize=ROTATED)
            scale = params.scale
        layer = Layer(format_, tuple(weight.shape), {"weight_scale": ""}, len(weight), ROTATED)
        linear.weight = torch.nn.Parameter(numbers.view(FORMATS[format_].held), requires_grad=False)
        linear.register_buffer("weight_scale", scale.view(-1, 1))
        packed[f"{name}.weight"] = Packed("", (), layer.type, numbers.shape[1], {}, layer)
    assert len(packed) > 5
    unpack_at_use(model, packed, Casts())


def differences(rank, world_size, name, layout, format_):
    """Largest difference between the parallel prediction and that of one process, for each shape."""
    torch.set_grad_enabled(False)
    mesh, model, results = build_mesh(layout, world_size), None, []
    for shape in SHAPES.values():
        one = example(name, **shape)
        if model is None:
            model = one.model
            quantise(model, {each for list_ in one.family.blocks for each in list_.names}, format_)
            hooks = Hooks(model, one.family.plan)
        one.model = model
        want = one.run_parts()
        with hooks.serving(whole(mesh, one, hooks)):
            results.append(max((part - wanted).abs().max().item()
                               for part, wanted in zip(one.run_parts(), want, strict=True)))
    return results


@pytest.mark.parametrize("name, layout, format_", [
    ("Wan", "ulysses2", "int8_tensorwise"), ("Flux.1", "ring2-ulysses2", "convrot_w4a4"),
    pytest.param("SD3", "ring3", "int8_tensorwise", marks=pytest.mark.slow)])
def test_prediction_equals_that_of_one_rank(name, layout, format_):
    """In float64, but for the products, so that no input falls to another side where it is rounded."""
    results = run_ranks(differences, num_ranks(LAYOUTS[layout]), name, LAYOUTS[layout], format_)

    within(max(map(max, results)), EXACT)
