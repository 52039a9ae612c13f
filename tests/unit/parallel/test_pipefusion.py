"""PipeFusion equals its oracle, whatever the number of stages and the sequence degree;
without one of its parts it does not."""

import functools
import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tests.support.model_zoo import APART, WITH_REFERENCES, example, having, hold_share
from tests.support.pipefusion_oracle import StaleModel, simulate, stepped
from tests.support.ranks import run_ranks
from tests.support.tolerances import InDouble, unrounded, within
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import build_mesh
from xdit_backend.hooks import token_shards_io
from xdit_backend.hooks.attention_dispatch import AttentionFunctions
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.models import FAMILIES
from xdit_backend.parallel.pipefusion import Link
from xdit_backend.parallel.stale_kv_cache import KeyValueEntry, KeyValues, Offload
from xdit_backend.partition import cut_patches, split_stages, stage_blocks
from xdit_backend.planner.planner import choose_num_patches
from xdit_backend.protocol.specs import ForwardOptions, Layout

EXACT = 1e-12
SIGMAS = [1.0, 0.75, 0.5, 0.25]                               # three steps
KINDS = ("SD3", "Flux.1", "Wan", "Lumina 2", "Z-Image", "Chroma")                  # one of each kind of plan
SHAPES = {"Flux.1": {"rows": 12, "columns": 8}, "Wan": {"rows": 10, "columns": 6, "frames": 5},
          "CogVideoX 1.5": {"rows": 12, "columns": 6, "frames": 4},      # tokens are of two frames
          "Wan VACE": {"rows": 6, "columns": 6, "frames": 5},
          "Qwen-Image": {"rows": 12, "columns": 6}, "HunyuanVideo": {"rows": 10, "columns": 6, "frames": 5},
          "HunyuanVideo 1.5": {"rows": 4, "columns": 3, "frames": 5}}


class Pipeline:
    """One rank of a pipeline, as the engine drives it, on a model of the zoo that every rank has whole."""

    def __init__(self, rank, world_size, one, layout, num_blocks=None, offload=False, extrapolation=0.0,
                 sparse=None):
        self.one, self.mesh = one, build_mesh(layout, world_size)
        self.options = ForwardOptions(extrapolation=extrapolation, sparse=sparse)
        splits = hold_share(one.model, one.family.plan, layout.tensor_degree, self.mesh.ranks["tensor"])
        hooks = Hooks(one.model, one.family.plan, splits)
        self.key_values = KeyValues(Offload(torch.device("cpu")) if offload else None)
        sizes = num_blocks or split_stages([1] * hooks.num_blocks, layout.pipefusion_degree)
        blocks = stage_blocks(sizes, self.mesh.ranks["pipefusion"])
        self.loaded = one.loaded(hooks, blocks)
        self.link = Link(self.mesh, torch.device("cpu")) if layout.pipefusion_degree > 1 else None
        self.traffic = Traffic()

    def predict(self, latent, timestep, patch=None):
        """The prediction for a latent or a patch of it, on every rank: the last stage tells the others."""
        context = self.loaded.context(self.mesh, self.traffic, latent, timestep, self.one.conditioning, patch,
                                      key_values=self.key_values, num_images=latent.shape[0],
                                      options=self.options)
        if self.loaded.blocks.start > 0:
            size = self.loaded.received_size(self.mesh, latent.shape, self.one.conditioning, patch)
            handle = self.link.post_receive(size, latent.dtype)
            context.receive_message = lambda: self.link.receive(handle, self.traffic)
        output, message = self.loaded.hooks.run(context)
        if message is not None:
            self.link.send(message, self.traffic)
        shape = (latent.shape[0], self.one.family.num_channels(self.one.config), *latent.shape[2:])
        prediction = (latent.new_empty(shape) if output is None
                      else self.one.family.prediction(output, latent).to(latent.dtype).contiguous())
        if self.link:
            torch.distributed.broadcast(prediction, torch.distributed.get_world_size() - 1)
        return prediction

    def sample(self, patches, warmup_steps, dim, sigmas=SIGMAS):
        """Euler steps, as in the oracle. patches: of partition.cut_patches."""
        self.key_values.cached.clear()
        self.key_values.once.clear()
        self.key_values.edges.clear()
        x = self.one.latent
        for step, (sigma, following) in enumerate(zip(sigmas, sigmas[1:])):
            timestep = self.one.at(sigma)
            if step < warmup_steps:
                x = stepped(x, self.predict(x, timestep), following - sigma)
                continue
            x = torch.cat([stepped(piece, self.predict(piece, timestep, patch), following - sigma)
                           for patch, rows in patches
                           for piece in [x.narrow(dim, patch.start, rows)]], dim)
        return x


