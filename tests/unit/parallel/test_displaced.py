"""Displaced patches: the ranks together are the oracle, synchronous calls are the model;
with a broken part they are not."""

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist

import tests.support.reusing_backend  # noqa: F401
import xdit_backend.hooks.unet as row_hooks
import xdit_backend.parallel.displaced as displaced
import xdit_backend.parallel.displaced_exchange as exchange_module
from tests.support.displaced_oracle import StaleTransformer, StaleUNet
from tests.support.model_zoo import ALIKE, example, having, hold_share
from tests.support.ranks import run_ranks
from tests.support.tiers import by_default
from tests.support.tolerances import unrounded, within
from xdit_backend.checkpoints.model_dims import exchanged_bytes
from xdit_backend.config import ParallelConfig
from xdit_backend.distributed.collectives import Traffic, all_gather
from xdit_backend.distributed.mesh import build_mesh, with_speeds
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.hooks.unet import UNetHooks
from xdit_backend.parallel.displaced import StaleSplit, corrected_moments, correction_of, image_moments
from xdit_backend.parallel.displaced_exchange import Exchange, fill_buckets
from xdit_backend.parallel.vae_memory import ActivationBytes
from xdit_backend.partition import attended, cut_bands, halved
from xdit_backend.planner.cost_model import Degrees, Job, ModelDims
from xdit_backend.planner.memory_model import rank_memory
from xdit_backend.planner.planner import memory_settings
from xdit_backend.protocol.specs import MODES, ForwardOptions, Layout
from xdit_backend.worker.models import Loaded

EXACT = 1e-10
SIGMAS = [1.0, 0.8, 0.55, 0.3, 0.1]
ALL = len(SIGMAS)


def sample(predict, x, warmup_steps, heun=False, scale=1000.0):
    """Euler or Heun steps. predict(x, timestep, is_stale); a call is synchronous while its sigma is above
    sigmas[warmup_steps].

    heun: where in a step its second call is made: 0 there is none, 1 (Heun's method) at its end, at the time of the
    next one's first.
    """
    def velocity(x, sigma):
        is_stale = bool(calls) and warmup_steps < len(SIGMAS) and sigma <= SIGMAS[warmup_steps]
        calls.append(is_stale)
        return predict(x, torch.full((x.shape[0],), scale * sigma, dtype=x.dtype), is_stale)

    calls = []
    for sigma, following in zip(SIGMAS, SIGMAS[1:]):
        change = velocity(x, sigma)
        if heun:
            reached = sigma + heun * (following - sigma)
            change = change + (velocity(stepped(x, reached - sigma, change), reached) - change) / (2 * heun)
        x = stepped(x, following - sigma, change)
    return x


def stepped(x, length, change):
    """Images next to the latent stay as they are."""
    return torch.cat([x[:, :change.shape[1]] + length * change, x[:, change.shape[1]:]], 1)


def simulated(name, starts, shape, warmup_steps, heun, mode, extrapolation):
    """(the oracle's latent, the one model's own). starts: the first row of each rank, and their number."""
    one = example(name, **shape)
    stale = StaleUNet(one.model, list(zip(starts, starts[1:])), mode, extrapolation)

    def oracle(x, timestep, is_stale):
        return stale.predict(is_stale and mode != "full_sync",
                             **one.family.forward_arguments(x, timestep, one.conditioning, one.config))

    def model(x, timestep, is_stale):
        arguments = one.family.forward_arguments(x, timestep, one.conditioning, one.config)
        return one.model(**arguments, return_dict=False)[0]
    return sample(oracle, one.latent, warmup_steps, heun), sample(model, one.latent, warmup_steps, heun)


