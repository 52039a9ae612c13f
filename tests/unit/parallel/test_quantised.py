"""Layers in ComfyUI's quantised formats under sequence and tensor parallelism: each token's inputs are rounded by its
own numbers, so ranks with some tokens each predict what one predicts with all; and ranks with some numbers of each
token, or with some tokens where all are rounded by one number, agree on the largest."""

import types

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.model_zoo import example, hold_share
from tests.support.ranks import run_ranks
from tests.support.tolerances import within
from tests.unit.hooks.test_hooks import EXACT, LAYOUTS, SHAPES, num_ranks, whole
from xdit_backend.checkpoints.quantisation import kitchen_layers
from xdit_backend.checkpoints.quantisation.layer_formats import FORMATS, W4A4_COLUMNS, Layer
from xdit_backend.checkpoints.quantisation.layerwise_casting import Casts, unpack_at_use
from xdit_backend.checkpoints.quantisation.quantised_weights import Packed
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import build_mesh
from xdit_backend.hooks import token_shards_io
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.parallel import amax_sync
from xdit_backend.protocol.specs import ForwardOptions, Layout

ROTATED = 16
ROUNDED = 1e-6                             # the products are of float32, of models in float64


def quantise(model, names, format_, rotated=ROTATED):
    """Have the layers of these blocks hold their weights in a format. Returns the Packed of each.
    rotated: so many columns together; 0: none."""
    import comfy_kitchen.tensor as layouts
    packed = {}
    for name, linear in model.named_modules():
        columns = W4A4_COLUMNS if format_ == "convrot_w4a4" else ROTATED
        if type(linear) is not torch.nn.Linear or name.partition(".")[0] not in names or linear.in_features % columns:
            continue
        weight = linear.weight.data.float()
        shape, auxiliary = tuple(weight.shape), {}
        if format_ == "convrot_w4a4":
            numbers, scale = layouts.quantize_convrot_w4a4_weight(weight, ROTATED)
        elif format_ == "nvfp4":
            numbers, params = layouts.TensorCoreNVFP4Layout.quantize(weight)
            numbers, scale, auxiliary = numbers[:shape[0]], params.block_scale, {"weight_scale_2": params.scale}
        else:
            numbers, params = layouts.TensorWiseINT8Layout.quantize(
                weight, per_channel=True, convrot=bool(rotated), convrot_groupsize=rotated)
            scale = params.scale
        auxiliary |= {"weight_scale": scale}
        layer = Layer(format_, shape, dict.fromkeys(auxiliary, ""), 0 if format_ == "nvfp4" else shape[0],
                      0 if format_ == "nvfp4" else rotated)
        linear.weight = torch.nn.Parameter(numbers.contiguous().view(FORMATS[format_].held), requires_grad=False)
        for buffer, tensor in layer.by_rows(auxiliary).items():
            linear.register_buffer(buffer, tensor)
        linear.weight_block, linear.rounds_inputs, linear.agreed = layer.block, layer.rounds_inputs, layer.agreed
        packed[f"{name}.weight"] = Packed("", (), layer.type, numbers.shape[1], {}, layer)
    assert len(packed) > 5
    return packed


def use(model, packed):
    """As the loader does, on a rank that has its share."""
    for name, how in packed.items():
        linear = model.get_submodule(name.removesuffix(".weight"))
        if how.layer.how.block:
            linear.weight_scale = kitchen_layers.in_tiles(how.layer,
                                                          {"weight_scale": linear.weight_scale})["weight_scale"]
    unpack_at_use(model, packed, Casts())


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
            use(model, quantise(model, blocks_of(one), format_))
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
    return difference_of_shares(name, layout, "int8_tensorwise", rotated, compile_backend, mutant)


def nvfp4_differences(rank, world_size, name, layout, compile_backend, mutant, num_unpacking=0, num_text_tokens=7):
    """As `shared_differences`, of nvfp4 without a scale of inputs, on what is taken for cards that multiply it; but for
    the last so many ranks."""
    kitchen_layers.has_products = lambda layer, device: rank + num_unpacking < world_size
    return difference_of_shares(name, layout, "nvfp4", 0, compile_backend, mutant, num_text_tokens)


