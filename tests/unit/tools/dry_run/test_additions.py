"""What a step is asked for beside the plain one: what a ControlNet adds, text that is masked, a LoRA on weights that
are packed. It mixes no devices, waits nowhere else, sends no more, and takes no more kernels than it has to."""

import dataclasses
import math

import pytest

from tests.unit.tools.dry_run.rows import (
    ALLOWED_WAITS,
    LAYOUTS,
    LORA_RANK,
    TEXT_TOKENS,
    counted,
    place_of,
    published,
    spec_of,
    tiny,
    with_lora,
)
from xdit_backend.models import FAMILIES
from xdit_backend.tools.bench.size import parse_layout
from xdit_backend.tools.dry_run import simulated_rank

CONTROLLED = [name for name, family in FAMILIES.items()
              if name in LAYOUTS and not family.plan.hooks == "replicated"
              and family.control_shapes(family.testing.config, tiny(name)[1].shape)]
# Mochi reads its mask, of which a pretended device has no numbers.
MASKED = [name for name in LAYOUTS if name != "Mochi" and "attention_mask" in FAMILIES[name].inputs.conditioning]
MASKED_WAITS = {*ALLOWED_WAITS, "copy at transformer_qwenimage.py compute_text_seq_len_from_mask"}     # diffusers' own
ADDED, ONCE = 4, 2             # kernels for a place, and in a forward: copies to the device and into place, and a sum
LITTLE = 0.02                  # of the peak


def rows(names):
    """(family, layout), by default of every third family one, in turn."""
    drawn = {(name, LAYOUTS[name][(index + 1) % len(LAYOUTS[name])]) for index, name in enumerate(names)
             if index % 3 == 0}
    return [pytest.param(name, layout, marks=[] if (name, layout) in drawn else pytest.mark.slow)
            for name in names for layout in LAYOUTS[name]]


@pytest.mark.parametrize("name, layout", rows(CONTROLLED))
def test_what_a_controlnet_adds(name, layout):
    checkpoint, run = tiny(name)
    family, places = checkpoint.family, checkpoint.family.control_shapes(checkpoint.config, run.shape)
    plain, row = (counted((checkpoint, dataclasses.replace(run, has_control=each)), layout, 0)
                  for each in (False, True))

    assert row.mixed == {} and row.waits == plain.waits
    assert row.sent_bytes == plain.sent_bytes and row.weight_bytes == plain.weight_bytes
    patches = 4 if "pipefusion" in layout else 1
    assert 0 < row.kernels - plain.kernels <= (ADDED * len(places) + ONCE) * patches
    # each is there as long as it takes to add it; but where blocks read others' outputs, those it was added to live on
    reads = family.plan.is_unet or family.plan.skips(family.num_blocks(checkpoint.config))
    most = 2 * sum(map(math.prod, places.values())) if reads else LITTLE * plain.peak_bytes
    assert row.peak_bytes - plain.peak_bytes <= most


@pytest.mark.parametrize("name, layout", rows(MASKED))
def test_text_that_is_masked(name, layout):
    checkpoint, run = tiny(name)
    masked = dataclasses.replace(run, conditioning=run.conditioning | {"attention_mask": (1, TEXT_TOKENS)})
    plain, row = counted((checkpoint, run), layout), counted((checkpoint, masked), layout)

    assert row.mixed == {} and {place_of(wait) for wait in row.waits} <= MASKED_WAITS
    assert row.sent_bytes == plain.sent_bytes and row.kernels > plain.kernels
    assert row.peak_bytes <= (1 + LITTLE) * plain.peak_bytes


@pytest.mark.parametrize("type_, layout", [
    ("Q4_K", "one"), pytest.param("Q8_0", "pipefusion2", marks=pytest.mark.slow),
    pytest.param("float8_e4m3fn", "ulysses2", marks=pytest.mark.slow)])
def test_a_lora_on_packed_weights(monkeypatch, type_, layout):
    """Two small products for each, where it is multiplied as it is packed; else one that is added as it is unpacked."""
    checkpoint, run = published("flux.1-dev")
    row = dataclasses.replace(checkpoint, type_=type_), run
    plain = counted(row, layout)
    monkeypatch.setattr(simulated_rank, "load", with_lora)
    found = counted(row, layout)

    assert found.mixed == {} and found.waits == plain.waits and found.sent_bytes == plain.sent_bytes
    assert plain.flops < found.flops < 1.2 * plain.flops
    model, packed = simulated_rank.outline(row[0], spec_of(row[0], parse_layout(layout)))
    linears = [model.get_submodule(name.removesuffix(".weight")) for name in packed]
    factors = sum(4 * LORA_RANK * (linear.in_features + linear.out_features) for linear in linears)      # in float32
    added = found.weight_bytes - plain.weight_bytes
    assert 0 < added < factors if "pipefusion" in layout else added == factors
