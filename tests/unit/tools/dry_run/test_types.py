"""Weights in every type that is held: a step neither waits for the device nor mixes devices, and they take their
bytes."""

import dataclasses
import functools
import math

import comfy_kitchen.tensor
import pytest
import torch

from tests.unit.tools.dry_run.rows import counted, published, spec_of, with_lora
from xdit_backend.checkpoints.model_dims import dims_of, job_of
from xdit_backend.checkpoints.quantisation import ggml_dequant, kitchen_layers
from xdit_backend.checkpoints.quantisation.gguf import PACKED
from xdit_backend.checkpoints.quantisation.layer_formats import FORMATS
from xdit_backend.checkpoints.quantisation.quantise_on_load import TYPES
from xdit_backend.checkpoints.quantisation.quantised_weights import UNPACKING, block_of, unpacked
from xdit_backend.config import ParallelConfig
from xdit_backend.planner.cost_model import Job
from xdit_backend.planner.memory_model import DEFAULT_SETTINGS, MemorySettings, rank_memory
from xdit_backend.planner.planner import degrees_of
from xdit_backend.protocol.specs import Layout
from xdit_backend.tools.dry_run import fake_cuda, simulated_rank
from xdit_backend.tools.dry_run.fake_cuda import CUDA, fake_cuda_device
from xdit_backend.tools.dry_run.op_counter import DeviceWork
from xdit_backend.tools.dry_run.simulated_rank import outline, table_of

# bits that a weight of a linear layer takes
BITS = {"fp8_e4m3fn": 8, "float8_e4m3fn": 8, "float8_e5m2": 8, "nvfp4": 4.5, "mxfp8": 8.25, "int8_tensorwise": 8,
        "convrot_w4a4": 4, "asym_w4a8_int8": 4.5, "int8": 8, "nf4": 4.5} | {
    type_: 8 * block_of(type_)[1] / block_of(type_)[0] for type_ in PACKED}
FEW = ("float8_e4m3fn", "Q8_0", "Q4_K", "IQ4_XS", "nf4")
ROWS = [*((type_, "one") for type_ in BITS), *((type_, "tensor2") for type_ in (*FEW, "int8_tensorwise"))]


# by comfy-kitchen's own products, which without its kernels have inputs, weights or sums in 32 bits inside
EAGER = "convrot_w4a4", "int8_tensorwise", "asym_w4a8_int8"
# Beside Flux.1 one of long steps and one whose largest weight takes half of what a step does.
OTHERS = "sd3.5-large", "flux.2-dev", "qwen-image"
FORECAST = [(name, type_) for name in ("flux.1-dev", *OTHERS) for type_ in BITS]
FLOAT8 = "float8_e4m3fn", "float8_e5m2"                        # which the pretended card multiplies
DRAWN = {("flux.1-dev", "IQ4_XS"), ("flux.1-dev", "float8_e4m3fn"), ("sd3.5-large", "Q4_K"), ("flux.2-dev", "Q2_K"),
         ("qwen-image", "fp8_e4m3fn"), ("sd3.5-large", "convrot_w4a4")}


def given(type_, name="flux.1-dev"):
    """((checkpoint, Run), storage, quantisation) of a published model at its size, with two blocks of each kind, held
    in this type."""
    checkpoint, run = published(name)
    if type_ in kitchen_layers.LAYOUTS and not hasattr(comfy_kitchen.tensor, kitchen_layers.LAYOUTS[type_]):
        pytest.skip(f"this comfy-kitchen does not know {type_}")
    if type_ in (*PACKED, *FORMATS):
        checkpoint = dataclasses.replace(checkpoint, type_=type_)
    return ((checkpoint, run), "float8_e4m3fn" if type_ == "fp8_e4m3fn" else "bfloat16",
            type_ if type_ in TYPES else "")


def row_of(type_, layout):
    row, storage, quantisation = given(type_)
    return counted(row, layout, storage=storage, quantisation=quantisation)


