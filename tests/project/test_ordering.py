"""The tests run in the order that was asked for, the same in every process."""

import collections
import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.conftest import ROOT
from tests.support.ordering import FIRST, arrange, committed, start_busy

Item = collections.namedtuple("Item", "nodeid")
Config = collections.namedtuple("Config", "option")
WRITTEN = [Item(f"tests/test_{file}.py::test_{name}") for file in "abcdef" for name in "ghijkl"]


def arranged(order, seed=None, items=WRITTEN):
    items = list(items)
    arrange(items, order, seed)
    return items


def test_written_is_as_it_was_and_reverse_from_the_end():
    first = Item(f"{FIRST}test_a")

    assert arranged("written") == WRITTEN and arranged("reverse") == WRITTEN[::-1]
    assert arranged("written", items=[*WRITTEN, first]) == [first, *WRITTEN]


@pytest.mark.parametrize("seed", range(5))
def test_a_drawn_order_keeps_files_together_and_a_part_of_it_is_in_the_same_order(seed):
    drawn, part = arranged("random", seed), WRITTEN[::3]
    files = [item.nodeid.partition("::")[0] for item in drawn]

    assert sorted(drawn) == WRITTEN and drawn not in (WRITTEN, arranged("random", seed + 1))
    assert sum(one != other for one, other in zip(files, files[1:])) == 5 and files != sorted(files)
    assert [item for item in drawn
            if item in part] == arranged("random", seed, part) == arranged("random", seed, part[::-1])


def test_what_is_drawn_is_of_the_day_of_the_commit_and_another_each_time_where_files_differ_from_it(tmp_path):
    def git(*words, day="2026-01-01"):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True,
                       capture_output=True, env=os.environ | {"GIT_COMMITTER_DATE": f"{day}T12:00:00+00:00"})

    git("init")
    found = []
    for text, day in (("one", "2026-01-01"), ("two", "2026-01-01"), ("three", "2026-01-02")):
        (tmp_path / "file").write_text(text)
        if found:
            assert committed(tmp_path) is None
        git("add", "file")
        git("commit", "-m", "a commit", day=day)
        found.append(committed(tmp_path))
    (tmp_path / "left.log").write_text("of a run")

    assert found == ["2026-01-01", "2026-01-01", "2026-01-02"] and committed(tmp_path) == found[2]
    assert committed(tmp_path.parent / "nowhere") is None


@pytest.mark.slow
def test_all_processes_draw_the_same_order():
    """pytest-xdist refuses to run where they found tests in orders that differ."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", "--order",
               "random", "tests/project/test_ordering.py", "tests/project/test_tolerances.py", "-k", "not processes"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)

    assert result.returncode == 0 and "again with --order random --order-seed" in result.stdout, result.stdout


@pytest.mark.parametrize("left_s, ran, told", [
    (3600, "4 tests ran, 0 were skipped.", "4 passed"),
    (-1, "0 tests ran, 4 were skipped, 4 of them for want of time.", "no time left")])
def test_tests_whose_turn_comes_too_late_are_skipped_and_counted(left_s, ran, told):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", f"--until={time.time() + left_s}",
               "tests/project/test_ordering.py", "-k", "keeps_files_together and not 4"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)

    assert result.returncode == 0 and ran in result.stdout and told in result.stdout, result.stdout


def test_who_runs_beside_the_tests_is_busy():
    process, = start_busy(Config(collections.namedtuple("Option", "background_load")(1)))
    try:
        while sum(psutil.Process(process.pid).cpu_times()[:2]) < 0.1:
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()
