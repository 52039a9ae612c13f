"""IP-Adapters and PuLID in U-Nets on workers: what attention to the text gives with them is what diffusers' own
IP-Adapter gives, and a formula for PuLID, whole, on rows of each rank, and in compiled blocks."""

import pytest
import torch
from diffusers.image_processor import IPAdapterMaskProcessor
from torch._dynamo.utils import counters

import tests.support.reusing_backend  # noqa: F401
from tests.support.ip_adapter import places_of, show_images
from tests.support.model_zoo import example
from tests.support.ranks import run_ranks
from tests.support.tolerances import within
from xdit_backend.distributed.collectives import Traffic, all_gather
from xdit_backend.distributed.mesh import build_mesh
from xdit_backend.hooks import injected_networks
from xdit_backend.hooks.forward_context import CPU, ModelPatches
from xdit_backend.hooks.injected_networks import Network
from xdit_backend.hooks.unet import UNetHooks
from xdit_backend.parallel.displaced_exchange import Exchange
from xdit_backend.protocol.specs import ForwardOptions, Layout, NetworkSpec, NetworkUse

EXACT = 1e-10
ODD = {"rows": 23, "columns": 10}
WEIGHT = 1.3


def made(model):
    """(layers and tokens as show_pictures takes them, a mask)"""
    generator = torch.Generator().manual_seed(3)
    drawn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    layers = {place: [drawn(model.get_submodule(name).inner_dim, 24) / 5 for _ in "kv"]
              for name, place in sorted(places_of(model).items())}
    return layers, drawn(2, 4, 24), drawn(1, 1, 20, 31).sigmoid()


def network_of(model, layers, tokens, mask, shape, first=None):
    """The same as a worker holds it. first: of PuLID."""
    weights = {}
    for name, place in places_of(model).items():
        rows, columns = sizes_of(model, name, shape)
        shown = IPAdapterMaskProcessor.downsample(mask[0], 2, rows * columns, 1)[:1, :, 0]
        keys, values = ((tokens @ matrix.T)[:, None] for matrix in layers[place])
        weights |= {f"{place}.0.keys": keys, f"{place}.0.values": values * WEIGHT, f"{place}.0.mask": shown[None]}
        weights |= {} if first is None else {f"{place}.0.first": torch.tensor([first])}
    return NetworkUse("shown", "text", 1.0, rows=((0, 0), (1, 0))), Network(NetworkSpec("shown", {}), weights, CPU)


def sizes_of(model, name, shape):
    """Rows and columns of the image that an attention of a U-Net is in."""
    last = len(model.down_blocks) - 1
    side, number, *_ = name.split(".")
    level = last if side == "mid_block" else int(number) if side == "down_blocks" else last - int(number)
    return [-(-length // 2 ** level) for length in shape]


def on_ranks(rank, world_size, name, backend, mutant, first=None):
    """(the prediction without pictures, with them, graphs after each, breaks in them)"""
    torch.set_grad_enabled(False)
    if mutant:
        MUTANTS[mutant]()
    one = example(name, batch=2, **ODD)
    shown = network_of(one.model, *made(one.model), one.latent.shape[2:], first)
    hooks = UNetHooks(one.model, one.family.plan)
    loaded, mesh = one.loaded(hooks, range(0)), build_mesh(Layout(displaced_degree=world_size), world_size)
    exchange = Exchange(mesh.displaced_group, world_size, rank, 4096) if world_size > 1 else None
    results, graphs = [], []
    for shown_now in ((), (shown,)):
        context = loaded.context(mesh, Traffic(), one.latent, one.timestep, one.conditioning, exchange=exchange,
                                 options=ForwardOptions(compile_backend=backend),
                                 patches=ModelPatches(networks=shown_now))
        if exchange is None:
            out = hooks.run(context)[0]
        else:
            with exchange.call(context.traffic, False, True, "corrected_async_gn", one.timestep.max().item()):
                rows = hooks.run(context)[0]
            sizes = [end - start for start, end in zip(context.bands, context.bands[1:])]
            out = all_gather(rows, sizes, 2, mesh.displaced_group, Traffic())
        results.append(out)
        graphs.append(counters["stats"]["unique_graphs"])
    if exchange is not None:
        exchange.drain()
    return *results, graphs, dict(counters["graph_break"])


def errors(name, num_ranks, backend, mutant=""):
    """(the largest error against diffusers' own with pictures, and without; graphs of the first rank)"""
    (plain, shown, graphs, breaks), *others = run_ranks(on_ranks, num_ranks, name, backend, mutant, timeout_s=900)
    assert not breaks and all(torch.equal(shown, other) for _, other, *_ in others)
    one = example(name, batch=2, **ODD)
    without = one.run()
    layers, tokens, mask = made(one.model)
    show_images(one.model, layers, tokens, WEIGHT, mask)
    wanted = one.run()
    assert (wanted - without).abs().max() > 1e-3
    return (shown - wanted).abs().max().item(), (plain - without).abs().max().item(), graphs


@pytest.mark.parametrize("name, num_ranks, backend", [
    ("SDXL", 2, ""), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("SDXL", 1, "reusing"), ("SDXL", 2, "reusing"), ("SD 1.5", 1, ""), ("SD 1.5", 3, ""),
        ("SD 2", 2, "reusing"), ("SD x4 upscaler", 2, "")))], ids=str)