def on_ranks(rank, world_size, name, cases, mutant=None, speeds=(), extrapolation=0.0, backend=""):
    """The latents that the ranks together make, one for each case, on one model; what the exchanges were like; how many
    modules of each kind have hooks; and how often the text was projected in each case."""
    torch.set_grad_enabled(False)
    if mutant is not None:
        MUTANTS[mutant]()
    mesh = with_speeds(build_mesh(Layout(displaced_degree=world_size), world_size), speeds)
    one = example(name, **cases[0][0])
    projected = count_projections(one)
    hooks = UNetHooks(one.model, one.family.plan)
    loaded = one.loaded(hooks, range(0))
    results, seen, projections = [], [], []
    for shape, warmup_steps, heun, mode_name, bucket_bytes in cases:
        projected.clear()
        given, mode = example(name, **shape), MODES[mode_name]
        exchange, addresses = Exchange(mesh.displaced_group, world_size, rank, bucket_bytes, extrapolation), set()

        predict = functools.partial(predicted, loaded, mesh, exchange, given.conditioning, mode, addresses, backend)
        results.append(sample(predict, given.latent, warmup_steps, heun))
        seen.append((exchange.num_in_flight, len(addresses), len(exchange.addresses), len(exchange.once),
                     exchange.num_bytes, len(exchange.layers)))
        exchange.drain()
        assert exchange.num_in_flight == 0
        projections.append(len(projected))
    return results, seen, hooks.counts, projections


def count_projections(one):
    """A list that grows by the name of a module whenever it projects the text; placed before the hooks."""
    projected = []

    def counted(forward, name):
        return lambda *args, **kwargs: (projected.append(name), forward(*args, **kwargs))[1]
    for name, what in attended(one.model).items():
        if what == "text":
            attention = one.model.get_submodule(name)
            for which in ("to_k", "to_v"):
                module = attention.get_submodule(which)
                module.forward = counted(module.forward, f"{name}.{which}")
    return projected


def predicted(loaded, mesh, exchange, conditioning, mode, addresses, backend, x, timestep, is_stale):
    """The ranks' rows of a prediction, put together. addresses: of the exchange's buckets are added."""
    stale = is_stale and mode.is_stale
    context = loaded.context(mesh, Traffic(), x, timestep, conditioning, exchange=exchange,
                             options=ForwardOptions(compile_backend=backend))
    with exchange.call(context.traffic, stale, mode.publishes or not stale, mode.norms, timestep.max().item()):
        rows = loaded.hooks.run(context)[0]
    addresses.add(tuple(exchange.addresses))
    sizes = [end - start for start, end in zip(context.bands, context.bands[1:])]
    return all_gather(rows, sizes, 2, mesh.displaced_group, Traffic())


def check(name, starts, cases, mutant=None, speeds=(), extrapolation=0.0, backend=""):
    """[(error against the oracle, against the one model)] of each case.
    starts: the bands, which the ranks have to find by themselves."""
    on_all = run_ranks(on_ranks, len(starts) - 1, name, cases, mutant, speeds, extrapolation, backend, timeout_s=1800)
    errors = []
    for index, (shape, warmup_steps, heun, mode, _) in enumerate(cases):
        result = on_all[0][0][index]
        assert all(torch.equal(result, other[0][index]) for other in on_all)
        oracle, single = simulated(name, starts, shape, warmup_steps, heun, mode, extrapolation)
        errors.append(((result - oracle).abs().max().item(), (result - single).abs().max().item()))
    return errors


SMALL, ODD = {"rows": 16, "columns": 12}, {"rows": 23, "columns": 13, "batch": 2}


@pytest.mark.parametrize("mode", by_default(["corrected_async_gn"], MODES))
def test_every_mode_equals_the_oracle(mode):
    """Two ranks; what is not synchronous differs from the one model."""
    (of_oracle, of_model), = check("SDXL", (0, 8, 16), [(SMALL, 1, False, mode, 4096)])

    within(of_oracle, EXACT)
    assert of_model < EXACT if mode == "full_sync" else of_model > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name, shape, speeds, starts", [
    ("SDXL", ODD, (), (0, 8, 16, 23)), ("SD 1.5", {"rows": 24, "columns": 9}, (1, 2), (0, 8, 24)),
    ("SDXL", ODD, (5, 1, 2), (0, 16, 20, 23)),
    # one row at the last level
    pytest.param("SD 1.5", {"rows": 17, "columns": 9}, (), (0, 8, 16, 17), marks=pytest.mark.slow),
    pytest.param("SD 2", {"rows": 37, "columns": 19}, (), (0, 16, 32, 37), marks=pytest.mark.slow),
    # the first attention of its upper levels reads the text
    pytest.param("SD x4 upscaler", {"rows": 21, "columns": 11}, (), (0, 16, 21)),
    # norms of whole videos, and attention along frames
    pytest.param("Stable Video Diffusion", {"rows": 13, "columns": 10}, (), (0, 8, 13))], ids=str)
