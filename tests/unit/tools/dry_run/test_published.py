"""Published models at their size: what a rank holds at most is within 5 % of what the forecast says, by which runs are
refused before they start; and its weights to the byte."""

import dataclasses
import itertools

import pytest
import torch

from tests.support.tiers import by_default
from tests.unit.checkpoints.test_header import PUBLISHED as FILES
from tests.unit.tools.dry_run.rows import counted, published, spec_of
from xdit_backend.checkpoints.build_transformer import build_empty
from xdit_backend.checkpoints.model_dims import dims_of, job_of, unet_run_memory
from xdit_backend.config import ParallelConfig
from xdit_backend.models import FAMILIES
from xdit_backend.planner.memory_model import rank_memory, weight_bytes
from xdit_backend.planner.planner import degrees_of
from xdit_backend.protocol.errors import ConfigError
from xdit_backend.tools.bench.size import parse_layout
from xdit_backend.tools.dry_run.published_models import PUBLISHED
from xdit_backend.tools.dry_run.simulated_rank import check_layout, own_blocks, table_of, world_size_of

ALLOWED = 0.05
# counted with all blocks: what is said of PiD's latent lives once for each gate, and HiDream-I1's text for each block;
# of VACE's two lists of blocks one keeps nothing, and its share is another of few
DEEP = "pid", "hidream-i1", "wan2.1-vace-14b-480p"
NAMES = [name for name, model in PUBLISHED.items() if not FAMILIES[model.family].plan.is_unet]
# families that are not in the table of docs/benchmarks.md; they have a row under fewer layouts
OTHERS = NAMES[NAMES.index("chroma"):]
TRANSFORMERS = [name for name in NAMES if name not in OTHERS]
ALIKE = "wan2.1-14b-480p", "wan2.2-i2v-14b-480p", "wan2.2-i2v-14b-720p"        # as wan2.1-14b-720p, but for the size
LAYOUTS = "one", "ulysses2", "ring2", "tensor2", "displaced2", "ulysses2-ring2"
FEW = "one", "ulysses2", "tensor2", "displaced2"
STAGED = "pipefusion2", "pipefusion4", "pipefusion2-ulysses2"
ON_FOUR = ("ulysses4", "ring4", "tensor4", "displaced4", "displaced2-ulysses2", "ulysses2-tensor2",
           "displaced2-tensor2", "ulysses2-ring2", "ring2")
# published models whose numbers are those of the header of a published file -> the file, in tests/unit/checkpoints
HEADERS = {name: name for name in ("longcat-image", "pixart-alpha", "ernie-image", "krea-2", "hidream-i1",
                                   "cosmos-predict2-2b", "anima", "kandinsky-5-lite", "kandinsky-5-image",
                                   "cogvideox-1.5-5b", "sd1.5", "sd2.1", "sd-x4", "svd", "stable-cascade-c",
                                   "stable-cascade-b", "omnigen2", "lens", "joyimage", "minimax-h3",
                                   "chroma-radiance", "mage-flow", "newbie-image", "triposplat", "hidream-o1",
                                   "seedvr2-3b", "seedvr2-7b",
                                   "stable-audio-open-1.0", "stable-audio-3-medium", "minimax-music-3",
                                   "ace-step-1.0")} | {
    "ace-step-1.5": "ace-step15", "hunyuan3d-2": "hunyuan3d-2", "hunyuan3d-2.1": "hunyuan3d-2.1",
    "z-image-omni": "z-image-omni", "z-image-pixel": "z-image-pixel", "pixeldit": "pixeldit", "pid": "pid",
    "hunyuanimage-2.1-refiner": "hunyuan-image-refiner", "hunyuanimage-2.1-distilled": "hunyuan-image-distilled",
    "hunyuanvideo-1.5-sr": "hunyuan-video-1.5-sr", "cogvideox-5b-i2v": "cogvideox-5b-i2v",
    "hunyuandit-1.2": "hunyuan-dit-1.2", "boogu-image": "boogu", "ideogram-4": "ideogram4",
    "wan2.1-vace-14b-480p": "wan-vace-14b", "wan2.1-fun-camera-14b-480p": "wan-camera",
    "wan2.1-fun-control-14b-480p": "wan-fun-control",
    "wan2.1-humo-17b-480p": "wan-humo", "wan2.2-animate-14b-480p": "wan-animate",
    "wan2.1-scail-14b-480p": "wan-scail", "wan2.1-scail-2-14b-480p": "wan-scail-2", "wan2.2-s2v-14b-480p": "wan-s2v",
    "wandancer-14b-480p": "wandancer"}
