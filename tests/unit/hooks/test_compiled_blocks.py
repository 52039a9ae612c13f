"""Blocks as torch.compile makes them: every family under every method gives what it gives as it is, each kind of block
has one graph, and what cannot be compiled is refused in words."""

import itertools

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import tests.support.reusing_backend  # noqa: F401
from tests.support.compare_single_device import errors_of, layouts_of, words
from tests.support.model_zoo import CONFIGS, UNETS, WHOLE, example
from tests.support.tolerances import within
from xdit_backend.distributed import custom_ops
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import SINGLE
from xdit_backend.hooks import attention_dispatch, compiled_blocks
from xdit_backend.hooks.attention_dispatch import AttentionFunctions
from xdit_backend.hooks.forward_context import CPU, ForwardContext, ModelPatches
from xdit_backend.hooks.injected_networks import Network
from xdit_backend.hooks.replicated_unet import ReplicatedHooks
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.hooks.unet import UNetHooks
from xdit_backend.memory.staging import PinnedAhead
from xdit_backend.models.common.family import derived
from xdit_backend.models.common.plan import ModelPlan
from xdit_backend.parallel.stale_kv_cache import KeyValues
from xdit_backend.partition import cut_patches
from xdit_backend.protocol.errors import UnsupportedError
from xdit_backend.protocol.specs import ForwardOptions, NetworkSpec, NetworkUse

EXACT, EXACT_STEP = 1e-12, 1e-10
ROUNDED = 1e-3                 # where models of tensor shards round to float32 within, which tests else keep from them
DRAWN = ("Flux.1", "Wan", "Qwen-Image", "SD3", "Z-Image", "HiDream-I1")
METHODS = ("plain", "kept")
UNCOMPILED = ("SeedVR2",)
NUMBERS = itertools.count()                # of backends that a test registers


@pytest.fixture(autouse=True)
def _no_graphs():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def forward(one, hooks, backend="reusing", latent=None, timestep=None, patch=None, control=(), networks=(), **keeping):
    context = one.loaded(hooks).context(SINGLE, Traffic(), one.latent if latent is None else latent,
                                        one.timestep if timestep is None else timestep, one.conditioning, patch,
                                        options=ForwardOptions(compile_backend=backend),
                                        patches=ModelPatches(networks=networks), **keeping)
    context.patches.control = PinnedAhead(dict(control), CPU)
    return hooks.run(context)[0]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in DRAWN else pytest.mark.slow)
                                  for name in CONFIGS if name not in UNCOMPILED])
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

    assert all(getattr(module, "once_output", None) is None for module in one.model.modules())
    kinds = len({(type(block), list_.name) for list_ in one.family.plan.lists
                 for block in one.model.get_submodule(list_.name)})
    assert graphs[0] > 0 and graphs[1] == graphs[2] <= 2 * (kinds + 2) and not counters["graph_break"]


@pytest.mark.parametrize("keeping", [{}, {"key_values": KeyValues(), "first_image": 0, "num_images": 1}])
@pytest.mark.parametrize("name", UNCOMPILED)
def test_blocks_that_cannot_be_compiled_are_refused(name, keeping):
    one = example(name)

    with pytest.raises(UnsupportedError, match="^Set compile to off .* sizes of their windows"):
        forward(one, Hooks(one.model, one.family.plan), **keeping)


ALL = [(name, layout) for name in CONFIGS if name not in UNCOMPILED for layout in layouts_of(name, 1)]
FEW = [("Flux.1", "ulysses"), ("Wan", "tensor"), ("Z-Image", "pipefusion")]


def check(requested, folder, weights_memory=0):
    """Each on two ranks: whole files, two branches and two images a step."""
    outcomes = errors_of(requested, folder, 2, weights_memory=weights_memory, compile_backend="reusing")
    assert outcomes.keys() == set(requested)
    raised = [f"{name}, {words(layout)}: {error}" for (name, layout), error in outcomes.items()
              if isinstance(error, Exception)]
    assert raised == []
    for (name, layout), error in outcomes.items():
        within(error, ROUNDED if layout.tensor_degree > 1 else EXACT_STEP, f"{name}, {words(layout)}")


def test_steps_of_two_ranks_are_the_same_compiled(tmp_path):
    check([(name, layout) for name, layout in ALL if (name, words(layout)) in FEW], tmp_path)


