"""Calls that attend to what an earlier one has kept of its references equal the model whose attention is given just
that, in float64; a broken one does not."""

import dataclasses
import statistics

import pytest
import torch

from tests.support.model_zoo import CONFIGS, example
from tests.support.ranks import run_ranks
from tests.support.tolerances import within
from tests.unit.hooks.test_hooks import EXACT, LAYOUTS, num_ranks
from xdit_backend.checkpoints.model_dims import dims_of
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import build_mesh
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.models import FAMILIES
from xdit_backend.parallel.reference_kv_cache import References, ReferenceUse
from xdit_backend.planner.cost_model import Degrees, Job
from xdit_backend.planner.memory_model import rank_memory

METHOD = {"Flux.2": "index_timestep_zero"}    # of others, ComfyUI's model fails at that
NAMES = [name for name in CONFIGS if FAMILIES[name].plan.cached_references]
ROWS = ("run", 0), ("run", 1)


class Oracle:
    """In the place of what diffusers' attentions call: keeps the last keys and values of a first forward, and gives
    them to others. images: which of them."""

    def __init__(self, one):
        self.module = __import__(type(one.model).__module__, fromlist=["dispatch_attention_fn"])
        self.attend, self.cached, self.images = self.module.dispatch_attention_fn, [], None

    def __call__(self, query, key, value, **options):
        if self.images is None:
            self.cached.append((key[:, -self.num_tokens:], value[:, -self.num_tokens:]))
        else:
            keys, values = next(self.coming)
            key, value = torch.cat([key, keys[self.images]], 1), torch.cat([value, values[self.images]], 1)
        return self.attend(query, key, value, **options)

    def run(self, one, images=None):
        self.images, self.coming = images, iter(self.cached)
        self.num_tokens = one.family.inputs.lengths["reference"](one.conditioning)
        self.module.dispatch_attention_fn = self
        try:
            return one.run()
        finally:
            self.module.dispatch_attention_fn = self.attend


def calls_of(name):
    """A first call of two images with references, a later one of both, and one of the second alone."""
    shape = {"rows": 6, "columns": 10, "batch": 2}
    first = example(name, references=[(4, 6), (5, 3)], method=METHOD.get(name, "offset"), **shape)
    later = dataclasses.replace(example(name, **shape, seed=5), model=first.model)
    second = dataclasses.replace(later, latent=later.latent[1:], times=later.times[1:], timestep=later.timestep[1:],
                                 conditioning={key: tensor[1:] for key, tensor in later.conditioning.items()})
    return [(first, ROWS, None), (later, ROWS, [0, 1]), (second, ROWS[1:], [1])]


def difference(rank, world_size, name, layout, mutant=None):
    """(the largest difference of each call from the oracle's, bytes that the rank keeps)."""
    torch.set_grad_enabled(False)
    if mutant is not None:
        MUTANTS[mutant]()
    calls, mesh = calls_of(name), build_mesh(layout, world_size)
    oracle, references = Oracle(calls[0][0]), References()
    want = [oracle.run(one, images) for one, _, images in calls]
    hooks, found = Hooks(calls[0][0].model, FAMILIES[name].plan), []
    for (one, rows, images), wanted in zip(calls, want):
        use = ReferenceUse(references, rows, images is None, "reference")
        context = one.loaded(hooks).context(mesh, Traffic(), one.latent, one.timestep, one.conditioning, references=use)
        with hooks.serving(context):
            found.append((one.run() - wanted).abs().max().item())
    num_bytes = references.num_bytes
    references.drop(["run"])
    assert references.num_bytes == 0
    return found, num_bytes


def keys_of_the_image():
    """What is kept begins with the first tokens."""
    ReferenceUse._slots = lambda self, context, streams: [slice(0, context.tokens.own((self.stream,)))]


def kept_of_the_first_image():
    of = References.of
    References.of = lambda self, rows, key: of(self, (ROWS[0],) * len(rows), key)


MUTANTS = {function.__name__: function for function in (keys_of_the_image, kept_of_the_first_image)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["ulysses2", "ring3", "ring2-ulysses2"])
def test_later_calls_attend_to_kept_references(name, layout):
    """Of fewer reference tokens a rank than of others, and uneven ones."""
    results = run_ranks(difference, num_ranks(LAYOUTS[layout]), name, LAYOUTS[layout])

    within(max(max(found) for found, _ in results), EXACT)
    net = dataclasses.replace(dims_of(FAMILIES[name], example(name).model), element_bytes=8)
    references = calls_of(name)[0][0].family.inputs.lengths["reference"](calls_of(name)[0][0].conditioning)
    job = Job(6 * 10, 7 + references, steps=1, images=2, cached=references)
    degrees = Degrees(ulysses=LAYOUTS[layout].ulysses_degree, ring=LAYOUTS[layout].ring_degree)
    cached = statistics.mean(num_bytes for _, num_bytes in results)
    assert rank_memory(net, job, degrees).keys_values == pytest.approx(cached)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_exactness_notices_other_references(mutant):
    results = run_ranks(difference, 2, "Flux.2", LAYOUTS["ulysses2"], mutant)

    assert max(max(found) for found, _ in results) > 1e-6