def test_uneven_and_odd_bands_equal_the_oracle(name, shape, speeds, starts):
    """Of ranks that are alike or not. Euler and Heun, one warm-up step and two, and all: that is the one model. Runs
    follow one another on the same hooks."""
    cases = [(shape, 1, False, "corrected_async_gn", 1 << 21), (shape, 2, True, "corrected_async_gn", 1),
             (shape, ALL, False, "corrected_async_gn", 1 << 14)]

    errors = check(name, starts, cases, speeds=speeds)

    within(max(of_oracle for of_oracle, _ in errors), EXACT)
    within(errors[-1][1], EXACT)
    assert min(of_model for _, of_model in errors[:-1]) > 1e-6


def test_runs_of_other_sizes_do_not_meet():
    """The same latent before and after another run on the same model; buckets of any size;
    nothing moves, nothing is left under way."""
    cases = [(SMALL, 1, False, "corrected_async_gn", 1 << 14),
             ({"rows": 8, "columns": 6}, 1, False, "stale_gn", 1 << 21),
             (SMALL, 1, False, "corrected_async_gn", 1)]

    results, seen, counts, projections = run_ranks(on_ranks, 2, "SDXL", cases, timeout_s=1800)[0]

    assert torch.equal(results[0], results[2])
    assert [addresses for _, addresses, *_ in seen] == [1, 1, 1]
    assert [in_flight == buckets > 0 for in_flight, _, buckets, *_ in seen] == [True] * 3
    # One layer a level on the way down and two on the way up, of no, one and two blocks; two blocks in the middle.
    assert (counts["self-attention"] == 3 * 1 + 3 * 2 + 2
            and counts["of text"] == seen[0][3] == 2 * counts["self-attention"])
    assert projections == [counts["of text"]] * 3              # once a run, however many calls
    in_rows = counts["convolution"] + counts["group norm"] + counts["self-attention"]
    assert [seen_layers for *_, seen_layers in seen] == [in_rows] * 3          # each of them has worked on rows


@pytest.mark.parametrize("name, attending", [("SDXL", 2), ("SD 1.5", 3), ("SD 2", 3), ("SD x4 upscaler", 3)])
def test_every_convolution_and_norm_has_a_hook(name, attending):
    """As many as the structure has. attending: levels that attend, in each layer on the way down and on the way up."""
    one = example(name)
    # of a level, on both ways
    levels, layers = len(one.config["block_out_channels"]), 2 * one.config["layers_per_block"] + 1
    # each with two convolutions and norms; each with a norm
    residual, attention = layers * levels + 2, layers * attending + 1

    counts = UNetHooks(one.model, one.family.plan).counts

    # to the next level and back; the first and the last
    assert counts["convolution"] == 2 * residual + 2 * (levels - 1) + 2
    assert counts["group norm"] == 2 * residual + attention + 1                # and the last


def test_text_that_is_projected_in_every_call_is_noticed():
    cases = [(SMALL, 1, False, "corrected_async_gn", 4096)]

    _, _, counts, projections = run_ranks(on_ranks, 2, "SDXL", cases, "text_of_every_call", timeout_s=1800)[0]

    assert projections == [counts["of text"] * (len(SIGMAS) - 1)]


@pytest.mark.parametrize("name, num_ranks, shape", [
    ("SDXL", 3, ODD), ("SD 1.5", 2, {"rows": 17, "columns": 9}),
    *(pytest.param(name, 2, {"rows": 17, "columns": 9}, marks=pytest.mark.slow)
      for name in ("SD x4 upscaler", "Stable Video Diffusion"))])
def test_what_is_kept_is_the_formula_to_the_byte(name, num_ranks, shape):
    """And with it what is sent: a row of every bucket, to all others."""
    on_all = run_ranks(on_ranks, num_ranks, name, [(shape, 1, False, "corrected_async_gn", 4096)], timeout_s=1800)
    one = example(name, **shape)
    told = exchanged_bytes(one.model, (shape["rows"], shape["columns"]), num_ranks, torch.float64, len(one.latent))

    assert [seen[0][4] for _, seen, *_ in on_all] == [num_ranks * told] * num_ranks


