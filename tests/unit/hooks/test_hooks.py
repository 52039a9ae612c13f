"""A model behind its hooks is the model: exact in float64 for every family, layout and shape;
with a broken one it is not."""

import dataclasses
from contextlib import contextmanager

import pytest
import torch

import xdit_backend.parallel.sequence_parallel as usp
from tests.support.model_zoo import ALIKE, APART, CONFIGS, WITH_REFERENCES, example, having, matrix
from tests.support.ranks import run_ranks
from tests.support.tolerances import within
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.custom_ops import running
from xdit_backend.distributed.mesh import SINGLE, build_mesh, with_speeds
from xdit_backend.distributed.token_shards import Tokens
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.hooks.unet import UNetHooks
from xdit_backend.models import FAMILIES
from xdit_backend.partition import shard_start
from xdit_backend.protocol.errors import ConfigError, UnsupportedError
from xdit_backend.protocol.specs import Layout

EXACT = 1e-12
LAYOUTS = {"ulysses2": Layout(ulysses_degree=2), "ring2": Layout(ring_degree=2), "ring3": Layout(ring_degree=3),
           "ring2-ulysses2": Layout(ring_degree=2, ulysses_degree=2), "ulysses4": Layout(ulysses_degree=4)}
MASKED = {"rows": 8, "columns": 8, "num_text_tokens": 8, "batch": 2, "masked": True}
SHAPES = {"even": {"rows": 8, "columns": 8, "num_text_tokens": 8},
          "uneven": {"rows": 6, "columns": 10, "num_text_tokens": 7}, "batch": {"rows": 4, "columns": 6, "batch": 3}}


def whole(mesh, one, hooks):
    """A forward of the whole model, with nothing kept."""
    loaded = one.loaded(hooks)
    return loaded.context(mesh, Traffic(), one.latent, one.timestep, one.conditioning)


@contextmanager
def serving(hooks, context):
    """The model's own forward runs as the hooks' would."""
    with hooks.serving(context), running(hooks._attention):
        yield


def num_ranks(layout):
    return layout.ring_degree * layout.ulysses_degree


def difference(rank, world_size, name, layout, shapes, mutant=None, speeds=()):
    """Largest difference between the parallel prediction and the model's own, for each shape, on one model."""
    torch.set_grad_enabled(False)
    if mutant is not None:
        MUTANTS[mutant]()
    mesh = with_speeds(build_mesh(layout, world_size), speeds)
    model, results = None, []
    for shape in shapes:
        one = example(name, **shape)
        want = one.run_parts()
        if model is None:
            model = one.model
            hooks = Hooks(model, one.family.plan)
        one.model = model
        with serving(hooks, whole(mesh, one, hooks)):
            results.append(max((part - wanted).abs().max().item()
                               for part, wanted in zip(one.run_parts(), want, strict=True)))
    return results


KINDS = ("SD3", "Flux.1", "Wan", "Lumina 2", "LTX-2")         # of each kind of streams one: under every layout


@pytest.mark.parametrize("name, layout", [
    (name, layout) for name, layout in matrix(having("ring"), LAYOUTS, "ring2-ulysses2")
    if name in (*KINDS, *ALIKE) or layout == "ring3"])
def test_prediction_equals_the_model(on_shared_ranks, name, layout):
    """Shapes follow one another on the same hooks, so that nothing of one run may reach the next.

    tests/integration/test_smoke.py has every family on two ranks.
    """
    results = on_shared_ranks(difference, lambda name, layout: num_ranks(LAYOUTS[layout]),
                              lambda name, layout: (name, LAYOUTS[layout], list(SHAPES.values())))

    within(max(max(result) for result in results), EXACT)


@pytest.mark.parametrize("name, layout, speeds", [
    ("SD3", "ring2-ulysses2", (100, 26, 50, 50)), ("Qwen-Image", "ring3", (2, 1, 100)),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("Flux.1", "ulysses2", (71, 26)), ("Lumina 2", "ring2-ulysses2", (9, 1, 3, 3)), ("Wan", "ring2", (1, 6)),
        ("Z-Image", "ulysses4", (4, 1, 2, 1))))], ids=str)
def test_ranks_that_differ_in_speed_predict_the_same(name, layout, speeds):
    """Ranks with no text at all among them; masked text where the family has a mask."""
    shapes = [*SHAPES.values(), *([MASKED] if "attention_mask" in FAMILIES[name].inputs.conditioning else [])]

    results = run_ranks(difference, len(speeds), name, LAYOUTS[layout], shapes, None, speeds)

    within(max(max(result) for result in results), EXACT)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items()
                                  if "attention_mask" in family.inputs.conditioning])
