"""Compiled blocks of U-Nets under displaced patches: the ranks together are the oracle, each kind of block has one
graph or two, and a graph that asks wrongly is seen."""

import itertools
import types

import pytest
import torch
from torch._dynamo.utils import counters

import tests.support.reusing_backend  # noqa: F401
import tests.unit.parallel.test_displaced as displaced
from tests.support.model_zoo import example
from tests.support.ranks import run_ranks
from tests.support.tiers import by_default
from tests.support.tolerances import within
from tests.unit.parallel.test_displaced import ODD, SMALL, predicted, sample, simulated
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import build_mesh, with_speeds
from xdit_backend.distributed.spatial_ops import Padding, num_rows_read
from xdit_backend.hooks.unet import UNetHooks
from xdit_backend.parallel.displaced import StaleSplit
from xdit_backend.parallel.displaced_exchange import Exchange
from xdit_backend.partition import unet_blocks
from xdit_backend.protocol.specs import MODES, Layout

EXACT = 1e-10
NUM_CALLS = 8                  # of Heun's method over the sigmas


def on_ranks(rank, world_size, name, shape, mode, speeds, mutant):
    """The latent that the ranks together make by Heun's method, how many graphs there were after each call, and breaks
    in them."""
    torch.set_grad_enabled(False)
    if mutant is not None:
        MUTANTS[mutant]()
    mesh = with_speeds(build_mesh(Layout(displaced_degree=world_size), world_size), speeds)
    one, graphs = example(name, **shape), []
    loaded = one.loaded(UNetHooks(one.model, one.family.plan), range(0))
    exchange = Exchange(mesh.displaced_group, world_size, rank, 4096)

    def predict(*args):
        output = predicted(loaded, mesh, exchange, one.conditioning, MODES[mode], set(), "reusing", *args)
        graphs.append(counters["stats"]["unique_graphs"])
        return output
    latent = sample(predict, one.latent, 1, heun=1)
    exchange.drain()
    return latent, graphs, dict(counters["graph_break"])


def check(name, starts, shape, mode="corrected_async_gn", speeds=(), mutant=None):
    """(error against the oracle, error against the one model, [graphs of a rank after each call])"""
    on_all = run_ranks(on_ranks, len(starts) - 1, name, shape, mode, speeds, mutant, timeout_s=1800)
    assert all(torch.equal(on_all[0][0], latent) for latent, *_ in on_all)
    assert not any(breaks for *_, breaks in on_all)
    oracle, model = simulated(name, starts, shape, 1, 1, mode, 0.0)
    errors = ((on_all[0][0] - other).abs().max().item() for other in (oracle, model))
    return *errors, [graphs for _, graphs, _ in on_all]


@pytest.mark.parametrize("name, shape, speeds, starts, mode", [
    ("SDXL", SMALL, (), (0, 8, 16), "corrected_async_gn"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
     ("SD 1.5", SMALL, (), (0, 8, 16), "sync_gn"),
     ("SDXL", ODD, (5, 1, 2), (0, 16, 20, 23), "stale_gn"),
     ("SD 2", SMALL, (), (0, 8, 16), "corrected_async_gn"), ("SD x4 upscaler", SMALL, (), (0, 8, 16), "stale_gn"),
     ("Stable Video Diffusion", SMALL, (), (0, 8, 16), "corrected_async_gn"),
     # one row at the last level
     ("SD 1.5", {"rows": 17, "columns": 9}, (), (0, 8, 16, 17), "separate_gn")])], ids=str)
def test_compiled_blocks_equal_the_oracle(name, shape, speeds, starts, mode):
    """A step whose rows are all fresh, and three steps of stale ones. No graph is made after the second call, the first
    that knows what the text gives; blocks of one kind share one."""
    of_oracle, of_model, graphs = check(name, starts, shape, mode, speeds)
    num_blocks = len(unet_blocks(example(name).model))

    within(of_oracle, EXACT)
    assert of_model > 1e-6
    for of_rank in graphs:
        assert len(of_rank) == NUM_CALLS and 0 < of_rank[0] <= of_rank[1] == of_rank[-1] < num_blocks


def attention_of_own_rows():
    def attention_of_graph(self, query, key, value, mask, name, *more, right=UNetHooks.attention_of_graph):
        return right(self, query, key, value, mask, "", *more)
    UNetHooks.attention_of_graph = attention_of_graph


MUTANTS = displaced.MUTANTS | {"attention_of_own_rows": attention_of_own_rows}


@pytest.mark.parametrize("mutant", by_default(["attention_of_own_rows"], [
    "attention_of_own_rows", "zeros_for_halos", "even_shares", "no_correction"]))
def test_exactness_notices_a_broken_part(mutant):
    of_oracle, *_ = check("SDXL", (0, 12, 20), {"rows": 20, "columns": 6}, mutant=mutant)

    assert of_oracle > 1e-6


def test_a_graph_is_of_the_rows_of_its_rank():
    """What graphs are told of a convolution's rows, beside what StaleSplit.around reads."""
    bands = (0, 8, 16), (0, 4, 8, 9), (0, 16, 20, 23)
    for starts, backend, stride, padding in itertools.product(bands, (1, 3), (1, 2), (0, 1)):
        for rank in range(len(starts) - 1):
            exchange = types.SimpleNamespace(rank=rank)
            split = StaleSplit(starts, None, Traffic(), exchange=exchange, key="")
            _, _, pieces = split._reading(torch.empty(1, 1, split.size, 1), backend, stride, Padding(padding, padding))

            assert num_rows_read(starts, rank, backend, stride, Padding(padding, padding)) == sum(
                end - first if zeros is None else zeros.shape[2] for _, first, end, zeros in pieces)