def peak_of_first_call(rank, world_size, net, tokens, bucket_bytes, extrapolation):
    """(the most that lived in a call in which keys and values of each block are told first, what was kept of it)"""
    exchange = Exchange(dist.group.WORLD, world_size, rank, bucket_bytes, extrapolation)
    shape = 2, 1, net.heads, tokens // world_size, net.width // net.heads
    with ActivationBytes() as live, exchange.call(Traffic(), False):
        for block in range(net.blocks):
            exchange.share(block, torch.ones(shape, dtype=torch.bfloat16), [shape] * world_size)
    return live.peak_bytes, exchange.num_bytes


@pytest.mark.parametrize("extrapolation", [0.0, 0.5])
@pytest.mark.parametrize("layers", [0.5, 3.5], ids=["a bucket each", "three a bucket"])
def test_what_a_first_call_holds_is_what_a_run_is_refused_by(layers, extrapolation):
    """But for a bucket and a layer that are on their way.
    What is told is not held beside the buckets that are made of it."""
    net, degrees, config = ModelDims(40, 64, 4, 12.0,
                               1e6), Degrees(displaced=2), ParallelConfig(forecast_keys_values=extrapolation)
    a_block = 2 * 100 * net.width * net.element_bytes
    counted = rank_memory(net, Job(100, 0, 20), degrees, memory_settings(config)).keys_values

    for peak_bytes, cached_bytes in run_ranks(peak_of_first_call, 2, net, 100, int(layers * a_block / 2),
                                              extrapolation):
        assert cached_bytes == counted == (1 + (extrapolation > 0)) * net.blocks * a_block
        assert cached_bytes <= peak_bytes <= counted + 4 * a_block


def transformer_on_ranks(rank, world_size, name, layout, shape, mutant, speeds, backend=""):
    """The latents of two runs, with one warm-up step (Heun's method) and with all,
    that the ranks of a transformer make."""
    torch.set_grad_enabled(False)
    if mutant is not None:
        MUTANTS[mutant]()
    mesh, one, results = with_speeds(build_mesh(layout, world_size), speeds), example(name, **shape), []
    hooks = Hooks(one.model, one.family.plan,
                  hold_share(one.model, one.family.plan, layout.tensor_degree, mesh.ranks["tensor"]))
    loaded = one.loaded(hooks)
    for warmup_steps in (1, ALL):
        exchange = Exchange(mesh.displaced_group, layout.displaced_degree, mesh.ranks["displaced"], 4096)
        predict = functools.partial(predicted_whole, loaded, mesh, exchange, one.conditioning, backend)
        with unrounded(layout.tensor_degree):
            results.append(sample(predict, one.latent, warmup_steps, heun=warmup_steps == 1,
                                  scale=one.family.inputs.time_scale))
        exchange.drain()
    return results


def predicted_whole(loaded, mesh, exchange, conditioning, backend, x, timestep, is_stale):
    context = loaded.context(mesh, Traffic(), x, timestep, conditioning, exchange=exchange,
                             options=ForwardOptions(compile_backend=backend))
    with exchange.call(context.traffic, is_stale, time=timestep.max().item()):
        return loaded.family.prediction(loaded.hooks.run(context)[0], x)[:, :x.shape[1]]


def check_transformer(name, layout, shape, mutant=None, speeds=(), shards=None, backend=""):
    """Errors of a displaced run against the oracle, of a synchronous one and of it against the model.
    shards: as the oracle's."""
    num_shards = layout.displaced_degree * layout.ring_degree * layout.ulysses_degree
    (displaced_, synchronous), *others = run_ranks(transformer_on_ranks, num_shards * layout.tensor_degree, name,
                                                   layout, shape, mutant, speeds, backend, timeout_s=1800)
    one, stale = example(name, **shape), StaleTransformer(example(name, **shape), layout.displaced_degree, num_shards,
                                                          shards)

    def model(x, timestep, is_stale):
        one.latent, one.timestep = x, timestep
        return one.run()[:, :x.shape[1]]
    with unrounded(layout.tensor_degree):
        oracle = sample(lambda x, timestep, is_stale: stale.predict(x, timestep, is_stale)[:, :x.shape[1]],
                        stale.example.latent, 1, True, one.family.inputs.time_scale)
        single = [sample(model, example(name, **shape).latent, ALL, heun, one.family.inputs.time_scale)
                  for heun in (False, True)]
    assert all(torch.equal(displaced_, other[0]) for other in others)
    return [(a - b).abs().max().item()
            for a, b in ((displaced_, oracle), (synchronous, single[0]), (displaced_, single[1]))]


