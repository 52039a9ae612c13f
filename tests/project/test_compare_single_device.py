"""The steps that products of methods are compared by."""

import functools

import pytest

from tests.support.compare_single_device import EXACT, as_folder, errors_of_saved, execute
from xdit_backend.distributed.collectives import RingExchange
from xdit_backend.protocol.specs import Layout


def with_ring_exchanges(rank, world_size, runs):
    """As compare_single_device.execute; fails where keys and values go round no ring."""
    begun, begin = [], RingExchange.__init__

    def counting(self, *arguments):
        begun.append(arguments)
        begin(self, *arguments)
    RingExchange.__init__ = counting
    execute(rank, world_size, runs)
    assert begun


@pytest.mark.parametrize("seed", [0, 1])
def test_one_step_of_two_exchanges_keys_and_values_in_a_ring(tmp_path, seed):
    """What keeps them for patches gathers them instead."""
    requested, saved_of = [("SD3", Layout(ring_degree=2))], functools.partial(as_folder, folder=tmp_path,
                                                                          num_text_tokens=(7, 9, 7))
    error, = errors_of_saved(requested, saved_of, 2, execute=with_ring_exchanges, seed=seed).values()

    assert not isinstance(error, Exception) and error <= EXACT
