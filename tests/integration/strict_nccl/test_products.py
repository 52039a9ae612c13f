"""Products of methods under the simulation, and faults that it has to find."""

import random

import pytest

from tests.support import compare_single_device
from tests.support.compare_single_device import EXACT, errors_of, layouts_of, words
from tests.support.strict_nccl.referee import QUEUES
from tests.support.strict_nccl.server import strict_world
from xdit_backend.models import FAMILIES
from xdit_backend.protocol.specs import Layout

TEXTS = (7, 9, 7)                          # two steps: one keeps keys and values, one exchanges them in a ring
SAMPLED = 2
ALONE = {"cfg_degree", "data_degree"}      # under which ranks exchange nothing
FAULTS = {"swap": ("MISMATCH", Layout(ulysses_degree=2)), "skip": ("MISMATCH", Layout(ulysses_degree=2)),
          "both_send": ("DEADLOCK", Layout(ring_degree=2)), "overwrite": ("BUFFER", Layout(ring_degree=2)),
          "cross": ("DEADLOCK", Layout(ring_degree=2, ulysses_degree=2)), "early": ("", Layout(ring_degree=2))}


def strict_errors(monkeypatch, folder, queues, requested, world_size, mutant="", seed=0):
    """({product: error, or what was raised}, the StrictWorld)"""
    with strict_world(folder, queues, mutant) as world:
        monkeypatch.setattr(compare_single_device, "run_ranks", world.run_ranks)
        return errors_of(requested, folder, world_size, TEXTS, seed=seed), world


def wrong(outcomes):
    return {f"{name}, {words(layout)}": outcome for (name, layout), outcome in outcomes.items()
            if isinstance(outcome, Exception) or not outcome <= EXACT}


@pytest.mark.parametrize("queues", QUEUES)
def test_products_of_methods_that_are_drawn_keep_nccls_rules(monkeypatch, request, tmp_path, queues):
    seed = request.config.option.smoke_seed
    every = [(name, layout) for name in ("SD3", "Flux.1", "Wan") for layout in layouts_of(name, 2)
             if {degree for degree, size in vars(layout).items() if size > 1} != ALONE]
    requested = random.Random(f"{seed} {queues}").sample(every, SAMPLED)
    outcomes, world = strict_errors(monkeypatch, tmp_path, queues, requested, 4, seed=seed)

    assert not wrong(outcomes) and not world.failures and world.num_operations > 0


@pytest.mark.slow
@pytest.mark.everyone
@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("num_methods", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_product_of_methods_keeps_nccls_rules(monkeypatch, request, tmp_path, name, num_methods, queues):
    requested = [(name, layout) for layout in layouts_of(name, num_methods)]
    outcomes, world = strict_errors(monkeypatch, tmp_path, queues, requested, 2 ** num_methods,
                                    seed=request.config.option.smoke_seed)

    assert not wrong(outcomes) and not world.failures


@pytest.mark.parametrize("mutant", FAULTS)
def test_a_fault_is_found(monkeypatch, tmp_path, mutant):
    found, layout = FAULTS[mutant]
    world_size = layout.ring_degree * layout.ulysses_degree
    outcomes, world = strict_errors(monkeypatch, tmp_path, "rank", [("SD3", layout)], world_size, mutant)

    assert wrong(outcomes)
    assert [failure.partition(":")[0].split()[0] for failure in world.failures] == [found] * bool(found)
    assert all("xdit_backend/parallel/sequence_parallel.py:" in failure for failure in world.failures)


@pytest.mark.slow
def test_communicators_in_another_order_are_no_fault_where_each_has_a_queue(monkeypatch, tmp_path):
    _, layout = FAULTS["cross"]
    outcomes, world = strict_errors(monkeypatch, tmp_path, "communicator", [("SD3", layout)], 4, "cross")

    assert not wrong(outcomes) and not world.failures
