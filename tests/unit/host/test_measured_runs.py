"""Stored measurements of runs: comparison with one device, limits, and files that are damaged."""

import json

import pytest

from xdit_backend.host.measured_runs import FILE, ONE_DEVICE, MeasuredRuns
from xdit_backend.host.run_store import MAX_BYTES, MAX_RUNS

WORK, OTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def runs(tmp_path):
    return MeasuredRuns(lambda: tmp_path)


def test_a_run_is_compared_with_the_same_run_on_the_faster_of_its_devices(runs, tmp_path):
    runs.record(WORK, ["slow"], ONE_DEVICE, 3.0)
    runs.record(WORK, ["fast"], ONE_DEVICE, 2.0)
    runs.record(OTHER, ["fast"], ONE_DEVICE, 1.0)
    runs.record(WORK, ["slow", "fast"], "CFG 2", 0.5)

    for known in (runs, MeasuredRuns(lambda: tmp_path)):       # also after a restart
        assert known.on_one_device(WORK, ("slow", "fast")).step_s == 2.0
        assert known.on_one_device(WORK, ("slow", "slow")).step_s == 3.0
        assert known.on_one_device(WORK, ("another",)) is None
        assert known.find(WORK, ("slow", "fast"), "CFG 2").step_s == 0.5
        assert known.find(WORK, ("fast", "slow"), "CFG 2") is None


def test_the_last_measurement_of_a_run_counts(runs):
    for step_s in (3.0, 4.0):
        runs.record(WORK, ["gpu"], ONE_DEVICE, step_s)

    assert runs.on_one_device(WORK, ["gpu"]).step_s == 4.0


def test_the_oldest_measurements_are_dropped(runs, tmp_path):
    for number in range(MAX_RUNS + 2):
        runs.record(f"{number:016x}", ["gpu"], ONE_DEVICE, 1.0)
    runs.record(f"{2:016x}", ["gpu"], ONE_DEVICE, 1.0)         # measured again: the newest now
    runs.record(OTHER, ["gpu"], ONE_DEVICE, 1.0)

    stored = MeasuredRuns(lambda: tmp_path)
    assert len(json.loads((tmp_path / FILE).read_text())["runs"]) == MAX_RUNS
    found = [stored.on_one_device(f"{number:016x}", ["gpu"]) is not None for number in range(5)]
    assert found == [False, False, True, False, True]


RUN = {"work": WORK, "gpus": ["gpu"], "layout": ONE_DEVICE, "step_s": 1.0, "date": "2026-11-29"}


def test_a_stored_file_is_read(runs, tmp_path):
    (tmp_path / FILE).write_text(json.dumps({"version": 1, "runs": [RUN]}))

    assert runs.on_one_device(WORK, ["gpu"]).date == "2026-11-29"


@pytest.mark.parametrize("stored", [
    "", "[]", "{", json.dumps({"version": 2, "runs": [RUN]}),
    json.dumps({"version": 1, "runs": [RUN] * (MAX_RUNS + 1)}), " " * (MAX_BYTES + 1),
    *(json.dumps({"version": 1, "runs": [RUN | change]}) for change in (
        {"step_s": 0.0}, {"step_s": -1.0}, {"step_s": "1"}, {"step_s": 1e999}, {"work": "../x"}, {"gpus": []},
        {"date": "<b>"}, {"more": 1}))], ids=lambda text: text[:80])
def test_a_damaged_file_is_ignored_and_replaced(runs, tmp_path, caplog, stored):
    (tmp_path / FILE).write_text(stored)

    assert runs.on_one_device(WORK, ["gpu"]) is None and "are ignored" in caplog.text
    runs.record(WORK, ["gpu"], ONE_DEVICE, 2.0)
    assert MeasuredRuns(lambda: tmp_path).on_one_device(WORK, ["gpu"]).step_s == 2.0


def test_a_folder_that_cannot_be_written_to_does_not_fail_a_run(tmp_path, caplog):
    (tmp_path / "file").touch()
    runs = MeasuredRuns(lambda: tmp_path / "file" / "below")

    runs.record(WORK, ["gpu"], ONE_DEVICE, 2.0)

    assert runs.on_one_device(WORK, ["gpu"]).step_s == 2.0 and "cannot be stored" in caplog.text
