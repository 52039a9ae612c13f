"""The slow tier: its portions come round, its record says what passed, and of every slow test the default tier has a
case."""

import collections
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.programs import slow_tier
from tests.programs.slow_tier import (
    LONG_S,
    NUM_PORTIONS,
    TURN_S,
    Portion,
    Turn,
    choose_portion,
    cut,
    draw,
    function_of,
    turn,
    turns_of,
)
from tests.support.comfyui_server import ROOT
from tests.support.tiers import is_marked

CASES = [f"tests/test_{file}.py::test_{name}[{case}]" for file in "abc" for name in "de" for case in range(6)]
# of a case; three are long enough to take turns, and so does test_c.py's test_e, which is not measured
SECONDS = {"tests/test_a.py::test_d": 0.6 * TURN_S, "tests/test_a.py::test_e": LONG_S / 2,
           "tests/test_b.py::test_d": LONG_S / 3, "tests/test_b.py::test_e": TURN_S,
           "tests/test_c.py::test_d": 1.2 * TURN_S}
SHORT = {"tests/test_a.py::test_e", "tests/test_b.py::test_d"}


@pytest.fixture
def repository(tmp_path):
    """A git repository of three commits."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init")
    for number in range(3):
        git(folder, "commit", "--allow-empty", "-m", f"commit {number}")
    return folder


def git(folder, *words):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True,
                   capture_output=True)


def test_a_commit_is_counted(repository):
    found = [turn(repository)]
    git(repository, "commit", "--allow-empty", "-m", "one more")
    found.append(turn(repository))

    assert found == [Turn(3, "by the commit count 3"), Turn(4, "by the commit count 4")]


def test_a_shallow_clone_goes_by_the_hash_and_says_so(repository, tmp_path):
    git(tmp_path, "clone", "--depth", "1", repository.as_uri(), "shallow")
    first = turn(tmp_path / "shallow")
    git(repository, "commit", "--allow-empty", "-m", "one more")
    git(tmp_path, "clone", "--depth", "1", repository.as_uri(), "another")

    assert "a shallow clone has no commit count" in first.why and first.number != turn(tmp_path / "another").number
    assert first == turn(tmp_path / "shallow")


def test_without_git_the_day_counts_and_the_reason_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(time, "time", lambda: 86400.0 * 7 + 5)

    found = turn(tmp_path)

    assert found == Turn(7, f"by the day 7 since 1970: {tmp_path} is no git checkout")


def test_the_portions_of_successive_commits_are_the_whole_tier():
    portions = cut(CASES, NUM_PORTIONS, SECONDS)
    chosen = [choose_portion("commit", Turn(number, "counted")) for number in range(1268, 1268 + NUM_PORTIONS)]
    passed = [case for portion in chosen for case in CASES if portions[case] == portion.number]
    again = [choose_portion("commit", Turn(number + NUM_PORTIONS, "counted")) for number in range(1268, 1271)]

    assert {portion.number for portion in chosen} == set(range(1, NUM_PORTIONS + 1))
    assert sorted(passed) == sorted(CASES)
    assert [(portion.number, not portion.backwards) for portion in again] \
        == [(portion.number, portion.backwards) for portion in chosen[:3]]


@pytest.mark.parametrize("count", [1, 2, 5, NUM_PORTIONS])
def test_portions_are_neighbours_and_take_about_equally_long(count):
    portions = cut(CASES, count, SECONDS)
    numbers = [portions[case] for case in sorted(CASES)]
    lasting = collections.Counter()
    for case, number in portions.items():
        lasting[number] += SECONDS.get(function_of(case), slow_tier.UNMEASURED_S)

    assert numbers == sorted(numbers) and portions == cut(CASES[::-1], count, SECONDS)
    assert max(lasting.values()) <= sum(lasting.values()) / count + max(SECONDS.values())


def test_of_each_slow_test_one_case_is_drawn_and_in_time_every_case():
    seen = set()
    for seed in range(300):
        drawn = draw(CASES, seed, seed, SECONDS)
        of_functions = collections.Counter(map(function_of, drawn))
        assert set(of_functions.values()) == {1} and {*of_functions} >= SHORT
        assert sum(SECONDS.get(function, 0) for function in {*of_functions} - SHORT) <= TURN_S + max(SECONDS.values())
        seen |= drawn

    assert seen == {*CASES} and draw(CASES, 3, 1, SECONDS) == draw(CASES[::-1], 3, 1, SECONDS)


def test_long_tests_take_turns_until_each_has_run():
    turns = turns_of(map(function_of, CASES), SECONDS)
    drawn = [{*map(function_of, draw(CASES, 0, number, SECONDS))} & turns.keys() for number in range(3)]

    assert max(turns.values()) == 3 and set().union(*drawn) == turns.keys()
    assert sum(map(len, drawn)) == len(turns) and turns.keys() == {*map(function_of, CASES)} - SHORT


@pytest.mark.parametrize("backwards", [False, True])
def test_a_portion_leaves_the_others_out_and_may_run_from_its_end(monkeypatch, backwards):
    items, left_out = [Item(case, [pytest.mark.slow]) for case in CASES] + [Item("tests/test_a.py::test_quick", [])], []
    config = SimpleNamespace(
        stash={slow_tier.PORTION: Portion(2, 3, "asked for", backwards), slow_tier.TURN: Turn(0, "counted")},
        option=SimpleNamespace(smoke_seed=1),
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)))
    portions = cut(CASES, 3, slow_tier.measured())
    expected = [case for case in CASES if portions[case] == 2] + ["tests/test_a.py::test_quick"]

    slow_tier.select(config, items)

    assert [item.nodeid for item in items] == (expected[::-1] if backwards else expected)
    assert len(left_out) + len(items) == len(CASES) + 1 and not {"tests/test_a.py::test_quick"} & {
        item.nodeid for item in left_out}


class Item:
    """As much of pytest's as `select` uses."""

    def __init__(self, nodeid, marks):
        self.nodeid, self.marks = nodeid, {mark.name: mark for mark in marks}

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, marker):
        self.marks[marker.name] = marker


