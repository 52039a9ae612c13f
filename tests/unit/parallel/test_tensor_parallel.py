"""A model whose layers are spread over ranks is the model: exact in float64 for every family;
with a broken part it is not."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import tests.support.model_zoo as zoo
import xdit_backend.parallel.tensor_parallel as tensor
from tests.conftest import ROOT
from tests.support.fake_cuda import CUDA, fake_cuda_device
from tests.support.model_zoo import CONFIGS, example, having, hold_share
from tests.support.ranks import run_ranks
from tests.support.tiers import FEW_FAMILIES
from tests.support.tolerances import InDouble, relative_error, within
from xdit_backend.checkpoints.build_transformer import build
from xdit_backend.checkpoints.tensor_sharding import Split, tensor_splits
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import build_mesh
from xdit_backend.hooks.forward_context import HookState
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.models import FAMILIES
from xdit_backend.parallel.stale_kv_cache import KeyValues
from xdit_backend.parallel.tensor_parallel import _squares
from xdit_backend.protocol.errors import UnsupportedError
from xdit_backend.protocol.specs import Layout

EXACT = 1e-12
MODELS_PAGE = (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
SHAPES = [{"rows": 6, "columns": 10, "num_text_tokens": 7}, {"rows": 4, "columns": 6, "batch": 3}]
ALIKE = [{"rows": 6, "columns": 10, "num_text_tokens": 7}] * 2
TENSOR = Layout(tensor_degree=2)
ULYSSES, RING = Layout(tensor_degree=2, ulysses_degree=2), Layout(tensor_degree=2, ring_degree=2)


def forward(rank, world_size, name, layout, shapes, mutant=None):
    """[(largest difference from the model's own prediction, exchanges, bytes this rank sent)] for each shape,
    on one model."""
    with torch.no_grad(), InDouble():
        return _forward(rank, world_size, name, layout, shapes, mutant)


def _forward(rank, world_size, name, layout, shapes, mutant):
    if mutant is not None:
        MUTANTS[mutant]()
    mesh, model, results = build_mesh(layout, world_size), None, []
    for shape in shapes:
        one, traffic = example(name, **shape), Traffic()
        # Anima's text is ready: what prepares it is whole on every rank
        one.conditioning.pop("t5xxl_ids", None)
        want = one.run()
        if model is None:
            model = one.model
            splits = hold_share(model, one.family.plan, layout.tensor_degree, mesh.ranks["tensor"])
            hooks = Hooks(model, one.family.plan, splits)
        one.model = model
        loaded = one.loaded(hooks)
        with hooks.serving(loaded.context(mesh, traffic, one.latent, one.timestep, one.conditioning)):
            error = (one.run() - want).abs().max().item()
        results.append((error, traffic.num_exchanges, traffic.sent_bytes))
    return results


def largest(results):
    return max(error for result in results for error, _, _ in result)


def is_spread(name):
    """Is it known how to split this family's layers?"""
    with torch.device("meta"):
        model = build(FAMILIES[name], CONFIGS[name])
    try:
        return bool(tensor_splits(model, FAMILIES[name].plan))
    except UnsupportedError:
        return False


def degrees_of(name):
    """That divide the heads of the family's tiny model."""
    config, family = FAMILIES[name].testing.config, FAMILIES[name]
    if not is_spread(name):
        return []
    return [degree for degree in (2, 4) if family.num_heads(config) % degree == (family.num_key_heads(config) or degree)
            % degree == 0]


@pytest.mark.parametrize("name, degree", [pytest.param(name, degree, marks=[pytest.mark.slow] if degree > 2 else [])
                                          for name in having("tensor") for degree in degrees_of(name)
                                          if degree > 2 or name in FEW_FAMILIES])
def test_prediction_equals_the_model(on_shared_ranks, name, degree):
    """tests/integration/test_smoke.py has every family on two ranks."""
    results = on_shared_ranks(forward, lambda name, degree: degree,
                              lambda name, degree: (name, Layout(tensor_degree=degree),
                                                    SHAPES if degree == 2 else SHAPES[1:]))

    within(largest(results), EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name, layout", [("SD3", RING), ("Flux.1", ULYSSES), ("Flux.2", RING), ("Wan VACE", ULYSSES),
                                          ("Lumina 2", RING),
                                          ("LTX-Video", ULYSSES)], ids=str)
def test_hybrids_with_sequence_parallelism_equal_the_model(name, layout):
    results = run_ranks(forward, 4, name, layout, SHAPES)

    within(largest(results), EXACT)


@pytest.mark.parametrize("degree", [2, 4])
def test_bytes_sent_are_those_of_the_formula(degree):
    """docs/design/tensor.md, of Flux.1's two double and two single blocks. Text and image are one exchange in
    an attention, and all modulations are one."""
    (_, num_exchanges, sent_bytes), = run_ranks(forward, degree, "Flux.1", Layout(tensor_degree=degree), SHAPES[:1])[0]
    tokens, width, double, single = 15 + 7, 64, 2, 2

    sums = (2 * double + single) * tokens * width
    modulation = (12 * double + 3 * single) * width
    assert sent_bytes == 8 * (degree - 1) * (2 * sums + modulation) // degree
    assert num_exchanges == double * (1 + 2) + single + 1


@pytest.mark.parametrize("name, a_token",
                         [("PixArt-Sigma", lambda width: 3 * width), ("Wan", lambda width: 3 * width + 3)])
def test_bytes_of_blocks_with_cross_attention(name, a_token):
    """Three sums of image tokens a block, and of Wan the squares of queries and keys,
    those of the text and of the picture too."""
    one = example(name, **SHAPES[0])
    tokens = one.family.token_counts(one.latent.shape, one.conditioning)["image"]
    read = sum(one.conditioning[kind].shape[1] for kind in ("context", "clip_fea")) if name == "Wan" else 0
    blocks, width = one.family.num_blocks(one.config), one.family.width(one.config)

    (_, num_exchanges, sent_bytes), = run_ranks(forward, 2, name, Layout(tensor_degree=2), SHAPES[:1])[0]

    assert sent_bytes == 8 * blocks * (tokens * a_token(width) + read)
    # norms of an attention's queries and keys together
    assert num_exchanges == blocks * (3 + 2 if name == "Wan" else 3)


@pytest.mark.parametrize("name, at_once, a_block", [("DiT", 0, 2 + 1), ("Cosmos-Predict2", 1, 3 + 3)])
def test_modulations_that_differ_from_block_to_block_are_asked_for_by_each(name, at_once, a_block):
    """DiT's blocks embed the time each for itself; of Cosmos-Predict2's pairs of matrices the second sees what is the
    block's own.

    What the first forward has asked for in vain, the second does not ask for.
    """
    (first_error, *first), (error, *later) = run_ranks(forward, 2, name, TENSOR, SHAPES[:1] * 2)[0]

    within(max(first_error, error), EXACT)
    blocks = example(name).family.num_blocks(example(name).config)
    assert later[0] == first[0] == at_once + a_block * blocks
    assert later[1] < first[1]


def test_a_norm_over_all_heads_moves_ten_bytes_a_number(monkeypatch):
    """In bfloat16: it is read for its squares, read and written by their root, and read and written by the weights."""
    monkeypatch.setattr(tensor, "_sums", lambda tensors, now: tensors)
    with fake_cuda_device(monkeypatch) as work_of, torch.device(CUDA):
        attention, now = torch.nn.Module(), SimpleNamespace(state=HookState())
        attention.to_q, attention.norm_q = torch.nn.Identity(), torch.nn.RMSNorm(2560, eps=1e-6, dtype=torch.bfloat16)
        tensor._install_norms(attention, "attn", {"norm_q": 5120}, lambda: now)
        query = torch.empty(1, 4096, 2560, dtype=torch.bfloat16)
        work = work_of(attention.norm_q, query)

    assert (work.kernels <= 8 and work.moved_bytes < 10.1 * query.numel() and work.peak_bytes < 2.1 * query.numel()
            and work.waits == [])


def in_bfloat16(rank, world_size, name, layout):
    """(relative error of the model, that of the ranks together), in bfloat16 beside float32."""
    with torch.no_grad():
        want, one = example(name, torch.float32, **SHAPES[1]).run(), example(name, torch.bfloat16, **SHAPES[1])
        whole, mesh = one.run(), build_mesh(layout, world_size)
        hooks = Hooks(one.model, one.family.plan,
                      hold_share(one.model, one.family.plan, layout.tensor_degree, mesh.ranks["tensor"]))
        loaded = one.loaded(hooks)
        with hooks.serving(loaded.context(mesh, Traffic(), one.latent, one.timestep, one.conditioning)):
            return relative_error(whole.float(), want), relative_error(one.run().float(), want)


@pytest.mark.parametrize("name, degree", [("Flux.1", 4)])
def test_in_bfloat16_it_rounds_about_as_one_rank_does(name, degree):
    """Each rank rounds its part before they are added."""
    (one, spread), *others = run_ranks(in_bfloat16, degree, name, Layout(tensor_degree=degree))

    assert one > 1e-4 and all(other == (one, spread) for other in others)
    within(spread / one, 2.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_squares_are_added_up_in_float32(dtype):
    """In float16 a token's would overflow; in bfloat16 all but three digits would be lost."""
    tokens = torch.randn(2, 3, 4096, generator=torch.Generator().manual_seed(0)).mul(40).to(dtype)

    squares = _squares(tokens)

    assert squares.dtype == torch.float32
    within(relative_error(squares, tokens.double().square().sum(-1, keepdim=True)), 1e-5)


def sequence_ranks(layout):
    return layout.tensor_degree * layout.ulysses_degree * layout.ring_degree


def two_forwards(name, shapes):
    """Examples of unlike numbers, whose shapes may be the same, and what one process predicts for them."""
    examples = [example(name, **shape) for shape in shapes]
    for one in examples:
        one.conditioning.pop("t5xxl_ids", None)                # as in _forward
    first, second = examples
    second.latent = -1.5 * second.latent
    second.conditioning = {key: 0.3 * tensor if tensor.is_floating_point() else tensor
                           for key, tensor in second.conditioning.items()}
    return examples, [one.run() for one in examples]


def on_shares(one, layout, world_size):
    """(mesh, hooks, Loaded) of a rank that has its share of the example's model."""
    mesh = build_mesh(layout, world_size)
    hooks = Hooks(one.model, one.family.plan, hold_share(one.model, one.family.plan, 2, mesh.ranks["tensor"]))
    return mesh, hooks, one.loaded(hooks)


def in_turn(rank, world_size, name, layout, shapes, mutant=False):
    """(largest difference of two forwards that take turns from the model's own, their exchanges,
    those of one after the other)."""
    with torch.no_grad(), InDouble():
        counts, (examples, wanted) = [], two_forwards(name, shapes)
        mesh, hooks, loaded = on_shares(examples[0], layout, world_size)

        def contexts():
            counts.append(Traffic())
            return [loaded.context(mesh, counts[-1], each.latent, each.timestep, each.conditioning)
                    for each in examples]
        apart = [hooks.run(context) for context in contexts()]
        if mutant:                                             # the second goes on with what is known of the first
            first, hooks.serving = hooks.serving, lambda context: first(one_of_them)
        one_of_them, *_ = together = contexts()
        results = hooks.run_in_turn(together)
        predicted = [each.family.prediction(output, each.latent) for each, (output, _) in zip(examples, results)]
        assert len(apart) == len(predicted)
        return max((mine - want).abs().max().item()
                   for mine, want in zip(predicted, wanted)), *(count.num_exchanges for count in counts)


@pytest.mark.parametrize("name, layout, shapes", [
    ("SD3", TENSOR, SHAPES),
    *(pytest.param(name, TENSOR, SHAPES, marks=pytest.mark.slow)
      for name in ("Wan", "Flux.1", "Lumina 2", "PixArt-Sigma")),
    *((name, ULYSSES, SHAPES) for name in ("Flux.1", "Wan")),
    *(pytest.param(name, ULYSSES, SHAPES, marks=pytest.mark.slow) for name in ("Z-Image", "HunyuanDiT", "Krea 2")),
    *(pytest.param(name, RING, SHAPES, marks=pytest.mark.slow)
      for name in ("SD3", "LTX-Video", "Kandinsky 5", "HiDream-I1")),
    ("Wan", RING, ALIKE), ("LTX-Video", ULYSSES, ALIKE), pytest.param("Z-Image", RING, ALIKE, marks=pytest.mark.slow),
    *(pytest.param(name, ULYSSES, ALIKE, marks=pytest.mark.slow) for name in ("Kandinsky 5", "HiDream-I1"))], ids=str)
def test_forwards_that_take_turns_are_each_their_own(name, layout, shapes):
    """Each exchange has its turn, in the same order on all ranks. A turn ends within an attention, where norms see all
    heads, and begins where text is refined by attention of its own."""
    for error, one_by_one, exchanges in run_ranks(in_turn, sequence_ranks(layout), name, layout, shapes):
        within(error, EXACT)
        assert exchanges == one_by_one > 0


def remembered(rank, world_size, name, options, left_out, other):
    """Largest difference of each of two forwards that take turns from the model's own.
    left_out, other: of the second's conditioning."""
    with torch.no_grad(), InDouble():
        examples = [example(name, **each) for each in options]
        given = examples[1].conditioning
        examples[1].conditioning = {key: torch.full_like(tensor, other[key]) if key in other else tensor
                                    for key, tensor in given.items() if key not in left_out}
        wanted = [each.run() for each in examples]
        mesh, hooks, loaded = on_shares(examples[0], TENSOR, world_size)
        results = hooks.run_in_turn([loaded.context(mesh, Traffic(), each.latent, each.timestep, each.conditioning)
                                     for each in examples])
        return [(each.family.prediction(output, each.latent) - want).abs().max().item()
                for each, (output, _), want in zip(examples, results, wanted)]


@pytest.mark.parametrize("name, options, left_out, other", [
    ("Wan", ({}, {}), ("clip_fea",), {}), ("Wan VACE", ({}, {}), (), {"vace_strength.0": 0.2}),
    ("HunyuanVideo", ({"apart": True}, {}), (), {}),
    ("HunyuanVideo", ({"apart": True}, {"apart": True, "num_text_tokens": 11}), (), {}),
    ("Qwen-Image", ({"references": ((4, 4),), "method": "index_timestep_zero"}, {"references": ((4, 4),)}), (), {})],
    ids=["Wan's picture", "Wan VACE's strength", "HunyuanVideo's given frame", "and the text with it",
         "Qwen-Image's time of references"])
def test_what_a_model_remembers_for_its_blocks_is_of_the_forward_that_runs(name, options, left_out, other):
    for errors in run_ranks(remembered, 2, name, options, left_out, other):
        within(max(errors), EXACT)


def warmed_up(rank, world_size, name, layout):
    """(largest difference of two forwards that take turns from the model's own,
    of what they keep from what each keeps alone)."""
    with torch.no_grad(), InDouble():
        examples, wanted = two_forwards(name, SHAPES)
        mesh, hooks, loaded = on_shares(examples[0], layout, world_size)

        def contexts():
            return [loaded.context(mesh, Traffic(), each.latent, each.timestep, each.conditioning,
                                   key_values=KeyValues(), num_images=len(each.latent)) for each in examples]
        alone, together = contexts(), contexts()
        for context in alone:
            hooks.run(context)
        results = hooks.run_in_turn(together)
        predicted = [each.family.prediction(output, each.latent) for each, (output, _) in zip(examples, results)]
        cached = [(mine.key_values.cached[key].both_KBNTH, entry.both_KBNTH) for mine, other in zip(together, alone)
                for key, entry in other.key_values.cached.items()]
        assert (cached and all(len(mine.key_values.cached) == len(other.key_values.cached)
                             for mine, other in zip(together, alone)))
        return [max((mine - want).abs().max().item() for mine, want in pairs)
                for pairs in (zip(predicted, wanted), cached)]


@pytest.mark.parametrize("name, layout",
                         [("Wan", ULYSSES), ("LTX-Video", RING), ("Z-Image", RING), ("Kandinsky 5", ULYSSES),
                          ("HiDream-I1", ULYSSES)], ids=str)
def test_steps_that_warm_stages_up_by_sequence_take_turns(name, layout):
    """What they keep for the patches that follow is each branch's own."""
    for errors in run_ranks(warmed_up, sequence_ranks(layout), name, layout):
        within(max(errors), EXACT)


def one_fails(rank, world_size, name, layout):
    """What is torch's attention after the second of two forwards has failed, and which forwards have ended by then."""
    plain, ended = F.scaled_dot_product_attention, []
    with torch.no_grad(), InDouble():
        examples, _ = two_forwards(name, SHAPES)
        mesh, hooks, loaded = on_shares(examples[0], layout, world_size)
        contexts = [loaded.context(mesh, Traffic(), each.latent, each.timestep, each.conditioning) for each in examples]
        attention = examples[0].model.blocks[1].attn1
        attend, norm = attention.forward, attention.norm_k.forward

        def noted(*args, **kwargs):
            which = int(hooks._context is contexts[1])
            try:
                return attend(*args, **kwargs)
            finally:
                ended.append(which)

        def failing(tensor):
            if hooks._context is contexts[1]:
                raise ValueError("the second")
            return norm(tensor)
        attention.forward, attention.norm_k.forward = noted, failing
        with pytest.raises(ValueError, match="the second") as failure:
            hooks.run_in_turn(contexts)
        # which keeps the frames until here
        return F.scaled_dot_product_attention is plain, ended, failure.type.__name__


def test_when_one_of_two_forwards_fails_the_other_ends():
    """At once, within its attention: later it would take another forward's from where torch's is."""
    for is_plain, ended, _ in run_ranks(one_fails, 4, "Wan", ULYSSES):
        assert is_plain and ended == [1, 0]


def test_turns_notice_what_is_known_of_another_forward():
    """Tokens shared out as the other's: with sequence parallelism they do not go together."""
    with pytest.raises(Exception, match="tokens, the tensor has"):
        run_ranks(in_turn, 4, "Flux.1", ULYSSES, SHAPES, True)


def test_parts_may_be_of_unlike_sizes():
    """Of 32 channels of a feed-forward one of three ranks has ten.
    Heads are not shared: one rank of three would have none."""
    split, whole = Split("colwise", 0, (32, 32)), torch.arange(64.0)[:, None].expand(64, 2)
    own = [split.own(whole, 3, rank) for rank in range(3)]

    assert split.sizes(3) == [22, 22, 20] == [len(each) for each in own]
    assert own[2][:, 0].tolist() == [*range(22, 32), *range(54, 64)]


def norm_of_own_heads():
    def place(attention, path, sizes, current):
        for norm in map(attention.get_submodule, sizes):
            norm.forward = lambda x, norm=norm: torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
    tensor._install_norms = place


def bias_of_every_rank():
    narrow = zoo.narrow
    zoo.narrow = lambda model, splits, degree, rank: narrow(model, splits, degree, 0)


def gate_of_another_part():
    """The halves of a gated layer are split as if they were one."""
    own = Split.own
    Split.own = lambda self, *arguments: own(Split(self.how, self.dim, (sum(self.parts),) if self.parts else ()),
                                             *arguments)


def rotary_tables_of_the_first_heads():
    tensor._of_own_heads = lambda forward, names, current: lambda *args, image_rotary_emb=None, **kwargs: forward(
        *args, image_rotary_emb=image_rotary_emb and tuple(table.chunk(2, -1)[0] for table in image_rotary_emb),
        **kwargs)


def modulation_in_another_order():
    gather = tensor.all_gather
    tensor.all_gather = lambda own, sizes, dim, *others: torch.cat(
        gather(own, sizes, dim, *others).chunk(2, dim)[::-1], dim)


def text_is_not_added_up():
    summed = tensor._summed
    tensor._summed = lambda forward, only_first, current: summed(forward, True, current)


MUTANTS = {function.__name__: function for function in (
    norm_of_own_heads, bias_of_every_rank, gate_of_another_part, rotary_tables_of_the_first_heads,
    modulation_in_another_order, text_is_not_added_up)}


@pytest.mark.slow
@pytest.mark.parametrize("mutant, name", [
    ("norm_of_own_heads", "Wan"), ("bias_of_every_rank", "SD3"), ("gate_of_another_part", "Flux.2"),
    ("rotary_tables_of_the_first_heads", "LTX-Video"), ("modulation_in_another_order", "Flux.1"),
    ("text_is_not_added_up", "Qwen-Image")])
def test_exactness_notices_a_broken_method(mutant, name):
    results = run_ranks(forward, 2, name, Layout(tensor_degree=2), SHAPES[:1], mutant)

    assert largest(results) > 1e-6


@pytest.mark.parametrize("name", having("tensor"))
def test_the_table_says_which_families_it_is_for(name):
    row = next(line for line in MODELS_PAGE.splitlines() if line.startswith(f"| {FAMILIES[name].title} |"))

    assert row.endswith("| yes |") and is_spread(name)


def test_a_share_of_a_model_is_not_run_outside_of_a_run():
    """No context says who has the other shares."""
    one = example("SD3")
    Hooks(one.model, one.family.plan, hold_share(one.model, one.family.plan, 2, 0))

    with pytest.raises(AssertionError, match="weights are sharded: run its forward through ModelHooks.run"):
        one.run()


def test_a_layer_that_nothing_is_known_of_is_refused():
    one = example("SD3")
    one.model.transformer_blocks[1].attn.to_more = torch.nn.Linear(4, 4)

    with pytest.raises(UnsupportedError, match="tensor parallelism does not know layer attn.to_more of a "
                                               "JointTransformerBlock"):
        tensor_splits(one.model, one.family.plan)