TRANSFORMER = {"rows": 12, "columns": 6, "num_text_tokens": 7}


@pytest.mark.parametrize("name, layout", [
    ("SD3", Layout(displaced_degree=3)), ("Flux.1", Layout(displaced_degree=2)),
    ("PixArt-Sigma", Layout(displaced_degree=2)),
    *(pytest.param(name, Layout(displaced_degree=2), marks=pytest.mark.slow) for name in having("displaced")
      if name not in ("SD3", "Flux.1", "PixArt-Sigma", *ALIKE)),
    pytest.param("SD3", Layout(displaced_degree=2, ulysses_degree=2), marks=pytest.mark.slow),
    pytest.param("Flux.1", Layout(displaced_degree=2, ring_degree=2), marks=pytest.mark.slow),
    pytest.param("Flux.1", Layout(displaced_degree=2, tensor_degree=2), marks=pytest.mark.slow, id="Flux.1-x-tensor")],
                         ids=str)
def test_transformers_equal_the_oracle(name, layout):
    """Image and text tokens of other ranks are as they were a call before; Ulysses and Ring share out a rank's part,
    tensor ranks have their heads' keys and values."""
    of_oracle, of_model, displaced_of_model = check_transformer(name, layout, TRANSFORMER)

    within(of_oracle, EXACT)
    within(of_model, EXACT)
    assert displaced_of_model > 1e-6


@pytest.mark.parametrize("name", by_default(["PixArt-Sigma"], ["PixArt-Sigma", "SD3", "Flux.1"]))
def test_compiled_blocks_send_what_their_graphs_then_overwrite(name):
    """As inductor's graphs do; what an exchange keeps for the next call is a copy."""
    of_oracle, of_model, displaced_of_model = check_transformer(name, Layout(displaced_degree=2), TRANSFORMER,
                                                                backend="reusing")

    within(of_oracle, EXACT)
    within(of_model, EXACT)
    assert displaced_of_model > 1e-6


@pytest.mark.parametrize("name, layout, num_text_tokens, speeds, shards", [
    ("SD3", Layout(displaced_degree=3), 2, (5, 1, 2), {"image": (12, 2, 4), "text": (2, 0, 0)}),
    ("SD3", Layout(displaced_degree=3), 2, (), {"image": (6, 6, 6), "text": (1, 1, 0)}),
    ("Flux.1", Layout(displaced_degree=2), 7, (1, 3), {"image": (4, 14), "text": (2, 5)}),
    pytest.param("SD3", Layout(displaced_degree=2, ulysses_degree=2), 7, (3, 1, 3, 1),
                 {"image": (7, 2, 7, 2), "text": (3, 1, 3, 0)}, marks=pytest.mark.slow)], ids=str)
def test_uneven_shards_equal_the_oracle(name, layout, num_text_tokens, speeds, shards):
    """Ranks that are not alike, and more of them than tokens of the text."""
    shape = {**TRANSFORMER, "num_text_tokens": num_text_tokens}

    of_oracle, of_model, displaced_of_model = check_transformer(name, layout, shape, speeds=speeds, shards=shards)

    within(of_oracle, EXACT)
    within(of_model, EXACT)
    assert displaced_of_model > 1e-6


@pytest.mark.parametrize("mode", ["corrected_async_gn", pytest.param("sync_gn", marks=pytest.mark.slow)])
def test_a_unet_foretells_keys_and_values_as_the_oracle_does(mode):
    """And neither halos nor moments; calls at one time and between steps."""
    errors = check("SDXL", (0, 8, 16), [(SMALL, 1, second, mode, 4096) for second in (0, 1, 0.5)],
                   extrapolation=FORECAST)

    within(max(of_oracle for of_oracle, _ in errors), EXACT)