@pytest.mark.parametrize("requested", ["", "0/3", "4/3", "3", "x/3", "1/0", "-1/3"])
def test_a_portion_that_there_is_not_is_an_error(requested):
    with pytest.raises(pytest.UsageError, match="Give --portion commit, or a number and a count such as 3/32"):
        choose_portion(requested, Turn(1, ""))


TESTS = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("case", range(4))
def test_even(case):
    assert case != 3

@pytest.mark.slow
def test_skipped():
    pytest.skip("not here")

def test_quick():
    pass
"""


def run_portion(folder, *options):
    """Run TESTS as the tests of the repository. The output, and the records so far."""
    (folder / "test_them.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", folder,
               "-q", f"--record={folder / 'output' / 'record.jsonl'}", *options, folder / "test_them.py"]
    done = subprocess.run(list(map(str, command)), cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=600)
    file = folder / "output" / "record.jsonl"
    assert file.is_file(), done.stdout + done.stderr
    return done.stdout, [json.loads(line) for line in file.read_text().splitlines()]


def test_each_portion_says_what_passed_at_which_commit(tmp_path):
    """In one process and in two."""
    for number, processes in ((1, []), (2, ["-n", "2", "--dist", "loadfile"])):
        output, records = run_portion(tmp_path, "-m", "slow", "--portion", f"{number}/2", *processes)
        assert f"slow tier, portion {number}/2 at commit {records[-1]['commit']} (as --portion says): " in output

    assert [record["portion"] for record in records] == ["1/2", "2/2"]
    assert [sum(record[name] for record in records) for name in ("passed", "failed", "skipped", "not_reached")] \
        == [3, 1, 1, 0]
    assert [name for record in records for name in record["failures"]] == ["test_them.py::test_even[3]"]
    assert {function for record in records for function in record["seconds"]} >= {"test_them.py::test_even"}


def test_what_is_not_reached_in_time_has_not_passed(tmp_path):
    output, records = run_portion(tmp_path, "-m", "slow", "--portion", "1/1", "--until", "1")

    assert "0 passed, 0 failed, 0 were skipped, 5 were not reached in time" in output
    assert (records[0]["not_reached"], records[0]["seconds"]) == (5, {})


def collected(*options):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *options,
               "tests/project/test_ordering.py", "tests/unit/host/test_client.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return {line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line}


def test_the_default_tier_has_a_case_of_every_slow_test():
    default, slow = collected("-m", "not slow or drawn", "--smoke-seed", "5"), collected("-m", "slow")
    expected = draw(slow, 5, turn(ROOT).number, slow_tier.measured())

    assert len(slow) > 20 and slow & default == expected


def test_records_give_the_seconds_by_which_portions_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(slow_tier, "SECONDS", tmp_path / "seconds.json")
    here = Path(__file__).relative_to(ROOT).as_posix()
    first, second = f"{here}::test_even", f"{here}::test_skipped"
    (tmp_path / "record.jsonl").write_text(json.dumps({"seconds": {second: 2.0, first: 1.0, f"{here}::gone": 1.0}})
                                           + "\n" + json.dumps({"seconds": {second: 3.0}}) + "\n")

    slow_tier.main([tmp_path / "record.jsonl"])

    assert slow_tier.measured() == {first: 1.0, second: 3.0}


def test_seconds_are_of_tests_that_there_are():
    assert [function for function in slow_tier.measured() if not slow_tier.is_there(function)] == []


def test_a_name_on_a_tests_path_is_no_mark_of_it(request):
    """Keywords have the names of the test, its file and its folders: a checkout may be in a folder named slow."""
    assert request.node.name in request.node.keywords and not is_marked(request.node, request.node.name)
    request.node.add_marker(pytest.mark.everyone)
    assert is_marked(request.node, "everyone")