WITH_SKIPS = "hunyuandit-1.2"  # of which what lives at once depends on how many blocks there are
# models, layouts and branches of guidance
DEFAULT = {("flux.1-dev", "ulysses2", 1), ("flux.2-dev", "one", 1), ("qwen-image", "ring2", 2), ("z-image", "one", 1),
           ("sd3.5-large", "ulysses2-ring2", 2), ("wan2.1-14b-480p", "tensor2", 1),
           ("wan2.2-i2v-14b-720p", "ulysses2", 2), ("hunyuanvideo-1.5", "one", 1), ("ltx-2", "displaced2", 2)}


def test_every_family_has_a_published_size():
    assert {model.family for model in PUBLISHED.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", HEADERS)
def test_a_published_size_is_that_of_a_published_file(name):
    """As far as diffusers' class asks for it."""
    family, shapes, _ = FILES[HEADERS[name]]
    found = FAMILIES[family].detection.config(shapes)

    assert family == PUBLISHED[name].family
    assert {key: PUBLISHED[name].config.get(key) for key in found} == found


def runs_under(name, layout_name):
    """Does the family of a published model, with its heads, allow a layout?"""
    try:
        check_layout(published(name)[0], parse_layout(layout_name))
    except ConfigError:
        return False
    return True


def net_and_job(name, layout_name, blocks=2, branches=1):
    """(Net, Job) of a published model's usual step."""
    (checkpoint, run), layout = published(name, blocks), parse_layout(layout_name)
    dims = dims_of(checkpoint.family, build_empty(checkpoint.family, checkpoint.config),
                   table_of(checkpoint, spec_of(checkpoint, layout)))
    shapes = run.conditioning | run.call_conditioning
    given = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    return dims, job_of(checkpoint.family, dims, run.shape, given, 20, branches)


def forecast_of(name, layout_name, blocks=2, memory=rank_memory, branches=1):
    """The forecast.Memory of a rank. memory: of rank_memory's kind."""
    dims, job = net_and_job(name, layout_name, blocks, branches)
    stages = spec_of(published(name, blocks)[0], parse_layout(layout_name)).stages
    return memory(dims, job, degrees_of(parse_layout(layout_name), ParallelConfig(), stages)), dims


def off_by(name, layout_name, memory=rank_memory, branches=1, blocks=2, ranks=(0,)):
    """How far the forecast is from what is counted of the fullest of these ranks, beside weights: 0.05 is 5 % too
    much."""
    blocks = None if name in DEEP else blocks
    found, _ = forecast_of(name, layout_name, blocks, memory, branches)
    checkpoint, run = published(name, blocks)
    row = checkpoint, dataclasses.replace(run, branches=branches)
    peak_bytes = max(counted(row, layout_name, rank).peak_bytes for rank in ranks)
    return (found.keys_values + found.activations) / peak_bytes - 1


@pytest.mark.parametrize("name, layout, branches", [
    pytest.param(*row, marks=[] if row in DEFAULT else pytest.mark.slow)
    for row in itertools.product(TRANSFORMERS, LAYOUTS, (1, 2)) if row[0] not in ALIKE or row in DEFAULT])
def test_a_peak_is_what_was_forecast(name, layout, branches):
    """Of one branch of guidance, or of both, which are one batch but with displaced patches."""
    assert abs(off_by(name, layout, branches=branches)) < ALLOWED


@pytest.mark.parametrize("name, layout", [
    pytest.param(name, layout, marks=[] if number % 2 == 0 and layout == FEW[number // 2 % 3] else pytest.mark.slow)
    for number, name in enumerate(OTHERS) for layout in FEW if runs_under(name, layout)])
def test_a_peak_of_other_families_is_what_was_forecast(name, layout):
    assert abs(off_by(name, layout)) < ALLOWED


@pytest.mark.parametrize("name, layout", [
    pytest.param(name, layout, marks=[] if number % 7 == 0 and layout == ON_FOUR[number // 7 % 7] else pytest.mark.slow)
    for number, name in enumerate(OTHERS) for layout in ON_FOUR if name != WITH_SKIPS and runs_under(name, layout)])
def test_a_peak_of_other_families_on_four_devices_is_what_was_forecast(name, layout):
    assert abs(off_by(name, layout)) < ALLOWED


@pytest.mark.parametrize("name, layout", [
    pytest.param(name, layout, marks=[] if (name, layout) == ("ltx-video-2b", "one") else pytest.mark.slow)
    for name in OTHERS for layout in FEW if runs_under(name, layout)])
def test_a_peak_of_both_branches_is_what_was_forecast(name, layout):
    assert abs(off_by(name, layout, branches=2)) < ALLOWED


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "latte-1" else pytest.mark.slow)
                                  for name in OTHERS if runs_under(name, "pipefusion2")
                                  and name != WITH_SKIPS])
def test_a_peak_of_a_stage_of_other_families_is_what_was_forecast(name):
    assert abs(off_by(name, "pipefusion2", blocks=None, ranks=(0, -1))) < ALLOWED


@pytest.mark.parametrize("layout", ["ulysses2-tensor2", *(
    pytest.param(layout, marks=pytest.mark.slow) for layout in ("ring2-tensor2", "displaced2-ulysses2",
                                                                "displaced2-tensor2"))])
def test_a_peak_where_tensor_parallelism_leaves_attention_whole_is_what_was_forecast(layout):
    """Of Hunyuan3D 2.1, whose heads are of numbers of all three projections."""
    assert abs(off_by("hunyuan3d-2.1", layout)) < ALLOWED


def test_it_notices_attention_that_is_taken_to_be_divided():
    def divided(dims, *given):
        return rank_memory(dataclasses.replace(dims, replicated_attention=False), *given)

    assert off_by("hunyuan3d-2.1", "ulysses2-tensor2", divided) < -0.1


@pytest.mark.slow
@pytest.mark.parametrize("name, layout, branches", [
    ("ace-step-1.5", "pipefusion2", 2), ("ace-step-1.5", "pipefusion4", 1), ("boogu-image", "pipefusion2", 2),
    ("boogu-image", "pipefusion4", 1)])
def test_a_peak_of_a_stage_where_most_lives_before_keys_are_kept_is_what_was_forecast(name, layout, branches):
    """Outside of the blocks, or in the first ones."""
    ranks = range(world_size_of(parse_layout(layout)))
    assert abs(off_by(name, layout, branches=branches, blocks=None, ranks=ranks)) < ALLOWED


# of each U-Net: layout, branches, size of the latent
UNET_NAMES = [name for name, model in PUBLISHED.items() if FAMILIES[model.family].plan.is_unet]
UNET_RUNS = [("one", 1, (64, 64)), ("one", 2, (128, 192)), ("displaced2", 1, (64, 64)), ("displaced2", 2, (64, 256)),
             ("displaced4", 1, (128, 128)), ("cfg2-displaced2", 2, (128, 96))]


@pytest.mark.parametrize("name, how", [
    pytest.param(name, how, marks=[] if (name, number) == ("sd1.5", 3) else pytest.mark.slow)
    for name in UNET_NAMES for number, how in enumerate(UNET_RUNS)
    if "displaced" not in how[0] or "displaced" not in FAMILIES[PUBLISHED[name].family].refused])
def test_a_peak_of_a_unet_is_what_was_forecast(name, how):
    (checkpoint, run), (layout_name, branches, sizes) = published(name), how
    run = dataclasses.replace(run, shape=(*run.shape[:2], *sizes), branches=branches)
    family, degrees = checkpoint.family, degrees_of(parse_layout(layout_name), ParallelConfig())

    model = build_empty(family, checkpoint.config)
    found = unet_run_memory(family, model, sizes, (run.shape[0], branches), degrees, torch.bfloat16,
                            num_tokens=run.conditioning.get("context", (0, 0))[1])

    peak_bytes = counted((checkpoint, run), layout_name, 0).peak_bytes
    assert abs((found.keys_values + found.activations) / peak_bytes - 1) < ALLOWED


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=[] if layout == "ulysses2" else pytest.mark.slow)
                                    for layout in FEW])