def test_images_are_seen_as_diffusers_shows_them(name, num_ranks, backend):
    """Compiled blocks keep their graphs, which do not know of pictures."""
    with_images, without, graphs = errors(name, num_ranks, backend)

    within(with_images, EXACT)
    within(without, EXACT)
    assert graphs[0] == graphs[1] if num_ranks == 1 or not backend else graphs[1] <= 2 * graphs[0]
    assert bool(graphs[0]) == bool(backend)


def masks_of_the_first_rows():
    injected_networks._own_tokens = lambda context, level, tokens: slice(0, tokens)


def sums_of_own_rows():
    injected_networks._add_up = lambda context, tensors: tensors


def images_of_the_other_prompt():
    def of_rows(self, name, rows, dtype, right=Network._of_rows):
        return right(self, name, rows if name.endswith("mask") else rows[::-1], dtype)
    Network._of_rows = of_rows


def no_operator():
    def attention_of_graph(self, query, key, value, mask, name, *more, right=UNetHooks.attention_of_graph):
        return right(self, query, key, value, mask, "" if name == "attn2" else name, *more)
    UNetHooks.attention_of_graph = attention_of_graph


MUTANTS = {mutant.__name__: mutant for mutant in (masks_of_the_first_rows, sums_of_own_rows,
                                                  images_of_the_other_prompt, no_operator)}


@pytest.mark.parametrize("mutant", ["masks_of_the_first_rows", *(
    pytest.param(mutant, marks=pytest.mark.slow) for mutant in ("images_of_the_other_prompt", "no_operator"))])
def test_exactness_notices_a_broken_part(mutant):
    with_images, without, _ = errors("SDXL", 2, "reusing" if mutant == "no_operator" else "", mutant)

    assert with_images > 1e-6
    within(without, EXACT)


@pytest.mark.parametrize("name, num_ranks, backend, mutant", [
    ("SDXL", 2, "", ""), ("SDXL", 2, "", "sums_of_own_rows"), *(
        pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("SDXL", 1, "reusing", ""), ("SDXL", 2, "reusing", ""), ("SD 1.5", 3, "", "")))], ids=str)
def test_faces_are_seen_alike_in_rows_and_whole(name, num_ranks, backend, mutant):
    """What goes along the text is taken out, but for what the first three tokens of the picture keep. Whole and as it
    is written the formula is held by tests/integration/sampling/test_pulid.py."""
    whole, = run_ranks(on_ranks, 1, name, "", "", 3, timeout_s=900)
    rows = run_ranks(on_ranks, num_ranks, name, backend, mutant, 3, timeout_s=900)[0]
    added, = run_ranks(on_ranks, 1, name, "", "", timeout_s=900)

    error = (rows[1] - whole[1]).abs().max().item()
    if mutant:
        assert error > 1e-6
    else:
        within(error, EXACT)
    assert (whole[1] - added[1]).abs().max() > 1e-3
