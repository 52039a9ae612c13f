"""Published models at their full size on cards that are too small for them: what a rank holds at its peak is what its
device has room for and what the forecast says, and weights come once a step."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from tests.support.tiers import by_default
from xdit_backend.__main__ import make_parser
from xdit_backend.checkpoints.offload.block_offload import OffloadedBlocks
from xdit_backend.checkpoints.offload.offload_plan import plan_weights
from xdit_backend.partition import FULL
from xdit_backend.planner.cost_model import COLLECTIVES, Device, Links
from xdit_backend.planner.layout_search import Machine
from xdit_backend.planner.memory_model import memory_budget
from xdit_backend.tools.bench import fits, size
from xdit_backend.tools.dry_run import published_models
from xdit_backend.tools.dry_run.simulated_rank import count, stage_ranks, table_of
from xdit_backend.worker import cooperative_loading

ALLOWED = 0.03
ROOT = Path(__file__).parents[4]
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


def fit_of(name, layout_name, gpu_gb, links=None):
    subject = size.subject_of(make_parser().parse_args(["bench", "size", *name.split()]))
    device = Device(1e14, 1e14, 1e12, memory_bytes=gpu_gb * 1e9, host_bytes_s=12e9)
    return fits.Fit(subject, size.parse_layout(layout_name), Machine((device,) * 2, links or Links()))


@pytest.mark.parametrize("row", by_default(lambda row: row.startswith("Flux.1"), ROWS))
def test_the_tables_of_models_larger_than_vram_are_simulated(row):
    """The table of docs/reference/models.md: resident GB + streamed GB of each of two GPUs, and the bottleneck with its
    seconds. README has some of its rows, without seconds."""
    method, *cells = cells_of(ROOT / "docs" / "reference" / "models.md", row)
    in_readme = [cells_of(ROOT / readme, short_name(row)) for readme in ("README.md", "README.zh.md")]
    fitting = {gpu_gb: fit_of(ROWS[row], method.lower().replace(" ", ""), gpu_gb) for gpu_gb in CARDS}
    subject, layout = fitting[12].subject, fitting[12].layout
    flops = count(subject.checkpoint, subject.spec(), layout, 0, subject.run).flops
    for cell, (gpu_gb, fit) in zip(cells, fitting.items(), strict=True):
        streamed_bytes = fit.hold[1][0]
        comes_s, computes_s = streamed_bytes / 12e9, flops / CARDS[gpu_gb]
        compute = f"compute {computes_s:.1f} s" if computes_s < 10 else f"compute {computes_s:.0f} s"
        resident, streamed = f"{max(fit.weights) / 1e9:.1f}", f"{streamed_bytes / 1e9:.1f}"
        bounded_by_link = comes_s > computes_s

        assert fit.answer().startswith("fits")
        assert cell == f"{resident} + {streamed}; " + (f"**PCIe {comes_s:.1f} s**, " * bounded_by_link) + compute
        for column, compute_word in zip(in_readme, ("compute", "计算"), strict=True):
            bottleneck = "**PCIe**" if bounded_by_link else compute_word
            assert not column or column[1 + list(CARDS).index(gpu_gb)] == f"{resident}+{streamed} {bottleneck}"
    assert all(not column or method == f"{column[0]} 2" for column in in_readme)


def cells_of(path, row):
    """The cells of a table's row after its name; [] if the page has no such row."""
    lines = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [cell.strip() for cell in lines[0].split("|")] if lines else []


def short_name(row):
    """README's name of a row: `Flux.1 dev, 1024 px` for `Flux.1 dev, 1024 x 1024`; a video's without its frames."""
    return re.sub(r", \d+ frames$", "", re.sub(r"(\d+) x \1$", r"\1 px", row))


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_the_readme_has_at_most_six_rows_of_models_larger_than_vram(readme):
    rows = [row for row in ROWS if cells_of(ROOT / readme, short_name(row))]

    table = (ROOT / readme).read_text(encoding="utf-8").partition("RTX 3060")[2].partition("\n\n")[0]
    assert len(rows) == table.count("\n| ") - 1 <= 6, "a row that no simulation covers, or too many rows"


@pytest.mark.parametrize("name, layout, gpu_gb", [
    pytest.param(name, layout, gpu_gb, marks=[] if (name, layout, gpu_gb) == DEFAULT else pytest.mark.slow)
    for name, own in MODELS.items() for layout in sorted({"one", "ulysses2", own}) for gpu_gb in CARDS_GB])
def test_a_rank_holds_what_its_gpu_has_room_for_and_what_was_forecast(name, layout, gpu_gb):
    fit = fit_of(name, layout, gpu_gb)
    answer = fit.answer()
    if not answer.startswith("fits"):                          # activations and two blocks at a time are too much
        assert fit.subject.plan_of(1, 1).device_bytes + fit.run_bytes > memory_budget(gpu_gb * 1e9)
        return
    spec = fit.subject.spec(None, 1, fit.weights_memory)
    counted = count(fit.subject.checkpoint, spec, fit.layout, 0, fit.subject.run)

    assert counted.weight_bytes == max(fit.weights)
    assert abs(counted.weight_bytes + counted.peak_bytes - max(fit.weights) - fit.run_bytes) < ALLOWED * (
        counted.weight_bytes + counted.peak_bytes)
    # no copy of a block more than its weights
    assert counted.streamed_bytes == fit.hold[1][0]