@pytest.mark.parametrize("blocks", [10, pytest.param(None, marks=pytest.mark.slow)])
def test_a_peak_of_a_model_with_skips_is_what_was_forecast(layout, blocks):
    assert abs(off_by(WITH_SKIPS, layout, blocks=blocks)) < ALLOWED


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=[] if layout == "pipefusion2" else pytest.mark.slow)
                                    for layout in STAGED])
def test_a_peak_of_a_stage_of_a_model_with_skips_is_what_was_forecast(layout):
    """The next stage is sent what its blocks and later ones read."""
    ranks = range(world_size_of(parse_layout(layout)))
    assert abs(off_by(WITH_SKIPS, layout, blocks=None, ranks=ranks)) < ALLOWED


def test_what_is_forecast_of_another_family_is_not_of_all():
    """By what is said of most models, Lumina 2 would have half of what it takes."""
    def plain(dims, *given):
        return rank_memory(dataclasses.replace(dims, footprint=None), *given)

    assert off_by("lumina-2", "one", plain) < -0.4


@pytest.mark.parametrize("name, layout", [
    pytest.param(name, layout, marks=[] if (name, layout) == ("flux.1-dev", "ring4") else pytest.mark.slow)
    for name, layout in itertools.product(TRANSFORMERS, ON_FOUR)
    if (name not in ALIKE or name == "wan2.1-14b-480p") and name != "wan2.1-14b-720p" and runs_under(name, layout)])
