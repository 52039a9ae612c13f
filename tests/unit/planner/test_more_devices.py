"""On how many devices a run would fit, as refusals say it."""

import pytest

from xdit_backend.config import ParallelConfig
from xdit_backend.planner.cost_model import Degrees, Job, ModelDims
from xdit_backend.planner.memory_model import rank_memory
from xdit_backend.planner.more_devices import MOST_SUGGESTED, placement_that_fits
from xdit_backend.planner.planner import memory_settings
from xdit_backend.protocol.specs import Stages

NET = ModelDims(60, 3072, 24, 12.0, 12e9, weight_bytes=24e9, outside_bytes=0.4e9)
JOB = Job(4096, 512, 20)


def needed(degree):
    return rank_memory(NET, JOB, Degrees(pipefusion=degree, num_patches=2 * degree),
                       memory_settings(ParallelConfig(), Stages(2))).total


@pytest.mark.parametrize("degree", [3, 12])
def test_the_least_number_of_devices_is_told(degree):
    assert needed(degree) < needed(degree - 1)

    assert placement_that_fits(ParallelConfig(), NET, {}, JOB, needed(degree)) == [
        f"pipefusion_degree={degree} on as many devices like these"]


def test_more_devices_than_people_have_are_not_told():
    assert MOST_SUGGESTED < 20 and needed(20) < needed(15)

    assert placement_that_fits(ParallelConfig(), NET, {}, JOB, needed(20)) == []