def off_by(name, type_, settings=DEFAULT_SETTINGS):
    """How far the forecast of what a step takes beside such weights is from what is counted."""
    (checkpoint, run), storage, quantisation = given(type_, name)
    spec = spec_of(checkpoint, Layout(), storage, quantisation)
    dims = dims_of(checkpoint.family, outline(checkpoint, spec)[0], table_of(checkpoint, spec), (fake_cuda.CAPABILITY,))
    shapes = run.conditioning | run.call_conditioning
    job = job_of(checkpoint.family, dims, run.shape,
                 {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}, 20)
    found = counted((checkpoint, run), "one", storage=storage, quantisation=quantisation)
    return rank_memory(dims, job, degrees_of(Layout(), ParallelConfig()), settings).activations / found.peak_bytes - 1


@pytest.mark.parametrize("name, type_", [
    pytest.param(*row, marks=[] if row in DRAWN else pytest.mark.slow) for row in FORECAST])
def test_a_peak_with_packed_weights_is_what_was_forecast(name, type_):
    assert abs(off_by(name, type_)) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name, type_", [row for row in FORECAST if row[1] in FLOAT8])
def test_a_peak_where_no_products_are_of_the_type_is_what_was_forecast(monkeypatch, name, type_):
    monkeypatch.setattr(fake_cuda, "CAPABILITY", (8, 0))

    assert abs(off_by(name, type_)) < 0.05


@pytest.mark.parametrize("name, type_", [
    pytest.param(*row, marks=[] if row == ("flux.2-dev", "float8_e4m3fn") else pytest.mark.slow)
    for row in FORECAST if row[1] in FLOAT8])
def test_of_a_gpu_that_is_not_known_no_less_is_forecast_than_of_any(name, type_):
    """Which may multiply such weights or unpack them."""
    checkpoint, run = given(type_, name)[0]
    spec = spec_of(checkpoint, Layout())
    nets = [dims_of(checkpoint.family, outline(checkpoint, spec)[0], table_of(checkpoint, spec), (capability,))
            for capability in (None, (8, 0), (8, 9))]
    for settings in (DEFAULT_SETTINGS, MemorySettings(has_lora=True)):
        unknown, *known = (rank_memory(dims, Job(4096, 512, 20), degrees_of(Layout(), ParallelConfig()), settings)
                           .activations for dims in nets)
        assert unknown >= max(known)


@pytest.mark.parametrize("name, type_", [
    pytest.param(*row, marks=[] if row == ("flux.2-dev", "float8_e4m3fn") else pytest.mark.slow)
    for row in FORECAST if row[1] in FLOAT8])
def test_a_peak_with_a_lora_beside_weights_that_are_multiplied_is_what_was_forecast(monkeypatch, name, type_):
    """As without one, beside its factors."""
    monkeypatch.setattr(simulated_rank, "load", with_lora)

    assert abs(off_by(name, type_, MemorySettings(has_lora=True))) < 0.05


@pytest.mark.parametrize("name, type_", [
    pytest.param(*row, marks=[] if row == ("sd3.5-large", "Q4_K") else pytest.mark.slow)
    for row in FORECAST if row[1] != "fp8_e4m3fn"])
def test_a_peak_with_a_lora_beside_packed_weights_is_what_was_forecast(monkeypatch, name, type_):
    """On a card that unpacks what it can; what it multiplies takes no more with a LoRA."""
    monkeypatch.setattr(fake_cuda, "CAPABILITY", (8, 0))
    monkeypatch.setattr(simulated_rank, "load", with_lora)

    assert abs(off_by(name, type_, MemorySettings(has_lora=True))) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("type_", ["float8_e4m3fn", "int8_tensorwise", "convrot_w4a4"])
def test_a_lora_takes_no_room_beside_weights_that_are_multiplied_as_they_are(monkeypatch, type_):
    plain = row_of(type_, "one").peak_bytes
    monkeypatch.setattr(simulated_rank, "load", with_lora)

    assert row_of(type_, "one").peak_bytes - plain < 0.001 * plain


