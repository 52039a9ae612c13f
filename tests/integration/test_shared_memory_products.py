"""Products of methods over shared memory: every prediction has the bits that it has over gloo, whoever is late."""

import itertools
import random

import pytest
import torch

from tests.support import compare_single_device, shared_memory
from tests.support.compare_single_device import Run, as_folder, execute, layouts_of, words
from tests.support.ranks import run_ranks
from tests.support.tolerances import within
from xdit_backend.models import FAMILIES
from xdit_backend.protocol.shared_memory import SegmentStore

TEXTS = (7, 9, 7)                          # two steps: one keeps keys and values, one exchanges them in a ring
SAMPLED = 3


def differing(requested, folder, world_size, late_rank, seed=0):
    """[products whose predictions over shared memory have other bits than over gloo], compared with one device too."""
    store, requests, families, runs = SegmentStore(), itertools.count(1), {}, {}
    try:
        for name, layout in requested:
            if name not in families:
                families[name] = as_folder(name, folder, TEXTS)
            runs[name, layout] = Run(families[name], layout, store, requests, 0, "", seed)
        every = compare_single_device._in_a_row(runs.values())
        run_ranks(execute, world_size, every)
        wanted = {key: [part.clone() for part in run.made] for key, run in runs.items()}
        for run in runs.values():
            for part in run.made:
                part.fill_(torch.nan)
        run_ranks(shared_memory.execute, world_size, every, str(folder), late_rank)
        for run in runs.values():
            within(run.error, compare_single_device.EXACT)
        return [f"{name}, {words(layout)}" for (name, layout), run in runs.items()
                if not all(torch.equal(one, other) for one, other in zip(run.made, wanted[name, layout]))]
    finally:
        store.close()


@pytest.mark.parametrize("late_rank", [0, 3])
def test_products_that_are_drawn_have_the_bits_of_gloos(request, tmp_path, late_rank):
    seed = request.config.option.smoke_seed
    every = [(name, layout) for name in ("SD3", "Flux.1", "Wan") for layout in layouts_of(name, 2)]
    requested = random.Random(f"{seed} {late_rank}").sample(every, SAMPLED)

    assert not differing(requested, tmp_path, 4, late_rank, seed)


@pytest.mark.slow
@pytest.mark.everyone
@pytest.mark.parametrize("num_methods", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_product_has_the_bits_of_gloos(request, tmp_path, name, num_methods):
    seed, world_size = request.config.option.smoke_seed, 2 ** num_methods
    requested = [(name, layout) for layout in layouts_of(name, num_methods)]
    late_rank = random.Random(f"{seed} {name}").randrange(world_size)

    assert not differing(requested, tmp_path, world_size, late_rank, seed)