def difference_of_shares(name, layout, format_, rotated, compile_backend, mutant, num_text_tokens=7):
    torch.set_grad_enabled(False)
    if mutant:
        amax_sync.largest = lambda own, group, traffic: own
    mesh = build_mesh(layout, num_shares(layout))
    one, other = (example(name, rows=6, columns=10, num_text_tokens=num_text_tokens) for _ in range(2))
    use(other.model, quantise(other.model, blocks_of(one), format_, rotated))
    packed = quantise(one.model, blocks_of(one), format_, rotated)
    splits = hold_share(one.model, one.family.plan, layout.tensor_degree, mesh.ranks["tensor"])
    for path, buffer in list(one.model.named_buffers()):
        if path in splits:
            setattr(one.model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2],
                    splits[path].own(buffer, layout.tensor_degree, mesh.ranks["tensor"]))
    use(one.model, packed)
    hooks = Hooks(one.model, one.family.plan, splits)
    context = one.loaded(hooks).context(mesh, Traffic(), one.latent, one.timestep, one.conditioning)
    context.options = ForwardOptions(compile_backend=compile_backend)
    want, out = other.run(), hooks.run(context)[0]
    out = one.family.prediction(out, one.latent)
    return ((out - want).abs().max() / want.abs().max()).item()


def num_shares(layout):
    return num_ranks(layout) * layout.tensor_degree


SHARED = [("SD3", 2, 16, ""), ("Flux.1", 2, 0, ""), ("Wan", 2, 4, ""), ("Ovis-Image", 2, 16, ""),
          pytest.param("SD3", 2, 16, "eager", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name, degree, rotated, compile_backend", SHARED)
def test_ranks_agree_on_the_largest_of_a_token(name, degree, rotated, compile_backend):
    results = run_ranks(shared_differences, degree, name, Layout(tensor_degree=degree), rotated, compile_backend, False)

    within(max(results), ROUNDED)


def test_ranks_that_do_not_agree_are_seen():
    results = run_ranks(shared_differences, 2, "SD3", Layout(tensor_degree=2), 16, "", True)

    assert max(results) > 10 * ROUNDED


def test_the_matrix_that_rotates_inputs_is_made_once_for_a_model(monkeypatch):
    """And none where no layer rotates."""
    rotation = kitchen_layers.rotation
    for rotated, count in ((16, 1), (0, 0)):
        made = []
        monkeypatch.setattr(kitchen_layers, "rotation", lambda *given,
                            made=made: made.append(given) or rotation(*given))
        model = example("SD3", dtype=torch.float32).model
        packed = quantise(model, ("transformer_blocks",), "int8_tensorwise", rotated)
        use(model, packed)
        linear, tensor = model.transformer_blocks[0].attn.to_q, torch.randn(5, 32)
        want = linear(tensor)
        linear.agree = lambda largest: largest
        monkeypatch.setattr(kitchen_layers, "unpacked", None)         # which would make it anew
        with torch.no_grad():
            within(((linear(tensor) - want).abs().max() / want.abs().max()).item(), 1e-5)
        monkeypatch.undo()
        assert len(made) == count


@pytest.mark.parametrize("name, layout, compile_backend", [
    ("SD3", Layout(ulysses_degree=2), ""), ("Flux.1", Layout(ring_degree=2, tensor_degree=2), ""),
    ("Ovis-Image", Layout(tensor_degree=2), ""),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("SD3", Layout(tensor_degree=2), ""), ("Wan", Layout(ring_degree=3), ""),
        ("Flux.1", Layout(ulysses_degree=2), "eager"), ("SD3", Layout(tensor_degree=2), "eager")))])
def test_ranks_agree_on_the_largest_of_all_tokens(name, layout, compile_backend):
    results = run_ranks(nvfp4_differences, num_shares(layout), name, layout, compile_backend, False)

    within(max(results), ROUNDED)


def few_tokens_compiled(rank, world_size, name, layout, num_text_tokens):
    """(difference, how many graphs were made) of compiled blocks, of so many tokens of text."""
    counters.clear()
    difference = nvfp4_differences(rank, world_size, name, layout, "eager", False, 0, num_text_tokens)
    return difference, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name, num_text_tokens, is_compiled", [
    ("SD3", 1, False), ("SD3", 2, True), pytest.param("Flux.1", 1, False, marks=pytest.mark.slow),
    pytest.param("Flux.2", 1, True, marks=pytest.mark.slow)])
def test_a_rank_without_text_keeps_nobody_waiting_where_blocks_are_compiled(name, num_text_tokens, is_compiled):
    """A graph that was made for no tokens would not ask what the others ask: all run such blocks as they are, and
    compiled those that have text and image in one (the second half of Flux.2)."""
    results = run_ranks(few_tokens_compiled, 2, name, Layout(ulysses_degree=2), num_text_tokens, timeout_s=120)

    for difference, graphs in results:
        within(difference, ROUNDED)
        assert (graphs > 0) == is_compiled


