"""The decision of compile auto, with doubles for times: it compares an estimated saving with measured times."""

import json

import pytest

from xdit_backend.host.compile_times import COMPILE_S, FILE, SAVING_ON_CUDA, CompileTimes
from xdit_backend.host.run_store import MAX_RUNS

WORK, OTHER, GPUS = "0123456789abcdef", "fedcba9876543210", ("a GPU", "a GPU")


class Group:
    """A worker group."""


@pytest.fixture
def times(tmp_path):
    return CompileTimes(lambda: tmp_path)


def decide(times, group, num_steps, work=WORK):
    return times.decide(work, GPUS, group, num_steps, True)


def test_a_run_that_has_not_been_timed_is_not_compiled(times):
    assert not decide(times, Group(), 10 ** 6).is_compiled


def test_the_estimated_saving_over_the_planned_steps_decides(times):
    group = Group()
    times.record(WORK, GPUS, group, False, 1.0, 3.0, 10)
    least = round(COMPILE_S / SAVING_ON_CUDA) - 10     # ten steps were run in this session: as many are expected

    assert [decide(times, group, steps).is_compiled for steps in (least, least + 1)] == [False, True]
    found = decide(times, group, 200)
    assert (found.num_steps, found.compile_s) == (210, COMPILE_S)
    assert found.saved_s == pytest.approx(SAVING_ON_CUDA * 210)
    assert not decide(times, group, 200, OTHER).is_compiled


def test_measured_times_replace_the_estimates_also_in_the_next_session(times, tmp_path):
    group = Group()
    times.record(WORK, GPUS, group, False, 1.0, 3.0, 10)
    times.record(WORK, GPUS, group, True, 0.75, 13.5, 200)     # compiled in 12 s
    later, stored = CompileTimes(lambda: tmp_path), json.loads((tmp_path / FILE).read_text())["runs"]

    assert decide(times, group, 1).is_compiled and decide(times, group, 1).compile_s == 0      # by this group
    assert decide(later, Group(), 49).is_compiled and not decide(later, Group(), 47).is_compiled
    assert decide(times, Group(), 1).compile_s == pytest.approx(12.0)                          # another group
    assert [(run["eager_s"], run["compiled_s"], run["compile_s"]) for run in stored] == [(1.0, 0.75, 12.0)]
    # of another run on these GPUs, the same saving and time are expected
    later.record(OTHER, GPUS, group, False, 2.0, 4.0, 0)
    assert decide(later, Group(), 24, OTHER).saved_s == pytest.approx(12.0)
    assert decide(later, Group(), 25, OTHER).is_compiled and not decide(later, Group(), 23, OTHER).is_compiled


def test_a_model_that_compiling_slows_down_is_not_compiled_again(times):
    group = Group()
    times.record(WORK, GPUS, group, False, 1.0, 2.0, 4)
    times.record(WORK, GPUS, group, True, 1.2, 9.0, 4)

    assert not decide(times, group, 10 ** 6).is_compiled


def test_a_model_that_cannot_be_compiled_is_not_tried_again(times, tmp_path):
    group = Group()
    times.record(WORK, GPUS, group, False, 1.0, 2.0, 4)
    times.give_up(WORK, GPUS, "no compiler " * 1000)

    assert not decide(times, group, 10 ** 6).is_compiled
    assert not decide(CompileTimes(lambda: tmp_path), group, 10 ** 6).is_compiled


def test_the_second_compiled_run_does_not_replace_the_time_of_compiling(times, tmp_path):
    group = Group()
    times.record(WORK, GPUS, group, True, 0.5, 21.0, 4)
    times.record(WORK, GPUS, group, True, 0.5, 1.0, 4)

    assert json.loads((tmp_path / FILE).read_text())["runs"][0]["compile_s"] == 20.0


def test_the_file_is_bounded(times, tmp_path):
    for number in range(MAX_RUNS + 3):
        times.record(f"{number:016x}", GPUS, Group(), False, 1.0, 2.0, 1)

    stored = json.loads((tmp_path / FILE).read_text())["runs"]
    assert len(stored) == MAX_RUNS and stored[-1]["work"] == f"{MAX_RUNS + 2:016x}"


@pytest.mark.parametrize("stored", ["", "{", '{"version": 2, "runs": []}',
                                    '{"version": 1, "runs": [{"work": "a", "gpus": ["b"]}]}',
                                    f'{{"version": 1, "runs": [{{"work": "{WORK}", "gpus": ["b"], "eager_s": -1}}]}}'])
def test_a_damaged_file_is_ignored(times, tmp_path, caplog, stored):
    (tmp_path / FILE).write_text(stored)

    assert not decide(times, Group(), 10 ** 6).is_compiled and "are ignored" in caplog.text
