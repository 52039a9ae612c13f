"""Layers in ComfyUI's quantised formats under sequence and tensor parallelism: each token's inputs are rounded by its
own numbers, so ranks with some tokens each predict what one predicts with all; and ranks with some numbers of each
token agree on the largest."""

import pytest
import torch

from tests.models.zoo import example, hold_share
from tests.parallel.test_hooks import EXACT, LAYOUTS, SHAPES, num_ranks, whole
from tests.ranks import run_ranks
from tests.tolerances import within
from xdit_backend.checkpoints.casting import Casts, unpack_at_use
from xdit_backend.checkpoints.layers import FORMATS, W4A4_COLUMNS, Layer
from xdit_backend.checkpoints.packed import Packed
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import build_mesh
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.parallel import tensor
from xdit_backend.protocol.specs import Layout

ROTATED = 16
ROUNDED = 1e-6                             # the products are of float32, of models in float64


def quantise(model, names, format_, rotated=ROTATED):
    """Have the layers of these blocks hold their weights in a format. Returns the Packed of each.
    rotated: so many columns together; 0: none."""
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
            numbers, params = kitchen.TensorWiseINT8Layout.quantize(
                weight, per_channel=True, convrot=bool(rotated), convrot_groupsize=rotated)
            scale = params.scale
        layer = Layer(format_, tuple(weight.shape), {"weight_scale": ""}, len(weight), rotated)
        linear.weight = torch.nn.Parameter(numbers.view(FORMATS[format_].held), requires_grad=False)
        linear.register_buffer("weight_scale", scale.view(-1, 1))
        linear.weight_block, linear.rounds_inputs, linear.agrees = layer.block, True, layer.how.agrees
        packed[f"{name}.weight"] = Packed("", (), layer.type, numbers.shape[1], {}, layer)
    assert len(packed) > 5
    return packed


def blocks_of(one):
    return {each for list_ in one.family.blocks for each in list_.names}


def differences(rank, world_size, name, layout, format_):
    """Largest difference between the parallel prediction and that of one process, for each shape."""
    torch.set_grad_enabled(False)
    mesh, model, results = build_mesh(layout, world_size), None, []
    for shape in SHAPES.values():
        one = example(name, **shape)
        if model is None:
            model = one.model
            unpack_at_use(model, quantise(model, blocks_of(one), format_), Casts())
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


def shared_differences(rank, world_size, name, layout, rotated, compile_backend, mutant):
    """As `differences`, of ranks that have a share of each layer; relative to the largest number. Columns are cut
    between groups that are rotated together."""
    torch.set_grad_enabled(False)
    if mutant:
        tensor.largest = lambda own, group, traffic: own
    mesh, one = build_mesh(layout, world_size), example(name, rows=6, columns=10, num_text_tokens=7)
    other = example(name, rows=6, columns=10, num_text_tokens=7)
    unpack_at_use(other.model, quantise(other.model, blocks_of(one), "int8_tensorwise", rotated), Casts())
    packed = quantise(one.model, blocks_of(one), "int8_tensorwise", rotated)
    splits = hold_share(one.model, one.family.plan, layout.tensor_degree, mesh.ranks["tensor"])
    for path, buffer in list(one.model.named_buffers()):
        if path in splits:
            setattr(one.model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2],
                    splits[path].own(buffer, layout.tensor_degree, mesh.ranks["tensor"]))
    unpack_at_use(one.model, packed, Casts())
    hooks = Hooks(one.model, one.family.plan, splits)
    context = one.loaded(hooks).context(mesh, Traffic(), one.latent, one.timestep, one.conditioning)
    context.compile_backend = compile_backend
    want, out = other.run(), hooks.run(context)[0]
    out = one.family.prediction(out, one.latent)
    return ((out - want).abs().max() / want.abs().max()).item()


SHARED = [("SD3", 2, 16, ""), ("Flux.1", 2, 0, ""), ("Wan", 2, 4, ""),
          pytest.param("SD3", 2, 16, "eager", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name, degree, rotated, compile_backend", SHARED)
def test_ranks_agree_on_the_largest_of_a_token(name, degree, rotated, compile_backend):
    results = run_ranks(shared_differences, degree, name, Layout(tensor_degree=degree), rotated, compile_backend, False)

    within(max(results), ROUNDED)


def test_ranks_that_do_not_agree_are_seen():
    results = run_ranks(shared_differences, 2, "SD3", Layout(tensor_degree=2), 16, "", True)

    assert max(results) > 10 * ROUNDED
