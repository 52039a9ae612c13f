"""Weights in every type that is held: a step neither waits for the device nor mixes devices, and they take their
bytes."""

import dataclasses
import functools
import math

import pytest

from tests.dry_run.rows import counted, published
from xdit_backend.checkpoints.gguf import PACKED, block_of
from xdit_backend.checkpoints.layers import FORMATS
from xdit_backend.checkpoints.net import net_of
from xdit_backend.checkpoints.quantise import TYPES
from xdit_backend.dry_run.rank import outline

# bits that a weight of a linear layer takes
BITS = {"fp8_e4m3fn": 8, "float8_e4m3fn": 8, "float8_e5m2": 8, "nvfp4": 4.5, "mxfp8": 8.25, "int8_tensorwise": 8,
        "convrot_w4a4": 4, "int8": 8, "nf4": 4.5} | {
    type_: 8 * block_of(type_)[1] / block_of(type_)[0] for type_ in PACKED}
FEW = ("float8_e4m3fn", "Q8_0", "Q4_K", "IQ4_XS", "nf4")
ROWS = [*((type_, "one") for type_ in BITS), *((type_, "tensor2") for type_ in (*FEW, "int8_tensorwise"))]


def row_of(type_, layout):
    """Flux.1 dev at its size, with two blocks of each kind, held in this type."""
    checkpoint, run = published("flux.1-dev")
    if type_ in (*PACKED, *FORMATS):
        checkpoint = dataclasses.replace(checkpoint, type_=type_)
    return counted((checkpoint, run), layout, storage="float8_e4m3fn" if type_ == "fp8_e4m3fn" else "bfloat16",
                   quantisation=type_ if type_ in TYPES else "")


@functools.cache
def plain_row(layout):
    return counted(published("flux.1-dev"), layout)


@pytest.mark.parametrize("type_", ["bf16", "int8_tensorwise", "nvfp4"])
def test_the_forecast_knows_what_ranks_tell_each_other(type_):
    """Of the tokens as of what they add up, see above."""
    checkpoint, _ = published("flux.1-dev")
    checkpoint = checkpoint if type_ == "bf16" else dataclasses.replace(checkpoint, type_=type_)
    net = net_of(checkpoint.family, outline(checkpoint, checkpoint.spec("bfloat16", "bfloat16"))[0])

    assert net.agreed == (1.5 if type_ == "int8_tensorwise" else 0) and net.sums == 1.5
    assert net.formats == ({} if type_ == "bf16" else {type_: 1.0})


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
    assert row.flops == plain.flops
    # what is unpacked of a weight, and what it is unpacked by, is there while it is multiplied with
    largest = 2 * max(map(math.prod, published("flux.1-dev")[0].shapes.values()))
    assert row.peak_bytes - plain.peak_bytes <= 2 * largest
    assert math.isclose(row.weight_bytes / plain.weight_bytes, BITS[type_] / 16, rel_tol=0.02)