@pytest.mark.parametrize("layout", ["ulysses2", "ring2-ulysses2", "ring3"])
def test_masked_text_is_not_attended_to(on_shared_ranks, name, layout):
    """Two images, whose masks differ: on some ranks all text of one is masked."""
    shapes = [MASKED, SHAPES["uneven"], SHAPES["uneven"] | {"masked": True}]

    results = on_shared_ranks(difference, lambda name, layout: num_ranks(LAYOUTS[layout]),
                              lambda name, layout: (name, LAYOUTS[layout], shapes))

    within(max(max(result) for result in results), EXACT)


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("layout", ["ring2-ulysses2", "ring3"])
def test_times_that_differ_within_a_latent_are_cut_as_its_tokens(name, layout):
    shapes = [shape | {"apart": apart} for shape in SHAPES.values() for apart in (True, False)]

    results = run_ranks(difference, num_ranks(LAYOUTS[layout]), name, LAYOUTS[layout], shapes)

    within(max(max(result) for result in results), EXACT)


REFERENCES = [{"references": [(6, 8)], "rows": 8, "columns": 8}, {"references": [(4, 6), (5, 3)], "method": "offset"},
              SHAPES["uneven"],
              {"references": [(2, 2)], "batch": 2, "method": "index_timestep_zero"}]


@pytest.mark.parametrize("name", WITH_REFERENCES)
@pytest.mark.parametrize("layout", ["ulysses2", "ring2-ulysses2", "ring3"])
def test_reference_latents_are_tokens_of_their_own(name, layout):
    """Of other sizes than the latent, fewer than ranks, and none between runs that have some."""
    results = run_ranks(difference, num_ranks(LAYOUTS[layout]), name, LAYOUTS[layout], REFERENCES)

    within(max(max(result) for result in results), EXACT)


AUDIO_SIZES = [SHAPES["uneven"] | {"audio": length, "batch": 2} for length in (1, 3, 0, 9)]


@pytest.mark.parametrize("layout", ["ring3", "ring2-ulysses2", pytest.param("ulysses4", marks=pytest.mark.slow)])
def test_audio_of_any_length_is_a_stream_of_its_own(layout):
    """Of fewer tokens than there are ranks, and none."""
    results = run_ranks(difference, num_ranks(LAYOUTS[layout]), "LTX-2", LAYOUTS[layout], AUDIO_SIZES)

    within(max(max(result) for result in results), EXACT)


def streams_read_their_own_shard():
    """What one stream reads of the other is the rank's own tokens alone."""
    import xdit_backend.hooks.attention_dispatch as module
    attention = usp.usp_attention
    module.usp_attention = lambda q, k, v, given, mesh, traffic: (
        attention(q, k, v, given, mesh, traffic) if given.key_sizes is None
        else torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=given.scale))


def own_keys_only():
    usp.ring_attention = lambda q, k, v, given, mesh, traffic: usp.attend_with_lse(
        q, k, v, given.backend, scale=given.scale)[0]


def merge_by_mean():
    usp.merge_attention = lambda out, lse, block_out, block_lse: ((out + block_out) / 2, lse)


def rotary_tables_of_the_first_shard():
    take = Tokens.take
    Tokens.take = lambda self, tensor, dim, streams: take(
        dataclasses.replace(self, shard=0) if tensor.ndim == 2 else self, tensor, dim, streams)


def masks_are_forgotten():
    import xdit_backend.hooks.attention_dispatch as module
    module.gathered_mask = lambda masks, pieces, like: None


def mask_of_the_rank_before():
    split = torch.Tensor.split
    torch.Tensor.split = lambda self, *arguments: split(self, *arguments)[
        ::-1] if self.dtype == torch.bool and self.ndim == 4 \
        else split(self, *arguments)


def marks_of_the_first_shard():
    take = Tokens.take
    Tokens.take = lambda self, tensor, dim, streams: take(
        dataclasses.replace(self, shard=0) if tensor.dtype == torch.bool else self, tensor, dim, streams)


def references_of_the_first_shard():
    take = Tokens.take
    Tokens.take = lambda self, tensor, dim, streams: take(
        dataclasses.replace(self, shard=0) if streams == ("image", "reference") else self, tensor, dim, streams)