@pytest.mark.slow
def test_it_notices_a_lora_that_is_not_forecast(monkeypatch):
    monkeypatch.setattr(simulated_rank, "load", with_lora)

    assert off_by("flux.1-dev", "Q4_K") < -0.15


@pytest.mark.parametrize("type_, unpacking", UNPACKING.items())
def test_unpacking_takes_what_is_forecast(type_, unpacking):
    numbers, num_bytes = block_of(type_)
    with fake_cuda_device(), DeviceWork() as work:
        held = torch.empty(4096, 4096 // numbers * num_bytes, dtype=torch.uint8, device=CUDA)
        before = work.resident_bytes
        unpacked(held, type_, None, torch.bfloat16)

    assert abs((work.peak_bytes - before) / (4096 ** 2 * unpacking) - 1) < 0.05


def test_it_notices_a_product_in_32_bits_that_is_not_forecast(monkeypatch):
    """As a card has it that comfy-kitchen has kernels for."""
    monkeypatch.setattr(kitchen_layers, "has_kernels", lambda: True)

    assert off_by("flux.1-dev", "convrot_w4a4") < -0.5


def test_it_notices_places_of_four_bytes_for_each_number(monkeypatch):
    """As IQ4 was looked up before."""
    plain = ggml_dequant._levels
    monkeypatch.setattr(ggml_dequant, "_levels", lambda places: plain(places).contiguous().int().to(torch.int8))

    assert off_by("flux.1-dev", "IQ4_XS") < -0.05


@functools.cache
def plain_row(layout):
    return counted(published("flux.1-dev"), layout)


@pytest.mark.parametrize("type_", ["bf16", "int8_tensorwise", "nvfp4"])
def test_the_forecast_knows_what_ranks_tell_each_other(type_):
    """Of the tokens as of what they add up, see above."""
    checkpoint, _ = published("flux.1-dev")
    checkpoint = checkpoint if type_ == "bf16" else dataclasses.replace(checkpoint, type_=type_)
    dims = dims_of(checkpoint.family, outline(checkpoint, checkpoint.spec("bfloat16", "bfloat16"))[0])

    assert dims.agreed == (1.5 if type_ == "int8_tensorwise" else 0) and dims.sums == 1.5
    assert dims.formats == ({} if type_ == "bf16" else {type_: 1.0})


def test_every_type_has_a_row():
    assert {*TYPES, *FORMATS, *PACKED} <= {type_ for type_, _ in ROWS}


@pytest.mark.parametrize("type_, layout", [
    pytest.param(*row, marks=[] if row in ROWS[:1] or row[0] in FEW and row[1] == "one" else pytest.mark.slow)
    for row in ROWS])
def test_a_step_with_weights_of_each_type(type_, layout):
    row, plain = row_of(type_, layout), plain_row(layout)

    assert row.mixed == {} and row.waits == {}
    # of each token a number before the second products, two of a double block, one of a single: by what it is rounded
    told = 2 * (2 + 1) * (4096 + 512) if (type_, layout) == ("int8_tensorwise", "tensor2") else 0
    assert row.kernels >= plain.kernels and row.sent_bytes == plain.sent_bytes + 4 * told
    # by comfy-kitchen's own products: rotations are products too, and a row alone is filled up to 32
    more = {"convrot_w4a4": 1.2, "asym_w4a8_int8": 1.2, "int8_tensorwise": 1.01}.get(type_, 1)
    assert plain.flops <= row.flops <= more * plain.flops
    # what is unpacked of a weight, and what it is unpacked by, is there while it is multiplied with
    largest = 2 * max(map(math.prod, published("flux.1-dev")[0].shapes.values()))
    if type_ not in EAGER:
        assert row.peak_bytes - plain.peak_bytes <= 2 * largest
    assert math.isclose(row.weight_bytes / plain.weight_bytes, BITS[type_] / 16, rel_tol=0.02)