FORECAST = 0.6
FORETOLD = [(0, 0), (1, 0), (2, 1), (1, 0.5), (ALL, 0)]        # warm-up steps, and where in a step a second call is


def extrapolated_on_ranks(rank, world_size, name, layout, shape, mutant):
    """The latents of all cases, that the ranks make one after the other on one model; bytes kept in the last but one;
    addresses of each."""
    torch.set_grad_enabled(False)
    if mutant is not None:
        MUTANTS[mutant]()
    mesh, one, results, cached, addresses = build_mesh(layout, world_size), example(name, **shape), [], [], []
    hooks = Hooks(one.model, one.family.plan)
    loaded = one.loaded(hooks)
    for warmup_steps, second in FORETOLD:
        exchange = Exchange(mesh.displaced_group, layout.displaced_degree, mesh.ranks["displaced"], 4096, FORECAST)
        predict, seen = functools.partial(predicted_whole, loaded, mesh, exchange, one.conditioning, ""), set()

        def noted(x, timestep, is_stale, predict=predict, exchange=exchange, seen=seen):
            result = predict(x, timestep, is_stale)
            seen.add(tuple(exchange.addresses))
            return result
        results.append(sample(noted, one.latent, warmup_steps, second, one.family.inputs.time_scale))
        exchange.drain()
        cached.append(exchange.num_bytes)
        addresses.append(len(seen))
    return results, cached, addresses


def of_latent(predict, x, timestep, is_stale):
    return predict(x, timestep, is_stale)[:, :x.shape[1]]


def check_extrapolated(name, layout, mutant=None):
    """([(error against the oracle, against the oracle without a forecast, against the model) of each case],
    what is kept)"""
    num_shards = layout.displaced_degree * layout.ring_degree * layout.ulysses_degree
    (results, cached, addresses), *others = run_ranks(extrapolated_on_ranks, num_shards, name, layout, TRANSFORMER,
                                                    mutant, timeout_s=1800)
    assert all(torch.equal(a, b) for other in others for a, b in zip(results, other[0])) and set(addresses) == {1}
    one, errors = example(name, **TRANSFORMER), []

    def model(x, timestep, is_stale):
        one.latent, one.timestep = x, timestep
        return one.run()[:, :x.shape[1]]
    for (warmup_steps, second), result in zip(FORETOLD, results):
        given = example(name, **TRANSFORMER)
        oracles = [StaleTransformer(example(name, **TRANSFORMER), layout.displaced_degree, num_shards,
                                    extrapolation=strength).predict
                   for strength in (FORECAST, 0.0)]
        wanted = [sample(functools.partial(of_latent, predict), given.latent, warmup_steps, second,
                         given.family.inputs.time_scale)
                  for predict in (*oracles, model)]
        errors.append(tuple((result - each).abs().max().item() for each in wanted))
    return errors, cached


@pytest.mark.parametrize("name, layout", [
    ("SD3", Layout(displaced_degree=2)), ("Flux.1", Layout(displaced_degree=3)),
    pytest.param("PixArt-Sigma", Layout(displaced_degree=4), marks=pytest.mark.slow),
    pytest.param("Wan", Layout(displaced_degree=2), marks=pytest.mark.slow),
    pytest.param("SD3", Layout(displaced_degree=2, ulysses_degree=2), marks=pytest.mark.slow),
    pytest.param("Flux.1", Layout(displaced_degree=2, ring_degree=2), marks=pytest.mark.slow)], ids=str)
def test_foretold_keys_and_values_equal_the_oracle(name, layout):
    """After one call, after two, with calls at one time and between steps.
    There is no slope, or nothing stale, where all is as without."""
    errors, cached = check_extrapolated(name, layout)

    within(max(of_oracle for of_oracle, _, _ in errors), EXACT)
    within(errors[-1][2], EXACT)
    assert min(without for _, without, _ in errors[:-1]) > 1e-6 and cached[0] == cached[-1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mutant",
                         ["forecast_in_calls_not_in_time", "forecast_of_a_forecast", "sides_that_never_change"])
def test_a_wrong_forecast_is_noticed(mutant):
    errors, _ = check_extrapolated("SD3", Layout(displaced_degree=2), mutant)

    assert max(of_oracle for of_oracle, _, _ in errors) > 1e-6


