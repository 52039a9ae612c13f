"""Blocks as torch.compile makes them: every family under every method gives what it gives as it is, each kind of block
has one graph, and what cannot be compiled is refused in words."""

import pytest
import torch
from torch._dynamo.utils import counters

from tests.models.zoo import CONFIGS, example
from tests.tolerances import within
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import SINGLE
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.parallel.key_values import KeyValues

EXACT = 1e-12
ROUNDED = 1e-5                 # where models of tensor shards round to float32 within, which tests else keep from them
# its experts are chosen by numbers on the device, which no graph can be made for
REFUSED = "HiDream-I1"
DRAWN = ("Flux.1", "Wan", "Qwen-Image", "SD3", "Z-Image")
METHODS = ("plain", "kept")


@pytest.fixture(autouse=True)
def _no_graphs():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def forward(one, hooks, backend="eager", latent=None, timestep=None, patch=None, **keeping):
    context = one.loaded(hooks).context(SINGLE, Traffic(), one.latent if latent is None else latent,
                                        one.timestep if timestep is None else timestep, one.conditioning, patch,
                                        **keeping)
    context.compile_backend = backend
    return hooks.run(context)[0]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in DRAWN else pytest.mark.slow)
                                  for name in CONFIGS if name != REFUSED])
@pytest.mark.parametrize("method", METHODS)
def test_blocks_have_one_graph_a_kind_and_compute_the_same(name, method):
    """Three forwards; with keys and values kept, modules that are evaluated once a step are made once and found twice.
    No graph is made after the second."""
    one = example(name)
    wanted, hooks = one.run(), Hooks(one.model, one.family.plan)
    keeping = {} if method == "plain" else {"key_values": KeyValues(), "first_image": 0, "num_images": 1}
    graphs = []
    for _ in range(3):
        out = forward(one, hooks, **keeping)
        within((one.family.prediction(out, one.latent) - wanted).abs().max().item(), EXACT)
        graphs.append(counters["stats"]["unique_graphs"])

    kinds = len({(type(block), list_.name) for list_ in one.family.plan.lists
                 for block in one.model.get_submodule(list_.name)})
    assert graphs[0] > 0 and graphs[1] == graphs[2] <= 2 * (kinds + 2) and not counters["graph_break"]
