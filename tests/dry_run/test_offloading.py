"""Published models at their full size on cards that are too small for them: what a rank holds at its peak is what its
device has room for and what the forecast says, and weights come once a step."""

import re
from pathlib import Path

import pytest

from tests.tiers import by_default
from xdit_backend.__main__ import make_parser
from xdit_backend.bench import fits, size
from xdit_backend.dry_run.rank import count, stage_ranks
from xdit_backend.forecast.choice import Machine
from xdit_backend.forecast.cost import Device, Links
from xdit_backend.forecast.memory import room_of
from xdit_backend.partition import FULL

ALLOWED = 0.03
README = Path(__file__).parents[2] / "README.md"
ROWS = {"Flux.1 dev, 1024 x 1024": "flux.1-dev", "Qwen-Image, 1328 x 1328": "qwen-image",
        "Wan 2.1 14B, 480p, 81 frames": "wan2.1-14b-480p", "Wan 2.1 14B, 720p, 81 frames": "wan2.1-14b-720p",
        "HunyuanVideo 1.5, 720p, 121 frames": "hunyuanvideo-1.5", "Flux.2 dev, 1024 x 1024": "flux.2-dev",
        "Flux.2 dev in fp8": "flux.2-dev --weight-dtype fp8_e4m3fn"}
MODELS = {"flux.1-dev": "ulysses2", "qwen-image": "cfg2", "wan2.1-14b-720p": "cfg2", "hunyuanvideo-1.5": "cfg2",
          "flux.2-dev": "ulysses2"}
CARDS_GB = (8, 12, 16, 24)
# of the data sheets: operations a second in 16 bits that are added up in 32, of tensor cores without sparsity
CARDS = {12: 25.6e12, 16: 44.1e12, 24: 71e12}
DEFAULT = "flux.1-dev", "ulysses2", 12


def fit_of(name, layout_name, card_gb):
    subject = size.subject_of(make_parser().parse_args(["bench", "size", *name.split()]))
    device = Device(1e14, 1e14, 1e12, memory_bytes=card_gb * 1e9, host_bytes_s=12e9)
    return fits.Fit(subject, size.parse_layout(layout_name), Machine((device,) * 2, Links()))


@pytest.mark.parametrize("row", by_default(lambda row: row.startswith("Flux.1"), ROWS))
def test_the_table_of_cards_that_are_smaller_than_a_model_is_what_they_would_hold(row):
    """README's: GB that stay on each of two cards, that come in a step, and which takes longest, coming or
    computing."""
    line, = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", README.read_text(encoding="utf-8"), re.MULTILINE)
    method, *cells = (cell.strip() for cell in line.split("|"))
    fitting = {card_gb: fit_of(ROWS[row], method.lower().replace(" ", ""), card_gb) for card_gb in CARDS}
    subject, layout = fitting[12].subject, fitting[12].layout
    flops = count(subject.checkpoint, subject.spec(), layout, 0, subject.run).flops
    for cell, (card_gb, fit) in zip(cells, fitting.items(), strict=True):
        come_bytes = fit.hold[1][0]
        comes_s, computes_s = come_bytes / 12e9, flops / CARDS[card_gb]
        computes = f"computes {computes_s:.1f}" if computes_s < 10 else f"computes {computes_s:.0f}"
        bound = f"**comes {comes_s:.1f} s**, {computes}" if comes_s > computes_s else f"{computes} s"

        assert fit.answer().startswith("fits")
        assert cell == f"{max(fit.weights) / 1e9:.1f} + {come_bytes / 1e9:.1f}; {bound}"


@pytest.mark.parametrize("name, layout, card_gb", [
    pytest.param(name, layout, card_gb, marks=[] if (name, layout, card_gb) == DEFAULT else pytest.mark.slow)
    for name, own in MODELS.items() for layout in sorted({"one", "ulysses2", own}) for card_gb in CARDS_GB])
def test_a_rank_holds_what_its_card_has_room_for_and_what_was_forecast(name, layout, card_gb):
    fit = fit_of(name, layout, card_gb)
    answer = fit.answer()
    if not answer.startswith("fits"):                          # activations and two blocks at a time are too much
        assert fit.subject.plan_of(1, 1).device_bytes + fit.run_bytes > room_of(card_gb * 1e9)
        return
    spec = fit.subject.spec(None, 1, fit.weights_memory)
    counted = count(fit.subject.checkpoint, spec, fit.layout, 0, fit.subject.run)

    assert counted.weight_bytes == max(fit.weights)
    assert abs(counted.weight_bytes + counted.peak_bytes - max(fit.weights) - fit.run_bytes) < ALLOWED * (
        counted.weight_bytes + counted.peak_bytes)
    # no copy of a block more than its weights
    assert counted.come_bytes == fit.hold[1][0]


@pytest.mark.parametrize("name, card_gb", [
    pytest.param(*row, marks=pytest.mark.slow) for row in (("flux.1-dev", 12), ("flux.2-dev", 24), ("qwen-image", 16))])
def test_a_stage_holds_what_its_card_has_room_for_and_what_was_forecast(name, card_gb):
    """Weights come once for each of as few patches as there are stages."""
    fit = fit_of(name, "pipefusion2", card_gb)
    assert "for each of 2 patches" in fit.answer(), fit.answer()
    memory = [card_gb * 1e9 * FULL] * 2
    spec = fit.subject.spec(fit.stages, 1, fit.weights_memory)
    for rank in stage_ranks(fit.subject.checkpoint, spec, fit.layout, memory):
        counted = count(fit.subject.checkpoint, spec, fit.layout, rank, fit.run, memory)

        assert counted.weight_bytes == fit.weights[rank] <= fit.weights_memory
        assert counted.come_bytes == 2 * fit.hold[1][rank] > 0
        assert counted.weight_bytes + counted.peak_bytes < room_of(card_gb * 1e9)