def told_at_times(rank, world_size, extrapolation):
    """(What each call knows of the other rank's value of a layer that drifts, and of one that does not, bytes kept).

    Both tell 1, 2, 4 and 5 at times 3, 2, 1 and 1; the calls after the first are stale.
    """
    exchange, known = Exchange(torch.distributed.group.WORLD, world_size, rank, 64, extrapolation), []
    for value, time in ((1.0, 3.0), (2.0, 2.0), (4.0, 1.0), (5.0, 1.0)):
        with exchange.call(Traffic(), bool(known), time=time):
            known.append([exchange.share(key, torch.full((8,), value), [(8,)] * world_size,
                                         key == "drifts")[1 - rank][0].item()
                          for key in ("drifts", "stays")])
    exchange.drain()
    return known, exchange.num_bytes


def test_what_drifts_goes_on_from_its_last_two_calls_and_everything_is_kept_twice():
    """A call has no slope from one before it, and none from one at its own time."""
    known, cached = run_ranks(told_at_times, 2, 0.5)[0]
    without, kept_once = run_ranks(told_at_times, 2, 0.0)[0]

    assert known == [[1, 1], [1, 1], [2.5, 2], [4, 4]] and without == [[1, 1], [1, 1], [2, 2], [4, 4]]
    assert cached == 2 * kept_once > 0


def test_a_transformer_whose_own_keys_are_stale_is_noticed():
    of_oracle, _, _ = check_transformer("SD3", Layout(displaced_degree=2), TRANSFORMER, "own_keys_stale")

    assert of_oracle > 1e-6


def zeros_for_halos():
    def share(self, key, fresh, shapes, drifts=False, right=Exchange.share):
        known = right(self, key, fresh, shapes, drifts)
        return [torch.zeros_like(each) for each in known] if key.rpartition(".")[2].startswith("conv") else known
    Exchange.share = share


def own_keys_stale():
    def keys_and_values(k, v, sizes, exchange, key):
        shapes = [(2, *displaced._with_size(k.shape, 2, size)) for size in sizes]
        return torch.cat(exchange.share(key, torch.stack([k, v]), shapes), 3)
    row_hooks.keys_and_values = displaced.keys_and_values = keys_and_values


def forecast_in_calls_not_in_time():
    exchange_module.extrapolation_weight = lambda strength, time, last, before: 1.0 + strength


def forecast_of_a_forecast():
    """What was extrapolated stays, and is taken for what was told."""
    def share(self, key, fresh, shapes, drifts=False, right=Exchange.share):
        known = right(self, key, fresh, shapes, drifts)
        if drifts and self.is_stale and self._weight != 1.0:
            for last, extrapolated in zip(self._slots[key].sides[self._last], known):
                last.copy_(extrapolated)
        return known
    Exchange.share = share


def sides_that_never_change():
    def call(self, *args, right=Exchange.call, **kwargs):
        self._times = self._times[:1]
        return right(self, *args, **kwargs)
    Exchange.call = call


def no_correction():
    """Of the mean."""
    displaced.corrected_moments = lambda fresh, difference, mean_before, offset: corrected_moments(
        torch.stack([mean_before, fresh[1]]), difference, mean_before, offset)


def bessel_factor():
    def with_factor(*moments):
        mean, variance = corrected_moments(*moments)
        return mean, variance * 64 / 63
    displaced.corrected_moments = with_factor


def even_shares():
    StaleSplit.fractions = lambda self, like: like.new_full((len(self.sizes),), 1 / len(self.sizes))


def text_of_the_first_run():
    UNetHooks._once = lambda self, name, forward, *args, **kwargs: self.__dict__.setdefault("known", {}).setdefault(
        name, forward(*args))


def text_of_every_call():
    UNetHooks._once = lambda self, name, forward, *args, **kwargs: forward(*args, **kwargs)


def bands_of_like_ranks():
    Loaded.context = functools.partialmethod(_unpaced, Loaded.context)


def _unpaced(loaded, right, mesh, *args, **kwargs):
    return right(loaded, dataclasses.replace(mesh, sequence_speeds=()), *args, **kwargs)