def standing_in(rank, world_size, name, layout, value):
    """`nvfp4_differences` of one token of text, where tokens that stand in on the other ranks have this value."""
    if value is not None:
        token_shards_io.math = types.SimpleNamespace(nan=value)
    return nvfp4_differences(rank, world_size, name, layout, "", False, num_text_tokens=1)


@pytest.mark.parametrize("name", ["Qwen-Image", *(pytest.param(name, marks=pytest.mark.slow)
                                                  for name in ("HunyuanVideo", "HunyuanImage"))])
def test_tokens_that_stand_in_do_not_count_in_what_is_agreed(name):
    """In a block's own text, or beside the image in one tensor (HunyuanVideo's second half)."""
    within(max(run_ranks(standing_in, 2, name, Layout(ulysses_degree=2), None)), ROUNDED)


def standing_in_elsewhere(rank, world_size, name, layout, format_):
    return difference_of_shares(name, layout, format_, ROTATED, "", False, 1)


@pytest.mark.slow
@pytest.mark.parametrize("format_", ["int8_tensorwise", "convrot_w4a4"])
def test_tokens_that_stand_in_are_no_others(format_):
    """Where each token is rounded by its own numbers."""
    within(max(run_ranks(standing_in_elsewhere, 2, "HunyuanVideo", Layout(ulysses_degree=2), format_)), ROUNDED)


def test_a_number_that_stands_in_is_seen():
    """The mutant of the test above."""
    assert max(run_ranks(standing_in, 2, "Qwen-Image", Layout(ulysses_degree=2), 0.0)) > 10 * ROUNDED


def test_tokens_that_are_rounded_apart_are_seen():
    results = run_ranks(nvfp4_differences, 2, "SD3", Layout(ulysses_degree=2), "", True)

    assert max(results) > 1e-3


def test_ranks_do_not_agree_with_one_that_unpacks():
    """Which then asks nobody: nobody waits, and what is rounded is rounded apart."""
    results = run_ranks(nvfp4_differences, 2, "SD3", Layout(ulysses_degree=2), "", False, 1)

    assert max(results) > 1e-3


def roundings(rank, world_size, name, format_, layout):
    """(how often inputs were rounded in a prediction, how many layers took them, how many differ from what they are
    without others' inputs)."""
    torch.set_grad_enabled(False)
    kitchen_layers.has_products = lambda layer, device: True
    mesh, one = build_mesh(layout, world_size), example(name, dtype=torch.float32)
    use(one.model, quantise(one.model, blocks_of(one), format_))
    hooks, seen = Hooks(one.model, one.family.plan), []
    rounded, product = kitchen_layers.rounded_inputs, kitchen_layers.product

    def counted(layer, auxiliary, tensor):
        seen.append("rounded")
        return rounded(layer, auxiliary, tensor)

    def compared(layer, weight, auxiliary, tensor, bias, inputs):
        result = product(layer, weight, auxiliary, tensor, bias, inputs)
        given = auxiliary if mesh.sequence_degree == 1 else auxiliary | {"input_scale": inputs.params.scale}
        seen.append("product" if torch.equal(result, product(layer, weight, given, tensor, bias, rounded(
            layer, given, tensor))) else "other")
        return result
    kitchen_layers.rounded_inputs, kitchen_layers.product = counted, compared
    hooks.run(one.loaded(hooks).context(mesh, Traffic(), one.latent, one.timestep, one.conditioning))
    return [seen.count(what) for what in ("rounded", "product", "other")]


@pytest.mark.parametrize("name, layout, saved", [
    # of queries, keys and values two, of the image's and of the text's, in each of two double blocks; three in each of
    # two single blocks, whose feed-forward has the same inputs
    ("Flux.1", Layout(), 2 * (2 + 2) + 2 * 3),
    # in each of four blocks, of which one has a second attention
    ("SD3", Layout(ulysses_degree=2), 4 * (2 + 2) + 2),
    # of self-attention's; of the text's keys and values none, as those of a given frame come in between
    ("Wan", Layout(), 4 * 2),
    # as Flux.1, and of what is gated and its gate one
    ("Ovis-Image", Layout(), 2 * (2 + 2) + 2 * 3 + 2 * 2)])
def test_inputs_are_rounded_once_for_all_layers_that_have_them(name, layout, saved):
    for rounded, products, others in run_ranks(roundings, num_shares(layout), name, "nvfp4", layout):
        assert (products - rounded, others) == (saved, 0)