@pytest.mark.parametrize("shape, gathered", [((2, 3, 4, 5), (2, 3, 8, 5)), ((2, 3, 4), (2, 3, 8))],
                         ids=["image", "audio"])
def test_a_graph_knows_the_shape_of_the_rows_of_all_ranks(shape, gathered):
    """Of the feed-forward layers that read their neighbours' rows: Sana's of an image, ACE-Step's of sound."""
    with FakeTensorMode():
        assert custom_ops.sequence_rows(torch.empty(shape), 2).shape == gathered


def test_branches_take_turns_between_compiled_blocks_whose_weights_come(tmp_path):
    coming = [("Flux.1", "ulysses"), ("SDXL", "data")]
    check([(name, layout) for name, _ in coming for layout in layouts_of(name, 1) if (name, words(layout)) in coming],
          tmp_path, weights_memory=1)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_steps_of_every_family_are_the_same_compiled(tmp_path, part):
    """Under two methods each, of which every family has others."""
    requested = []
    for number, name in enumerate(CONFIGS):
        layouts = [layout for of, layout in ALL if of == name]
        requested += [(name, layouts[(number + step) % len(layouts)]) for step in (0, 3) if layouts
                      and number % 2 == part]
    check(dict.fromkeys(requested), tmp_path)


@pytest.mark.parametrize("name", [*UNETS, *WHOLE])
def test_unets_blocks_are_compiled_where_each_rank_has_whole_images(name):
    one = example(name, rows=16, columns=16)
    wanted, hooks, graphs = one.run(), (ReplicatedHooks if name in WHOLE else UNetHooks)(one.model, one.family.plan), []
    for _ in range(2):
        within((one.family.prediction(forward(one, hooks), one.latent) - wanted).abs().max().item(), EXACT)
        graphs.append(counters["stats"]["unique_graphs"])

    assert graphs[0] == graphs[1] > 5 and not counters["graph_break"]


def test_what_a_controlnet_gives_is_added_around_graphs():
    """At every place, to outputs of blocks that are compiled and to what they are made of; other numbers, no graph."""
    one, counted = example("SDXL", rows=16, columns=16), []
    hooks = UNetHooks(one.model, one.family.plan)
    for scale in (1, 2):
        shapes = one.family.control_shapes(one.config, one.latent.shape)
        control = {place: scale * torch.randn(1, *shape, dtype=torch.float64) for place, shape in shapes.items()}
        out, plain = (forward(one, hooks, backend, control=control) for backend in ("reusing", ""))
        counted.append(counters["stats"]["unique_graphs"])

        within((out - plain).abs().max().item(), EXACT)
        assert (forward(one, hooks) - plain).abs().max() > 1e-3
    assert counted[0] == counted[1]


def of_a_query(width, size=4):
    """Weights of an LLLite for what the first block's queries are made of."""
    name, shapes = "lllite_dit_blocks_0_self_attn_q_proj", {
        "depth_embed": (size,), "cond_to_film.weight": (2 * size, size), "cond_to_film.bias": (2 * size,),
        "down.weight": (size, width), "down.bias": (size,), "mid.weight": (size, 2 * size), "mid.bias": (size,),
        "up.weight": (width, size), "up.bias": (width,)}
    return {f"{name}.{part}": torch.randn(shape, dtype=torch.float64) for part, shape in shapes.items()}


def test_layers_that_a_network_leads_run_as_they_are():
    """No graph knows of it; those of other forwards stay."""
    one = example("Anima")
    hooks = Hooks(one.model, one.family.plan)
    plain = forward(one, hooks, "")
    weights = of_a_query(one.model.transformer_blocks[0].attn1.to_q.in_features)
    led = NetworkUse("lllite", "layers", 1.0, "image"), Network(NetworkSpec("lllite", {}), weights, CPU)
    image = {"image": torch.randn(1, one.family.inputs.latent.num_tokens(one.latent.shape), 4, dtype=torch.float64)}
    graphs = []
    for networks in ((), (led,), (led,), ()):
        out = [forward(one, hooks, backend, control=image, networks=networks) for backend in ("reusing", "")]
        within((out[0] - out[1]).abs().max().item(), EXACT)
        graphs.append(counters["stats"]["unique_graphs"])
        assert ((out[0] - plain).abs().max() > 1e-6) == bool(networks)
    assert len(set(graphs)) == 1