def test_a_peak_on_four_devices_is_what_was_forecast(name, layout):
    """Of both branches."""
    assert abs(off_by(name, layout, branches=2)) < ALLOWED


@pytest.mark.slow
@pytest.mark.parametrize("name, layout, branches", [
    (name, layout, 1 + number % 2) for number, (name, layout) in enumerate(itertools.product(TRANSFORMERS, STAGED))
    if name not in ALIKE])
def test_a_peak_of_a_stage_is_what_was_forecast(name, layout, branches):
    """With all blocks, whose keys and values fill up as the first step goes through them. One branch of guidance and
    both in turn."""
    assert abs(off_by(name, layout, branches=branches, blocks=None, ranks=(0, -1))) < ALLOWED


@pytest.mark.slow
def test_what_a_stage_has_cut_is_gone_where_most_lives():
    """With the stream of all tokens beside all blocks, more than Wan takes under Ulysses would be forecast."""
    def beside(dims, *given):
        return rank_memory(dataclasses.replace(dims, footprint=dataclasses.replace(dims.footprint, cut=0.0)), *given)

    assert off_by("wan2.1-14b-720p", "pipefusion2-ulysses2", beside, blocks=None, ranks=(0, -1)) > ALLOWED


def test_of_one_patch_no_keys_and_values_are_kept():
    """Nor forecast. Of the last stage, which sends no other one anything."""
    checkpoint, run = published("flux.1-dev")
    alone, by_two = (counted((checkpoint, dataclasses.replace(run, num_patches=patches)), "pipefusion2")
                     for patches in (1, 2))

    cached_bytes = forecast_of("flux.1-dev", "pipefusion2")[0].keys_values
    assert abs((by_two.cached_bytes - alone.cached_bytes) / cached_bytes - 1) < ALLOWED
    assert alone.peak_bytes < by_two.peak_bytes


# what a forward joins between its lists of blocks: 1 where all streams are gathered once more (docs/design/layouts.md)
JOINED = {"flux.1-dev": 0, "flux.2-dev": 1, "qwen-image": 0, "sd3.5-large": 0, "wan2.1-14b-720p": 0,
          "hunyuanvideo-1.5": 0}


@pytest.mark.parametrize("layout_name", ["ulysses2", "ring2", "ulysses2-ring2"])
@pytest.mark.parametrize("name", by_default(["flux.1-dev", "flux.2-dev"], JOINED))
def test_ulysses_and_ring_send_what_the_formula_says(name, layout_name):
    """Section 8, but for what tokens that are not a multiple of the ranks make uneven."""
    (dims, job), layout = net_and_job(name, layout_name), parse_layout(layout_name)
    ulysses, ring = layout.ulysses_degree, layout.ring_degree
    text, ranks = job.text if dims.joint else 0, ulysses * ring
    in_a_block = 4 * (job.tokens + text) / ranks * dims.width * (ulysses - 1) / ulysses \
        + 2 * (job.tokens + text) / ring * dims.width / ulysses * (ring - 1)
    once = (job.tokens + JOINED[name] * (job.tokens + text)) / ranks * dims.width * (ranks - 1)

    sent = counted(published(name), layout_name, 0).sent_bytes

    assert abs(sent / ((dims.blocks * in_a_block + once) * dims.element_bytes) - 1) < 1e-3


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "flux.1-dev" else pytest.mark.slow)
                                  for name in TRANSFORMERS if name not in ALIKE])
def test_weights_are_what_was_forecast_to_the_byte(name):
    """Of one device, and of the fullest stage of two and of four."""
    row = published(name, None)
    _, dims = forecast_of(name, "one", None)
    for stages in (1, 2, 4):
        degrees = degrees_of(parse_layout(f"pipefusion{stages}"), ParallelConfig())

        assert weight_bytes(dims, degrees) == max(_stage_weights(row, stages))


def _stage_weights(row, stages):
    table = table_of(row[0], spec_of(row[0], parse_layout(f"pipefusion{stages}")))
    return [table.rank_bytes(own_blocks(table, rank)) for rank in range(stages)]