def cuts(one, num_patches, sequence_degree=1):
    size = one.family.patch_size(one.config)
    return cut_patches(one.latent.shape, size,
                       choose_num_patches(num_patches, 1, one.latent.shape, size, sequence_degree))


def made(name, options):
    return example(name, **SHAPES.get(name, {"rows": 12, "columns": 6}), **options)


def samples(rank, world_size, name, layout, settings, num_blocks=None, mutant=None, options={}, extrapolation=0.0,
            offload=False, sigmas=SIGMAS):
    """The latents of each (num_patches, warmup_steps), one after the other on one model."""
    if mutant:
        MUTANTS[mutant]()
    with torch.no_grad(), unrounded(layout.tensor_degree):
        one = made(name, options)
        pipeline, latent, results = Pipeline(rank, world_size, one, layout, num_blocks, offload,
                                             extrapolation), one.latent, []
        for num, warmup_steps in settings:
            one.latent = latent
            patches = cuts(one, num, layout.ring_degree * layout.ulysses_degree)
            results.append(pipeline.sample(patches, warmup_steps, patches[0][0].dim, sigmas))
        if pipeline.link:
            pipeline.link.drain()
            assert pipeline.link.num_received == pipeline.link.num_posted
        return results


def oracle(name, layout, num_patches, warmup_steps, options={}, extrapolation=0.0, sigmas=SIGMAS):
    """The latent of one process; once for all layouts whose patches are the same."""
    options, in_double = tuple(options.items()), layout.tensor_degree > 1
    pieces, dim = _pieces(name, num_patches, layout.ring_degree * layout.ulysses_degree, options)
    return _oracle(name, pieces, dim, in_double, warmup_steps, options, extrapolation, tuple(sigmas))


@functools.cache
def _pieces(name, num_patches, sequence_degree, options):
    """((start, end) of each patch, the dim that they cut)."""
    patches = cuts(made(name, dict(options)), num_patches, sequence_degree)
    return tuple((patch.start, patch.start + rows) for patch, rows in patches), patches[0][0].dim


@functools.cache
def _oracle(name, pieces, dim, in_double, warmup_steps, options, extrapolation, sigmas):
    with torch.no_grad(), InDouble() if in_double else nullcontext():
        return simulate(made(name, dict(options)), list(pieces), warmup_steps, sigmas, dim, extrapolation)


def error(name, layout, settings, num_blocks=None, mutant=None, options={}):
    """The largest difference of a rank's latents from the oracle's."""
    by_rank = run_ranks(samples, num_ranks(layout), name, layout, settings, num_blocks, mutant, options)
    return error_of(by_rank, name, layout, settings, options)


def error_of(by_rank, name, layout, settings, options={}):
    wanted = [oracle(name, layout, *each, options) for each in settings]
    return max((got - want).abs().max().item() for results in by_rank
               for got, want in zip(results, wanted, strict=True))


ALL = [(num_patches, (num_patches + more) % len(SIGMAS)) for num_patches in range(1, 6) for more in (0, 2)]


