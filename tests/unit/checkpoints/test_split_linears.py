"""Matrices that diffusers has as one and ComfyUI's files as two: each is held as its file holds it, on every kind of
rank. And no family has others that a file has as several, which would be unpacked when they are read."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from tests.support.comfy_quants import ROTATING, WRITTEN, save_as
from tests.support.tiers import by_default
from tests.support.tiny_checkpoints import families
from tests.support.tolerances import close, relative_error
from tests.unit.checkpoints.offload.test_offloaded_files import load, loaded_of, prediction, with_hooks
from tests.unit.checkpoints.test_tensor_sharding import check
from tests.unit.checkpoints.test_weight_deltas import messages_of
from tests.unit.tools.dry_run.rows import SMALL_COLUMNS, SMALL_ROWS, TEXT_TOKENS
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.checkpoints.offload.host_weights import HostCopies
from xdit_backend.checkpoints.offload.offload_plan import plan_weights, with_host_bytes
from xdit_backend.checkpoints.quantisation import kitchen_layers
from xdit_backend.checkpoints.weight_deltas import change_weights
from xdit_backend.protocol.shared_memory import SegmentStore
from xdit_backend.protocol.specs import Change, ForwardOptions, Stages
from xdit_backend.tools.bench.size import parse_layout
from xdit_backend.tools.dry_run.commands import Run
from xdit_backend.tools.dry_run.example_inputs import conditioning_shapes
from xdit_backend.tools.dry_run.simulated_rank import count, own_blocks

CPU = torch.device("cpu")
GATE, UP = (f"double_blocks.0.img_mlp.{name}_proj.weight" for name in ("gate", "up"))
PLACE = "transformer_blocks.0.ff.net.0.proj"
HELD = ["float32", "scaled", "Q8_0", *WRITTEN]
FEW = ("float32", "convrot_w4a4", "nvfp4")


def sources(shapes, convert):
    """{name in the model: names of the tensors of a file that it has rows of}."""
    numbered = {name: torch.full(shape or (1,), number) for number, (name, shape) in enumerate(shapes.items())}
    names = list(shapes)
    return {name: [names[number] for number in tensor.unique().tolist()]
            for name, tensor in convert(numbered).items()}


@pytest.mark.everyone
@pytest.mark.parametrize("kind", families())
def test_each_matrix_has_one_source(file_of, kind):
    checkpoint = open_checkpoint(file_of(kind))
    linears = {f"{name}.{leaf}" for name, module in checkpoint.meta_model().named_modules() if type(module) is nn.Linear
               for leaf in ("weight", "bias")}

    several = {name: of for name, of in sources(checkpoint.shapes, checkpoint.under_diffusers_names).items()
               if name in linears and len(of) > 1}

    assert several == {}


def test_a_matrix_of_two_sources_is_seen():
    joined = sources({"a": (2, 3), "b": (1, 3)}, lambda tensors: {"c": torch.cat([tensors["a"], tensors["b"]])})

    assert joined == {"c": ["a", "b"]}


@pytest.fixture
def store():
    store = SegmentStore()
    yield store
    store.close()


def file_as(how, file_of, folder):
    return file_of("ovis-image") if how == "float32" else save_as(how, folder, file_of("ovis-image"))


@pytest.mark.parametrize("how", by_default(FEW, HELD))
def test_halves_come_from_host_memory_as_they_are_held(file_of, tmp_path, how):
    """The same bits; a file that has them so is mapped, and needs no place for them."""
    checkpoint = open_checkpoint(file_as(how, file_of, tmp_path))
    spec = checkpoint.spec("float32", "float32")
    shared = with_host_bytes(dataclasses.replace(spec, weights_memory=1), checkpoint.weight_table(spec))
    names = plan_weights(checkpoint.weight_table(spec), 1)[1]
    memory = torch.full((shared.host_bytes,), 255, dtype=torch.uint8)

    with torch.inference_mode():
        before = prediction(loaded_of(spec))
        for loaded in [load(shared, HostCopies(memory, rank, 2)) for rank in range(2)]:
            assert {f"{PLACE}.0.weight", f"{PLACE}.1.weight"} <= names.keys()
            assert torch.equal(prediction(with_hooks(loaded)), before)


@pytest.mark.parametrize("how", by_default(FEW[1:], HELD))
def test_compiled_blocks_hold_halves_as_they_are(file_of, tmp_path, how):
    loaded = loaded_of(open_checkpoint(file_as(how, file_of, tmp_path)).spec("float32", "float32"))

    with torch.inference_mode():
        assert torch.equal(prediction(loaded, options=ForwardOptions(compile_backend="eager")), prediction(loaded))


@pytest.mark.parametrize("how", by_default(FEW, HELD))
def test_a_stage_reads_its_halves_alone(file_of, tmp_path, how):
    checkpoint = open_checkpoint(file_as(how, file_of, tmp_path))
    spec = checkpoint.spec("float32", "float32")
    whole, part = (load_transformer(spec, CPU, choose_blocks=choose).model
                   for choose in (None, lambda model: range(1, 3)))

    tensors = dict(whole.state_dict())
    for name, tensor in part.state_dict().items():
        assert tensor.is_meta == name.startswith(("transformer_blocks.0.", "single_transformer_blocks.1.")), name
        assert tensor.is_meta or torch.equal(tensor, tensors[name]), name


@pytest.mark.parametrize("how", ["float32", "int8_convrot", *by_default(["nvfp4"], [
    "nvfp4", "mxfp8", "float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "int8_per_row"])])
def test_tensor_ranks_have_a_share_of_each_half(file_of, tmp_path, how):
    """Together they give what the whole gives: the first halves of all ranks, and the second ones."""
    path = file_as(how, file_of, tmp_path)
    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec("float32", "float32")

    if how not in ("nvfp4", "mxfp8"):                          # whose scales lie otherwise where there are fewer
        assert check(path, ("float32", "float32")) < 0.95
    whole, *parts = (load_transformer(dataclasses.replace(spec, tensor_degree=degree), CPU, tensor_rank=rank)
                     .model.get_submodule(PLACE) for degree, rank in ((1, 0), (2, 0), (2, 1)))
    tensor = torch.randn(5, whole[0].in_features)
    with torch.inference_mode():
        halves = zip(*(part(tensor).chunk(2, -1) for part in parts))
        close(torch.cat([piece for half in halves for piece in half], -1), whole(tensor), 1e-5)


@pytest.mark.parametrize("how", by_default(FEW, HELD))
def test_a_lora_may_be_for_one_half(file_of, store, tmp_path, how):
    """The other is not read, and stays as it is."""
    checkpoint = open_checkpoint(file_as(how, file_of, tmp_path))
    loaded = load_transformer(checkpoint.spec("float32", "float32"), CPU)
    layer = loaded.model.get_submodule(PLACE)
    rows, columns = checkpoint.shapes[GATE]
    tensor = torch.randn(5, columns)

    def halves():
        with torch.inference_mode():
            return layer(tensor).chunk(2, -1)
    up, gate = halves()
    change_weights(loaded, {GATE: Change(None, (messages_of(store, (rows, 2), (2, columns), None),), "float32",
                                         "float32")})

    assert torch.equal(halves()[0], up) and relative_error(halves()[1], gate) > 1e-3
    change_weights(loaded, {GATE: Change(None, ())})
    assert all(map(torch.equal, halves(), (up, gate)))


@pytest.mark.parametrize("case", by_default({(how, "one") for how in FEW} | {("nvfp4", "tensor2")}, [
    (how, layout) for how in HELD for layout in ("one", "pipefusion2", "tensor2")
    if layout != "tensor2" or how not in ROTATING]), ids="-".join)
def test_a_step_of_no_device_holds_what_a_rank_holds(file_of, tmp_path, case):
    """To the byte; of a file that is quantised, both halves are."""
    how, layout = case
    checkpoint, degrees = open_checkpoint(file_as(how, file_of, tmp_path)), parse_layout(layout)
    family, stages = checkpoint.family, Stages(2, 1) if layout == "pipefusion2" else None
    spec = checkpoint.spec("float32", "float32", stages, degrees.tensor_degree)
    shape = (1, family.taken_channels(checkpoint.config), SMALL_ROWS, SMALL_COLUMNS)
    run = Run(shape, *conditioning_shapes(family, checkpoint.config, shape, TEXT_TOKENS))

    loaded = load_transformer(spec, CPU, choose_blocks=stages and (lambda table: own_blocks(table, 0)))
    counted = count(checkpoint, spec, degrees, 0, run)

    tensors = [tensor for tensor in (*loaded.model.parameters(), *loaded.model.buffers()) if not tensor.is_meta]
    rotation = kitchen_layers.rotation(64, CPU).values() if how == "int8_convrot" else ()
    assert counted.weight_bytes == sum(tensor.nbytes for tensor in (*tensors, *rotation))
    assert stages or counted.weight_bytes == checkpoint.weight_table(spec).resident_bytes + sum(
        matrix.nbytes for matrix in rotation)
    assert counted.waits == {} and counted.mixed == {}
    plain = 4 * sum(math.prod(checkpoint.shapes[name]) for name in (GATE, UP)) / degrees.tensor_degree
    halves = sum(tensor.nbytes for tensor in loaded.model.get_submodule(PLACE).state_dict().values())
    assert halves < 0.4 * plain or how == "float32"