@pytest.mark.parametrize("name, gpu_gb", [
    pytest.param(*row, marks=pytest.mark.slow) for row in (("flux.1-dev", 12), ("flux.2-dev", 24), ("qwen-image", 16))])
def test_a_stage_holds_what_its_gpu_has_room_for_and_what_was_forecast(name, gpu_gb):
    """Weights come once for each of as few patches as there are stages."""
    fit = fit_of(name, "pipefusion2", gpu_gb)
    assert "for each of 2 patches" in fit.answer(), fit.answer()
    memory = [gpu_gb * 1e9 * FULL] * 2
    spec = fit.subject.spec(fit.stages, 1, fit.weights_memory)
    for rank in stage_ranks(fit.subject.checkpoint, spec, fit.layout, memory):
        counted = count(fit.subject.checkpoint, spec, fit.layout, rank, fit.run, memory)

        assert counted.weight_bytes == fit.weights[rank] <= fit.weights_memory
        assert counted.streamed_bytes == 2 * fit.hold[1][rank] > 0
        assert counted.weight_bytes + counted.peak_bytes < memory_budget(gpu_gb * 1e9)


# of cards that are three times as fast to each other as host memory is to them, and more
FAST, SLOW = (Links({(collective, 2): rate for collective in COLLECTIVES}) for rate in (1e11, 12e9))
SHARED = {"flux.1-dev --weights-memory 6": "ulysses2", "qwen-image --weights-memory 6": "cfg2"}
SHORT = "short --weights-memory 1.9"      # two blocks of each kind, of which three come


def parts_of(fit, spec):
    """[bytes of each of two ranks' part of a block that comes], [those that both bring], by arithmetic on shapes."""
    table, sizes = table_of(fit.subject.checkpoint, spec), {}
    come = plan_weights(table, spec.weights_memory)[1]
    for weight in table.weights:
        if weight.name in come:
            taken = -(-math.prod(weight.shape) * weight.dtype.itemsize // 512) * 512
            sizes[come[weight.name]] = sizes.get(come[weight.name], 0) + taken
    parts = [taken // 2 // 512 * 512 for taken in sizes.values()]
    return parts, [taken - 2 * part for taken, part in zip(sizes.values(), parts)]


@pytest.fixture
def short(monkeypatch):
    """Of Flux.1 dev two blocks of each kind."""
    flux = published_models.PUBLISHED["flux.1-dev"]
    model = dataclasses.replace(flux, arguments=flux.arguments | {"num_layers": 2, "num_single_layers": 2})
    monkeypatch.setitem(published_models.PUBLISHED, "short", model)


@pytest.mark.parametrize("name", [SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in SHARED)])
def test_ranks_that_share_weights_are_counted_as_they_send_them(short, name):
    """Where links are fast, as the node has it; where they are not, each brings all."""
    fit, slow = (fit_of(name, SHARED.get(name, "ulysses2"), 24, links) for links in (FAST, SLOW))
    spec = fit.subject.spec(None, 1, fit.weights_memory)
    shared, alone = (count(each.subject.checkpoint, spec, each.layout, 1, each.run) for each in (fit, slow))
    parts, rest = parts_of(fit, spec)

    assert "one shard by each device" in fit.answer() and "one shard" not in slow.answer()
    assert shared.shared_bytes == sum(parts) == shared.sent_bytes - alone.sent_bytes
    assert shared.sent_bytes == shared.reported_bytes
    assert shared.num_exchanges == alone.num_exchanges + len(parts)
    assert shared.streamed_bytes == sum(parts) + sum(rest)
    assert alone.shared_bytes == 0 and alone.streamed_bytes == fit.hold[1][1]
    assert size.bounds(shared, fit.layout, fit.machine)["link"] == pytest.approx(
        shared.sent_bytes / 1e11 + shared.num_exchanges * 3e-5)


def whole(plain, self, block):
    """Each rank copies all of a block, and sends its part all the same."""
    own, self._sharing = self._sharing, None
    try:
        return plain(self, block)
    finally:
        self._sharing = own


@pytest.mark.slow
@pytest.mark.parametrize("owner, name, mutant", [
    (cooperative_loading, "is_identical", lambda plain, *given: False), (OffloadedBlocks, "_pairs", whole),
    (OffloadedBlocks, "_part_bytes", lambda plain, *given: plain(*given) // 2)])
def test_it_notices_ranks_that_bring_all_or_send_too_little(short, monkeypatch, owner, name, mutant):
    plain = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: mutant(plain, *given))

    with pytest.raises(AssertionError):
        test_ranks_that_share_weights_are_counted_as_they_send_them(None, SHORT)