def complex_steps(name):
    """Steps of a model's graphs whose results are complex numbers."""
    one, found = example(name), []

    def backend(graph, inputs):
        found.extend(node.name for node in graph.graph.nodes if node.op != "placeholder"
                     and torch.is_tensor(node.meta.get("example_value")) and node.meta["example_value"].is_complex())
        return graph.forward
    backend_name = f"complex steps {next(NUMBERS)}"
    torch._dynamo.register_backend(backend, name=backend_name)
    forward(one, Hooks(one.model, one.family.plan), backend_name)
    return found


ROTATED = ["Qwen-Image", "Lumina 2", "Z-Image"]                # by complex numbers where they are not compiled


@pytest.mark.parametrize("name", ROTATED)
def test_graphs_rotate_by_real_numbers(name, monkeypatch):
    """Inductor has no code for complex ones."""
    assert not complex_steps(name)
    monkeypatch.setattr(attention_dispatch, "in_real_numbers", lambda rotate: rotate)
    monkeypatch.setattr(attention_dispatch, "in_pairs", lambda function: function)
    torch._dynamo.reset()
    assert complex_steps(name)


@pytest.mark.slow
def test_inductor_compiles_them_too():
    """What people run: rounded otherwise than without it, as compilers add up in another order."""
    one = example("Flux.1")
    wanted, hooks = one.run(), Hooks(one.model, one.family.plan)

    within((one.family.prediction(forward(one, hooks, "inductor"), one.latent) - wanted).abs().max().item(), 1e-10)


def test_what_cannot_be_compiled_is_refused_in_words():
    """HiDream's experts are chosen by numbers on the device, for which no graph can be made."""
    one = example("HiDream-I1")

    with pytest.raises(UnsupportedError, match="^Set compile to off in xDiT Parallel Config, or remove TorchCompileM"):
        forward(one, Hooks(one.model, derived(ModelPlan, one.family.plan)))          # without graph_breaks


def test_more_shapes_than_there_may_be_graphs_are_compiled_anew(monkeypatch):
    monkeypatch.setattr(compiled_blocks, "MAX_GRAPHS", 2)
    one = example("Wan")
    hooks = Hooks(one.model, one.family.plan)
    for rows in (4, 6, 8, 10):
        latent = one.latent[..., :1, :].repeat(1, 1, 1, rows, 1)
        assert torch.equal(forward(one, hooks, latent=latent), forward(one, hooks, "", latent=latent))


@pytest.mark.parametrize("mutant", ["name", "once"])
def test_a_graph_that_asks_wrongly_is_seen(monkeypatch, mutant):
    """An attention that is taken for one that no method shares; outputs of another step, taken for this one's."""
    one, kept = example("Flux.1"), KeyValues()
    hooks = Hooks(one.model, one.family.plan)
    patches = cut_patches(one.latent.shape, one.family.inputs.latent.patch, 2)

    def step(backend, kept, timestep):
        keeping = {"key_values": kept, "first_image": 0, "num_images": 1}
        forward(one, hooks, backend, timestep=timestep, **keeping)
        return torch.cat([forward(one, hooks, backend, one.latent.narrow(patch.dim, patch.start, rows), timestep, patch,
                                  **keeping) for patch, rows in patches], 1)
    times = one.timestep, one.timestep / 2
    wanted = [step("", kept, time) for time in times]
    if mutant == "name":
        monkeypatch.setattr(AttentionFunctions, "traced", lambda self, name, forward, args, kwargs: forward(*args,
                                                                                                         **kwargs))
    else:
        monkeypatch.setattr(ForwardContext, "moment", lambda self, span, batch: (self.first_image, batch))
    kept = KeyValues()

    assert not all(torch.allclose(step("reusing", kept, time), of_step, atol=1e-6)
                   for time, of_step in zip(times, wanted))


class Elsewhere:
    """A processor that attends by none of PyTorch's functions."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        return hidden_states * 2, encoder_hidden_states * 2


def test_an_attention_that_does_not_come_to_the_operator_is_refused():
    one = example("Flux.1")
    hooks = Hooks(one.model, one.family.plan)
    for block in one.model.transformer_blocks:
        block.attn.processor = Elsewhere()

    with pytest.raises(UnsupportedError, match="^Set compile to off"):
        forward(one, hooks)