def settings_of(name, num_stages):
    """With three stages of one kind of each plan all; else every second, in turn."""
    return ALL if name in KINDS and num_stages == 3 else ALL[(list(FAMILIES).index(name) + num_stages // 2 + 1) % 2::2]


@pytest.mark.parametrize("name, num_stages", [
    *((name, 3) for name in having("pipefusion")),
    *(pytest.param(name, 4, marks=pytest.mark.slow) for name in KINDS)])
def test_any_number_of_stages_patches_and_warmup_steps_equals_the_oracle(on_shared_ranks, name, num_stages):
    """num_patches below, equal to and above the stages; warm-up from none (a cold start) to all steps. One and two
    stages are among the hybrids below."""
    by_rank = on_shared_ranks(samples, lambda name, num_stages: num_stages,
                              lambda name, num_stages: (name, Layout(pipefusion_degree=num_stages),
                                                        settings_of(name, num_stages)))

    within(error_of(by_rank, name, Layout(pipefusion_degree=num_stages), settings_of(name, num_stages)), EXACT)


def in_turn(names):
    """Each of these families under two of three layouts."""
    layouts = [Layout(pipefusion_degree=2), Layout(ulysses_degree=2), Layout(pipefusion_degree=2, ring_degree=2)]
    return [(name, layout) for number, name in enumerate(names)
            for place, layout in enumerate(layouts) if place != number % 3]


@pytest.mark.parametrize("name, layout", in_turn(name for name in having("pipefusion", FAMILIES)
                                                 if "attention_mask" in FAMILIES[name].inputs.conditioning), ids=str)
def test_masked_text_equals_the_oracle(name, layout):
    within(error(name, layout, [(4, 1), (3, 0), (2, 3)], options={"masked": True}), EXACT)


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("layout", [Layout(pipefusion_degree=2, ring_degree=2)], ids=str)
def test_times_that_differ_within_a_latent_equal_the_oracle(name, layout):
    within(error(name, layout, [(4, 1), (3, 0), (2, 3)], options={"apart": True}), EXACT)


@pytest.mark.parametrize("name, layout", in_turn(WITH_REFERENCES), ids=str)
def test_reference_latents_equal_the_oracle(name, layout):
    """They come with a step's first patch, and later patches attend to them."""
    within(error(name, layout, [(4, 1), (3, 0), (2, 3)], options={"references": ((6, 8), (3, 4)), "batch": 2}), EXACT)


HYBRIDS = {"2x ulysses2": Layout(pipefusion_degree=2, ulysses_degree=2),
           "2x ring2": Layout(pipefusion_degree=2, ring_degree=2),
           "2x tensor2": Layout(pipefusion_degree=2, tensor_degree=2), "1x ulysses2": Layout(ulysses_degree=2),
           "1x ring2": Layout(ring_degree=2), "1x ring3": Layout(ring_degree=3)}
LARGE = {"2x ring2-ulysses2": Layout(pipefusion_degree=2, ring_degree=2, ulysses_degree=2),
         "3x ulysses2": Layout(pipefusion_degree=3, ulysses_degree=2)}


def num_ranks(layout):
    return layout.pipefusion_degree * layout.ring_degree * layout.ulysses_degree * layout.tensor_degree


@pytest.mark.parametrize("name, layout", [
    *((name, HYBRIDS[("2x ring2", "1x ulysses2")[number % 2]]) for number, name in enumerate(having("pipefusion"))),
    ("Qwen-Image", HYBRIDS["2x tensor2"]), pytest.param("Flux.1", HYBRIDS["2x tensor2"], marks=pytest.mark.slow),
    *(pytest.param(name, HYBRIDS[layout], marks=pytest.mark.slow)
      for name in KINDS for layout in ("2x ulysses2", "1x ring3"))], ids=str)
def test_hybrids_with_sequence_parallelism_equal_the_oracle(name, layout):
    within(error(name, layout, settings_of(name, 3)[1::2]), EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name, layout", zip(KINDS, itertools.cycle(LARGE.values())), ids=str)
def test_hybrids_on_six_and_eight_ranks_equal_the_oracle(name, layout):
    within(error(name, layout, [(4, 1), (3, 2)]), EXACT)


@pytest.mark.parametrize("name, num_blocks", [
    ("SD3", [1, 3]), ("Flux.1", [3, 1]), ("Flux.1", [1, 3]), ("HunyuanDiT", [1, 7]), ("HunyuanDiT", [6, 2]),
    ("HunyuanDiT", [2, 4, 2]), ("HunyuanDiT", [1, 1, 1, 5])], ids=str)
def test_uneven_stages_equal_the_oracle(name, num_blocks):
    """HunyuanDiT is U-shaped: blocks of the second half take the output of blocks of the first, across stages."""
    within(error(name, Layout(pipefusion_degree=len(num_blocks)), [(4, 1), (3, 0), (2, 3)], num_blocks), EXACT)


FORECAST = 0.7
UNEVEN = [1.0, 0.9, 0.4, 0.4, 0.7, 0.65, 0.1, 0.0]             # long steps, one back, and two calls at one time


def forecast_errors(name, layout, settings, offload=False, batch=1, mutant=None):
    """For each (num_patches, warmup_steps), the largest differences from the oracle with forecast keys and values,
    and without."""
    options, by_rank = {"batch": batch}, run_ranks(
        samples, num_ranks(layout), name, layout, settings, None, mutant, {"batch": batch}, FORECAST, offload, UNEVEN)
    wanted = [[oracle(name, layout, *each, options, strength, UNEVEN) for strength in (FORECAST, 0.0)]
              for each in settings]
    return [[max((got - want).abs().max().item() for got in results) for want in both]
            for results, both in zip(zip(*by_rank, strict=True), wanted, strict=True)]


@pytest.mark.parametrize("name, layout, offload, batch", [
    ("SD3", Layout(), False, 2), ("SD3", Layout(), True, 2), ("Flux.1", Layout(), False, 1), ("Wan", Layout(), True, 1),
    ("SD3", Layout(pipefusion_degree=2), False, 1), ("Lumina 2", Layout(ulysses_degree=2), False, 1),
    pytest.param("Flux.1", Layout(pipefusion_degree=2, ring_degree=2), True, 1, marks=pytest.mark.slow),
    pytest.param("SD3", Layout(pipefusion_degree=2, tensor_degree=2), True, 2, marks=pytest.mark.slow)], ids=str)
def test_forecast_keys_and_values_equal_the_oracle(name, layout, offload, batch):
    errors = forecast_errors(name, layout, [(3, 1), (4, 0), (2, 3)], offload, batch)

    within(max(error for error, _ in errors), EXACT)
    assert min(other for _, other in errors) > 1e-6


@pytest.mark.parametrize("mutant", ["forecast_in_steps_not_in_time", "forecast_of_a_forecast"])
def test_a_wrong_forecast_is_noticed(mutant):
    assert forecast_errors("SD3", Layout(), [(3, 1)], mutant=mutant)[0][0] > 1e-6


@pytest.mark.parametrize("order, drift",
                         [(1, lambda time: 3 - 2 * time), (2, lambda time: 3 - 2 * time + 5 * time ** 2)])
def test_the_oracles_forecast_goes_on_as_its_order_says(order, drift):
    def made(time):
        return torch.full((1, 2, 3, 4), drift(time), dtype=torch.float64)
    model = StaleModel(example("SD3"), 1.0, order)
    for time, following in ((1.0, 0.8), (0.8, 0.5), (0.5, 0.1)):
        model.store["one"], model.times["one"] = (made(time), -made(time), torch.ones(3, dtype=torch.bool)), time
        model.go_on("one", following)

    keys, values, _ = model.store["one"]
    within((keys - made(0.1)).abs().max(), 1e-12)
    within((values + made(0.1)).abs().max(), 1e-12)


def offloaded(rank, world_size, name):
    """(Is the result the same bit for bit, bytes on the device with and without offload, bytes of one attention)"""
    torch.set_grad_enabled(False)
    results, resident, largest = [], [], 0
    for offload in (False, True):
        one = example(name, rows=12, columns=6)
        pipeline = Pipeline(rank, world_size, one, Layout(pipefusion_degree=world_size), offload=offload)
        results.append(pipeline.sample(cuts(one, 3), 1, 2))
        resident.append(pipeline.key_values.num_bytes)
        largest = max(entry.num_bytes for entry in pipeline.key_values.cached.values())
    return torch.equal(*results), *resident, largest


@pytest.mark.parametrize("name", ["SD3", "Flux.1"])
def test_offloaded_keys_and_values_change_nothing_and_leave_two_attentions_on_the_device(name):
    same, cached, with_offload, largest = run_ranks(offloaded, 1, name)[0]

    assert same and with_offload <= 2 * largest < cached
    assert all(result[0] for result in run_ranks(offloaded, 2, name))


def offloaded_copies(rank, world_size, batch):
    """Of the copies between device and host memory, (how many, how many with both sides in one piece of memory)."""
    torch.set_grad_enabled(False)
    one, copies, copy = example("Flux.1", rows=12, columns=6, batch=batch), [], torch.Tensor.copy_

    def spied(to, given, non_blocking=False):
        if non_blocking:
            copies.append(to.is_contiguous() and given.is_contiguous())
        return copy(to, given, non_blocking)
    torch.Tensor.copy_ = spied
    Pipeline(rank, world_size, one, Layout(), offload=True).sample(cuts(one, 3), 1, 2)
    return len(copies), sum(copies)


@pytest.mark.parametrize("batch", [1, 2])
def test_what_is_copied_from_and_to_host_memory_is_in_one_piece(batch):
    """CUDA copies what is not through memory of its own, and stops the process for it."""
    num_copies, num_in_one_piece = run_ranks(offloaded_copies, 1, batch)[0]

    assert num_copies == num_in_one_piece > 0


def whole_steps_between(rank, world_size, name):
    """The largest differences that offload makes where whole steps come between the patches,
    and after the images of a batch."""
    torch.set_grad_enabled(False)
    results = []
    for offload in (False, True):
        one = example(name, rows=12, columns=6)
        pipeline = Pipeline(rank, world_size, one, Layout(), offload=offload)
        for step in range(4):
            timestep = torch.full((1,), 900.0 - 100 * step, dtype=torch.float64)
            pieces = cuts(one, 3) if step % 2 else [(None, 12)]
            results.append(torch.cat([pipeline.predict(one.latent.narrow(2, patch.start if patch else 0, rows) + step,
                                                       timestep, patch)
                                      for patch, rows in pieces], 2))
    half = len(results) // 2
    return max((with_offload - without).abs().max().item() for without, with_offload in zip(results, results[half:]))


@pytest.mark.parametrize("name", ["SD3", "Flux.1"])
def test_offload_forgets_what_had_arrived_when_a_whole_step_comes_between(name):
    within(run_ranks(whole_steps_between, 1, name)[0], EXACT)


# --- mutants ---

def nothing_is_kept():
    """Patches attend to themselves only: naive patches."""
    KeyValues.update = lambda self, key, keys, values, context, streams: (keys, values)


def positions_of_the_first_patch():
    place = Hooks._hook_positions

    def first(self, module, forward, of_patch):
        return place(self, module, forward, lambda module, forward, rows, *seen: of_patch(
            module, forward, replace(rows, first_token=0), *seen))
    Hooks._hook_positions = first


def own_shard_is_kept_only():
    """The standard sequence-parallel buffer of docs/design/pipefusion.md: what the peers made fresh is not kept."""
    update = KeyValues.update

    def own_only(self, key, keys, values, context, streams):
        before = self.cached.get(key)
        old = before and before.both_KBNTH.clone()
        result = update(self, key, keys, values, context, streams)
        if old is not None and context.patch is not None:
            entry, offset = self.cached[key], 0
            for index, (stream, start, size) in enumerate(context.tokens.gathered_order(streams)):
                slot = start if stream == "text" else entry.num_text + context.first_token + start
                if index // len(streams) != context.tokens.shard:
                    entry.both_KBNTH[:, :, :, slot:slot + size] = old[:, :, :, slot:slot + size]
                offset += size
        return result
    KeyValues.update = own_only


def text_with_every_patch_forgotten():
    """Later patches do not see the text."""
    update = KeyValues.update

    def without_text(self, key, keys, values, context, streams):
        keys, values = update(self, key, keys, values, context, streams)
        start = self.cached[key].num_text if not context.opens else 0
        return keys[:, :, start:], values[:, :, start:]
    KeyValues.update = without_text


def cold_tokens_are_zero():
    """warmup_steps = 0: tokens not seen yet count as zeros instead of being left out."""
    update = KeyValues.update

    def zeros(self, key, keys, values, context, streams):
        first = key not in self.cached
        result = update(self, key, keys, values, context, streams)
        entry = self.cached[key]
        if first and context.patch is not None:
            entry.both_KBNTH[:, :, :, entry.num_filled:] = 0
            entry.num_filled = entry.both_KBNTH.shape[3]
            return tuple(entry.both_KBNTH)
        return result
    KeyValues.update = zeros


def modulation_of_the_step_before():
    once = Hooks._hook_once
    Hooks._hook_once = lambda self, module, forward, key, span: once(self, module, forward, key, "run")


def skips_are_lost():
    unpack = token_shards_io.unpack
    token_shards_io.unpack = lambda *arguments: [shard * (index == 0) for index, shard in enumerate(unpack(*arguments))]


def a_stand_in_is_attended_to():
    """In the place of the token at the other end."""
    without = AttentionFunctions.without_placeholders

    def without_another(self, tensor_BNTH, streams, context):
        left, pad = without(self, tensor_BNTH, streams, context)
        return (left, None) if pad is None else (tensor_BNTH.narrow(2, 1 - pad[2], left.shape[2]), pad)
    AttentionFunctions.without_placeholders = without_another


def forecast_in_steps_not_in_time():
    """Every step counts as long as the one before."""
    turn = KeyValueEntry.begin_call

    def by_steps(self, time, strength, allocate):
        weight = turn(self, time, strength, allocate)
        return weight and (1.0 if weight == 1.0 else 1.0 + strength)
    KeyValueEntry.begin_call = by_steps


def forecast_of_a_forecast():
    """The buffers do not change places: the slope is of what was forecast, not of what was seen."""
    turn = KeyValueEntry.begin_call

    def still(self, time, strength, allocate):
        weight = turn(self, time, strength, allocate)
        if weight is not None:
            self.before_KBNTH.copy_(self.both_KBNTH if weight != 1.0 else self.before_KBNTH)
        return weight
    KeyValueEntry.begin_call = still


def edges_of_this_step_alone():
    """What a patch reads of the one after it is as if that were beyond the picture."""
    neighbours = KeyValues.neighbours
    KeyValues.neighbours = lambda self, *requested: (neighbours(self, *requested)[0],
                                                     neighbours(self, *requested)[1][:, :, :0])


MUTANTS = {function.__name__: function for function in (
    forecast_in_steps_not_in_time, forecast_of_a_forecast,
    edges_of_this_step_alone, a_stand_in_is_attended_to, skips_are_lost, modulation_of_the_step_before, nothing_is_kept,
    positions_of_the_first_patch, own_shard_is_kept_only, text_with_every_patch_forgotten, cold_tokens_are_zero)}


@pytest.mark.parametrize("mutant, name, layout, setting", [
    ("a_stand_in_is_attended_to", "Qwen-Image", Layout(pipefusion_degree=2), (4, 1)),
    ("modulation_of_the_step_before", "HunyuanVideo", Layout(pipefusion_degree=2), (4, 1)),
    ("positions_of_the_first_patch", "Qwen-Image", Layout(), (4, 1)),
    ("positions_of_the_first_patch", "Lumina 2", Layout(), (4, 1)),
    ("positions_of_the_first_patch", "HunyuanVideo", Layout(), (4, 1)),
    ("skips_are_lost", "HunyuanDiT", Layout(pipefusion_degree=2), (2, 3)),
    ("edges_of_this_step_alone", "Chroma Radiance", Layout(), (4, 1)),
    ("modulation_of_the_step_before", "SD3", Layout(pipefusion_degree=2), (4, 1)),
    ("nothing_is_kept", "PixArt-Sigma", Layout(pipefusion_degree=2), (4, 1)),
    ("nothing_is_kept", "Latte", Layout(), (4, 1)), ("positions_of_the_first_patch", "Latte", Layout(), (4, 1)),
    ("own_shard_is_kept_only", "Latte", Layout(ulysses_degree=2), (4, 1)),
    ("positions_of_the_first_patch", "SD3", Layout(pipefusion_degree=2), (4, 1)),
    ("positions_of_the_first_patch", "Wan", Layout(pipefusion_degree=2), (4, 1)),
    ("own_shard_is_kept_only", "Flux.1", Layout(pipefusion_degree=1, ulysses_degree=2), (4, 1)),
    ("own_shard_is_kept_only", "Flux.1", Layout(pipefusion_degree=1, ring_degree=2), (4, 1)),
    ("text_with_every_patch_forgotten", "SD3", Layout(pipefusion_degree=2), (4, 1)),
    ("cold_tokens_are_zero", "PixArt-Sigma", Layout(pipefusion_degree=2), (4, 0))])
def test_exactness_notices_a_broken_method(mutant, name, layout, setting):
    # what stands in where a rank has no text is no number: where it is used, the error is none either
    assert not error(name, layout, [setting], mutant=mutant) <= 1e-6


def stale_share(rank, world_size):
    """Which tokens of the kept keys each patch of the second step overwrote."""
    torch.set_grad_enabled(False)
    one = example("PixArt-Sigma", rows=12, columns=6)
    pipeline = Pipeline(rank, world_size, one, Layout())
    patches, changed = cuts(one, 3), []
    timestep = torch.full((1,), 700.0, dtype=torch.float64)
    pipeline.predict(one.latent, timestep)
    for patch, rows in patches:
        before = [entry.both_KBNTH[0].clone() for entry in pipeline.key_values.cached.values()]
        pipeline.predict(one.latent.narrow(2, patch.start, rows) + 1, timestep, patch)
        changed.append([(now.both_KBNTH[0] != then).any(-1).any(1)[0].nonzero().flatten().tolist()
                        for now, then in zip(pipeline.key_values.cached.values(), before)])
    return changed


def test_a_patch_overwrites_its_own_tokens_only():
    """After (step i, patch m), tokens of patches up to m are of step i and the others of step i - 1.
    6 x 33 tokens, 3 patches."""
    changed = run_ranks(stale_share, 1)[0]

    assert changed == [[list(range(start, start + 66))] * 4 for start in (0, 66, 132)]


def replicas(rank, world_size, layout):
    """The kept keys of this rank after a warm-up step and a patch."""
    torch.set_grad_enabled(False)
    one = example("Flux.1", rows=12, columns=6)
    pipeline = Pipeline(rank, world_size, one, layout)
    timestep = torch.full((1,), 0.7, dtype=torch.float64)
    pipeline.predict(one.latent, timestep)
    patch, rows = cuts(one, 3)[1]
    pipeline.predict(one.latent.narrow(2, patch.start, rows) + 1, timestep, patch)
    return [entry.both_KBNTH[0].clone() for entry in pipeline.key_values.cached.values()]


def kept_heads(rank, world_size, layout):
    torch.set_grad_enabled(False)
    one = example("Lumina 2", rows=12, columns=6)
    pipeline = Pipeline(rank, world_size, one, layout)
    pipeline.predict(one.latent, one.timestep)
    return {entry.both_KBNTH.shape[2] for entry in pipeline.key_values.cached.values()}


@pytest.mark.parametrize("layout, heads", [(Layout(), 2), (Layout(ring_degree=2), 2), (Layout(ulysses_degree=2), 1),
                                           (Layout(ulysses_degree=4), 1)], ids=str)
def test_keys_of_grouped_queries_are_kept_once(layout, heads):
    """Four query heads share two key heads; four Ulysses ranks have one each, two of them the same."""
    assert run_ranks(kept_heads, num_ranks(layout), layout) == [{heads}] * num_ranks(layout)


def test_sequence_ranks_hold_the_same_keys():
    """Ring ranks keep the same keys; Ulysses ranks the same tokens of their own heads, together those of one rank."""
    alone = run_ranks(replicas, 1, Layout())[0]
    ring = run_ranks(replicas, 2, Layout(ring_degree=2))
    ulysses = run_ranks(replicas, 2, Layout(ulysses_degree=2))

    for index, keys in enumerate(alone):
        assert all(torch.allclose(ring[rank][index], keys, atol=EXACT) for rank in (0, 1))
        assert torch.allclose(torch.cat([ulysses[rank][index] for rank in (0, 1)], 1), keys, atol=EXACT)