def keys_of_another_group():
    import xdit_backend.hooks.attention_dispatch as module
    module.one_key_per_group = lambda module, query, key: key[
        :, :module.to_k.out_features * key.shape[1] // module.to_q.out_features]


def text_after_the_image():
    """A sequence of two streams is joined in the wrong order."""
    import xdit_backend.hooks.token_shards_io as regions
    join = regions.join
    regions.join = lambda shard, streams, *arguments: join(shard.flip(1) if len(streams) > 1 else shard, streams,
                                                           *arguments)


def learned_positions_of_the_first_shard():
    take = Tokens.take
    Tokens.take = lambda self, tensor, dim, streams: take(
        dataclasses.replace(self, shard=0) if tensor.ndim == 3 and len(tensor) == 1 else self, tensor, dim, streams)


def heads_back_in_reverse():
    together = usp.gather_heads
    usp.gather_heads = lambda *arguments: together(*arguments).flip(1)


def starts_of_like_ranks():
    """Shards of uneven size are taken from where even ones begin."""
    def take(self, tensor, dim, streams):
        pieces = []
        for stream, piece in zip(streams, tensor.split([self.counts[stream] for stream in streams], dim)):
            size = self.shards(stream)[self.shard]
            start = min(shard_start(self.counts[stream], self.num_shards, self.shard), self.counts[stream] - size)
            pieces.append(piece.narrow(dim, start, size))
        return torch.cat(pieces, dim)
    Tokens.take = take


MUTANTS = {function.__name__: function for function in (
    masks_are_forgotten, mask_of_the_rank_before, marks_of_the_first_shard, references_of_the_first_shard,
    streams_read_their_own_shard, keys_of_another_group, text_after_the_image, own_keys_only, merge_by_mean,
    rotary_tables_of_the_first_shard, learned_positions_of_the_first_shard, heads_back_in_reverse,
    starts_of_like_ranks)}


@pytest.mark.parametrize("mutant, name, layout", [
    ("own_keys_only", "SD3", "ring2"), ("merge_by_mean", "PixArt-Sigma", "ring2"),
    ("masks_are_forgotten", "Qwen-Image", "ulysses2"), ("mask_of_the_rank_before", "Qwen-Image", "ring2"),
    ("marks_of_the_first_shard", "HunyuanVideo", "ring2"), ("streams_read_their_own_shard", "LTX-2", "ulysses2"),
    ("references_of_the_first_shard", "Flux.1", "ulysses2"),
    ("keys_of_another_group", "Lumina 2", "ulysses2"), ("text_after_the_image", "Lumina 2", "ring2"),
    ("rotary_tables_of_the_first_shard", "Flux.1", "ring2"), ("heads_back_in_reverse", "Wan", "ulysses2"),
    ("learned_positions_of_the_first_shard", "Cosmos-Predict1", "ring2")])
def test_exactness_notices_a_broken_method(mutant, name, layout):
    shape = (MASKED if "mask" in mutant else REFERENCES[0] if "references" in mutant
             else SHAPES["even"] | {"apart": "marks" in mutant})

    results = run_ranks(difference, 2, name, LAYOUTS[layout], [shape], mutant)

    assert max(max(result) for result in results) > 1e-6


def test_exactness_of_unlike_ranks_notices_a_broken_method():
    results = run_ranks(difference, 2, "SD3", LAYOUTS["ulysses2"], [SHAPES["even"]], "starts_of_like_ranks", (3, 1))

    assert max(max(result) for result in results) > 1e-6


@pytest.mark.parametrize("name", CONFIGS)
def test_one_rank_is_bitwise_the_model(name):
    one = example(name)
    want, keys = one.run(), list(one.model.state_dict())
    hooks = Hooks(one.model, one.family.plan)

    with hooks.serving(whole(SINGLE, one, hooks)):
        result = one.run()

    assert torch.equal(result, want)
    assert list(one.model.state_dict()) == keys


def test_blocks_on_one_rank_get_no_mask_that_masks_nothing():
    """PyTorch's attention is slower with one, as ComfyUI's own model never has it."""
    one, seen = example("ERNIE-Image"), []
    one.model.layers[0].self_attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
    hooks = Hooks(one.model, one.family.plan)

    one.run()
    with hooks.serving(whole(SINGLE, one, hooks)):
        one.run()

    assert seen[0] is not None and seen[1] is None


@pytest.mark.parametrize("name, hooks", [("SD3", Hooks), ("SD 1.5", UNetHooks)], ids=["tokens", "rows"])
def test_hooks_are_placed_once(name, hooks):
    """Twice, a rank would cut its shard of its shard."""
    one = example(name)
    hooks(one.model, one.family.plan)

    with pytest.raises(AssertionError, match="has hooks already"):
        hooks(one.model, one.family.plan)


@pytest.mark.parametrize("name, hooks",
                         [("SD3", Hooks), ("Flux.1", Hooks), ("PixArt-Sigma", Hooks), ("SD 1.5", UNetHooks)],
                         ids=["SD3", "Flux", "PixArt", "rows"])
def test_before_a_run_and_after_it_a_model_with_hooks_is_the_model(name, hooks):
    """No context says what a rank is to do then: nothing is cut, and nothing is asked of ranks that there are not."""
    one = example(name)
    want = one.run()
    placed = hooks(one.model, one.family.plan)

    before = one.run()
    loaded = one.loaded(placed, None if hooks is Hooks else range(0))
    placed.run(loaded.context(SINGLE, Traffic(), one.latent, one.timestep, one.conditioning))

    assert torch.equal(before, want) and torch.equal(one.run(), want)


def attention_calls(rank, world_size, name):
    torch.set_grad_enabled(False)
    one, calls = example(name), []
    attention = usp.usp_attention

    def counted(*arguments):
        calls.append(arguments[0].shape)
        return attention(*arguments)

    import xdit_backend.hooks.attention_dispatch as module
    module.usp_attention = counted
    hooks = Hooks(one.model, one.family.plan)
    with serving(hooks, whole(build_mesh(Layout(ring_degree=world_size), world_size), one, hooks)):
        one.run()
    return len(calls)


@pytest.mark.parametrize("name, expected",
                         [(name, {"SD3": 5, "Wan VACE": 6, "HunyuanDiT": 8, "LTX-2": 12, "Sana": 0, "Sana-Video": 0,
                                  "ACE-Step 1.0": 0, "OmniGen 2": 5, "Hunyuan3D 2.1": 5, "Wan S2V": 5, "WanDancer": 5,
                                  "Boogu-Image": 9, "Wan Animate": 10, "Stable Audio 3": 8,
                                  "HiDream-O1": 8}.get(name, 4))
                          for name in having("ring")])
def test_only_self_attention_is_replaced(name, expected):
    """One a block; SD3's dual one, Stable Audio 3's that is taken away, Wan VACE's two more blocks; LTX-2's of sound,
    and two between it and the video; HiDream-O1's of text apart.
    Attention over text alone and cross-attention to it stay as they are.
    """
    assert run_ranks(attention_calls, 2, name) == [expected, expected]


def with_another_attention(rank, world_size):
    """diffusers' own choice of an attention, as its DIFFUSERS_ATTN_BACKEND makes it,
    which passes by PyTorch's function."""
    torch.set_grad_enabled(False)
    one = example("Flux.1")
    hooks = Hooks(one.model, one.family.plan)
    for block in (*one.model.transformer_blocks, *one.model.single_transformer_blocks):
        block.attn.processor._attention_backend = "_native_math"
    import diffusers.models.attention_dispatch as dispatch
    backends = dispatch._AttentionBackendRegistry._backends
    backends[dispatch.AttentionBackendName._NATIVE_MATH] = lambda query, key, value, **others: query
    with hooks.serving(whole(build_mesh(Layout(ring_degree=world_size), world_size), one, hooks)):
        one.run()


def test_an_attention_that_is_not_reached_is_an_error():
    with pytest.raises(UnsupportedError, match="the attention attn of block 0 did not call"):
        run_ranks(with_another_attention, 2)


def refusal(rank, world_size, name="SD3", frames=None):
    torch.set_grad_enabled(False)
    one = example(name, rows=2, columns=2, frames=frames)
    hooks = Hooks(one.model, one.family.plan)
    with hooks.serving(whole(build_mesh(Layout(ring_degree=2), 2), one, hooks)):
        one.run()


def test_fewer_tokens_than_ranks_are_refused():
    with pytest.raises(ConfigError, match="has 1 tokens, too few for ulysses_degree x ring_degree = 2"):
        run_ranks(refusal, 2)


def test_a_video_of_fewer_frames_than_ranks_is_refused_where_these_have_whole_ones():
    with pytest.raises(ConfigError, match="has 1 rows of tokens, too few for ulysses_degree x ring_degree = 2"):
        run_ranks(refusal, 2, "Sana-Video", 1)


def masked(rank, world_size):
    torch.set_grad_enabled(False)
    one = example("PixArt-Sigma")
    inputs = one.family.forward_arguments(one.latent, one.timestep, one.conditioning, one.config)
    hooks = Hooks(one.model, one.family.plan)
    with hooks.serving(whole(build_mesh(Layout(ring_degree=2), 2), one, hooks)):
        one.model(**inputs, attention_mask=torch.ones(1, 15), return_dict=False)


def test_a_mask_that_cannot_be_honoured_is_refused():
    with pytest.raises(UnsupportedError, match="masks its self-attention"):
        run_ranks(masked, 2)


def test_time_is_not_rounded_to_half_precision():
    """Flux's forward rounds the timestep to the model's dtype before it embeds it (988 here); ComfyUI's model does not.

    Guidance is rounded by both.
    """
    one, seen = example("Flux.1", torch.bfloat16), []
    one.timestep = torch.tensor([0.98715])
    one.model.time_text_embed.time_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].item()))
    hooks = Hooks(one.model, one.family.plan)

    one.run()
    with hooks.serving(whole(SINGLE, one, hooks)):
        one.run()

    assert seen == [988.0, 3504.0, pytest.approx(987.15), 3504.0]