MUTANTS = {function.__name__: function for function in (
    zeros_for_halos, own_keys_stale, forecast_in_calls_not_in_time, forecast_of_a_forecast, sides_that_never_change,
    no_correction, bessel_factor, even_shares, text_of_the_first_run, text_of_every_call, bands_of_like_ranks)}


@pytest.mark.slow
@pytest.mark.parametrize("mutant",
                         ["zeros_for_halos", "own_keys_stale", "no_correction", "bessel_factor", "even_shares",
                          "text_of_the_first_run", "bands_of_like_ranks"])
def test_exactness_notices_a_broken_part(mutant):
    """A second run, where there are two, has another text."""
    columns = (8, 6) if mutant == "text_of_the_first_run" else (6,)
    cases = [({"rows": 20, "columns": each}, 1, False, "corrected_async_gn", 4096) for each in columns]
    speeds, starts = ((1, 2), (0, 8, 20)) if mutant == "bands_of_like_ranks" else ((), (0, 12, 20))

    *_, (of_oracle, _) = check("SDXL", starts, cases, mutant, speeds)

    assert of_oracle > 1e-6


def test_all_moments_fresh_are_torchs_and_far_from_zero_nothing_cancels():
    x = torch.randn(2, 8, 10, 6, dtype=torch.float64) + 1e4
    parts, shares = [x[:, :, :7], x[:, :, 7:]], torch.tensor([0.7, 0.3], dtype=torch.float64)
    known = torch.stack([torch.stack([part.reshape(2, 4, -1).mean(-1), part.reshape(2, 4, -1).var(-1, correction=0)])
                         for part in parts])

    mean, variance = corrected_moments(known[0], *correction_of(image_moments(known, shares), known[0]))
    single = known.float()
    _, single = corrected_moments(single[0], *correction_of(image_moments(single, shares.float()), single[0]))

    whole = x.reshape(2, 4, -1)
    within((mean - whole.mean(-1)).abs().max(), 1e-10)
    within((variance - whole.var(-1, correction=0)).abs().max(), 1e-10)
    within((single - variance).abs().max(), 1e-2)


def test_corrected_moments_are_the_papers():
    """E[x] and E[x^2] of the stale image plus this rank's change; where the variance is negative, the rank's own."""
    known = torch.rand(3, 2, 1, 4, dtype=torch.float64)
    fresh, shares = torch.rand(2, 1, 4, dtype=torch.float64), torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    squares = known[:, 1] + known[:, 0] ** 2
    mean = (shares[:, None, None] * known[:, 0]).sum(0) + fresh[0] - known[1, 0]
    square = (shares[:, None, None] * squares).sum(0) + (fresh[1] + fresh[0] ** 2) - squares[1]
    variance = square - mean ** 2

    result = corrected_moments(fresh, *correction_of(image_moments(known, shares), known[1]))

    within((result[0] - mean).abs().max(), 1e-12)
    within((result[1] - torch.where(variance < 0, fresh[1], variance)).abs().max(), 1e-12)


def test_a_negative_variance_is_replaced_by_the_ranks_own():
    """Stale 0.01 and 1 of equal means, of which the second is 0.1 now: 0.505 + 0.1 - 1."""
    known = torch.tensor([[[[0.0]], [[0.01]]], [[[0.0]], [[1.0]]]])

    stale = image_moments(known, torch.tensor([0.5, 0.5]))
    _, variance = corrected_moments(torch.tensor([[[0.0]], [[0.1]]]), *correction_of(stale, known[1]))

    assert variance.item() == pytest.approx(0.1)


@pytest.mark.parametrize("rows, ranks, multiple, starts", [
    (16, 2, 4, (0, 8, 16)), (20, 3, 4, (0, 8, 16, 20)), (23, 3, 4, (0, 8, 16, 23)), (17, 3, 8, (0, 8, 16, 17)),
    (16, 3, 8, None)])
def test_bands_are_whole_multiples(rows, ranks, multiple, starts):
    assert cut_bands(rows, ranks, multiple) == starts


def test_bands_of_halved_images():
    assert halved((0, 8, 16, 23), 2) == (0, 2, 4, 6)


def test_buckets_are_of_layers_that_follow_one_another():
    assert fill_buckets({"a": 3, "b": 3, "c": 9, "d": 1, "e": 5}, 6) == [["a", "b"], ["c"], ["d", "e"]]
