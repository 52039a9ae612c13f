"""The slow tier: the cases of it that the default tier draws, the portion of it that is a commit's turn, and the record
of what ran.

`python -m tests.programs.slow_tier .ci/output/slow_tier.jsonl` writes the measured times of such records into SECONDS.
"""

import json
import math
import random
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import pytest

from tests.support import ordering
from tests.support.tiers import is_marked

ROOT = Path(__file__).resolve().parents[2]
NUM_PORTIONS = 32                          # of CI: each ends in the time that the default tier leaves
SECONDS = Path(__file__).with_name("slow_seconds.json")        # {test function: seconds of a case, measured}
LONG_S = 3.0                               # of a case, from which on a test is not drawn each time but in turn
LEAST_S = 0.01
UNMEASURED_S = LONG_S                      # so that new tests cannot make the default tier long
TURN_S = 100.0                             # of the cases that are drawn in turn, all together
COMMIT = "commit"                          # --portion's word for the commit's turn
PORTION, TURN = pytest.StashKey[object](), pytest.StashKey[object]()


def add_options(parser):
    parser.addoption("--portion", metavar="PORTION",
                     help="of the slow tests one portion alone: a number and a count such as 3/32, or "
                          f'"{COMMIT}": the portion of {NUM_PORTIONS} that is the commit\'s turn')
    parser.addoption("--record", type=Path, metavar="FILE",
                     help="with --portion: add a line of JSON to this file, with what passed at which commit")


def configure(config):
    """Choose the portion and the turn. In a process of pytest-xdist, those of the first process."""
    given = getattr(config, "workerinput", None)
    if given is not None:
        config.stash[TURN] = Turn(*given["turn"])
        config.stash[PORTION] = Portion(*given["portion"]) if given["portion"] else None
        return
    requested = config.option.portion
    config.stash[TURN] = turn(ROOT)
    config.stash[PORTION] = choose_portion(requested, config.stash[TURN]) if requested else None


def for_processes(config):
    """What `configure` takes in a process of pytest-xdist."""
    chosen = config.stash[PORTION]
    return {"turn": astuple(config.stash[TURN]), "portion": astuple(chosen) if chosen else None}


def select(config, items):
    """Mark the cases that the default tier draws; leave out what is slow and of another portion."""
    slow = {item.nodeid: item for item in items if is_marked(item, "slow") and not is_marked(item, "quantisers")}
    for nodeid in draw(slow, config.option.smoke_seed, config.stash[TURN].number, measured()):
        slow[nodeid].add_marker(pytest.mark.drawn)
    portion = config.stash[PORTION]
    if portion is not None:
        portions = cut(slow, portion.count, measured())
        other = [item for item in items if portions.get(item.nodeid, portion.number) != portion.number]
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if portions.get(item.nodeid, portion.number) == portion.number]
        if portion.backwards:
            items.reverse()


def header(config):
    lines = [f"one case of each slow test: --smoke-seed {config.option.smoke_seed}; those of {LONG_S:.0f} s and more "
             f"take turns, {config.stash[TURN].why}"]
    return lines + ([f"of the slow tier {config.stash[PORTION]}"] if config.stash[PORTION] else [])


def report(config, reports):
    """Lines about the portion that ran, which also go to --record's file; none without --portion, and none in the
    processes of pytest-xdist."""
    if config.stash[PORTION] is None or hasattr(config, "workerinput"):
        return []
    record = record_of(config.stash[PORTION], reports, ROOT)
    if config.option.record is None:
        return [record.line()]
    record.add_to(config.option.record)
    return [record.line(), f"added to {config.option.record}"]


@dataclass(frozen=True)
class Portion:
    """Portion `number` (from 1) of `count` of the slow tier. why: it is this one. backwards: it runs from its end."""

    number: int
    count: int
    why: str
    backwards: bool = False

    def __str__(self):
        return f"portion {self.number} of {self.count}, {self.why}{', from its end' if self.backwards else ''}"


@dataclass(frozen=True)
class Turn:
    """A number that successive commits count up, and where it comes from."""

    number: int
    why: str


def turn(folder):
    """The Turn of the commit that is checked out in `folder`.

    A shallow clone cannot count its commits: there the commit's hash stands for the number, so that over many commits
    all numbers come up. Without git the day does.
    """
    if _git(folder, "rev-parse", "HEAD") is None:
        day = int(time.time() // 86400)
        return Turn(day, f"by the day {day} since 1970: {folder} is no git checkout")
    if _git(folder, "rev-parse", "--is-shallow-repository") != "false":
        commit = _git(folder, "rev-parse", "HEAD")
        return Turn(int(commit[:12], 16), f"by the hash of commit {commit[:12]}: a shallow clone has no commit count")
    count = int(_git(folder, "rev-list", "--count", "HEAD"))
    return Turn(count, f"by the commit count {count}")


def choose_portion(requested, turn):
    """The Portion that --portion means: "commit", or a number and a count such as "3/32".

    Every other round of commits runs its portions from the end: what one round does not reach in time, the next does.
    """
    if requested == COMMIT:
        before, number = divmod(turn.number, NUM_PORTIONS)
        return Portion(number + 1, NUM_PORTIONS, turn.why, before % 2 == 1)
    number, _, count = requested.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f'Give --portion {COMMIT}, or a number and a count such as 3/{NUM_PORTIONS}: it is '
                                f'"{requested}".')
    return Portion(int(number), int(count), "as --portion says")


def function_of(nodeid):
    """The test function of a case, without its parameters."""
    return nodeid.partition("[")[0]


def cut(nodeids, count, seconds):
    """{case: the number of its portion, from 1}, whatever order they run in: neighbours stay together, portions take
    about equally long.

    nodeids: of all slow cases. seconds: as in SECONDS.
    """
    lasting = {nodeid: max(seconds.get(function_of(nodeid), UNMEASURED_S), LEAST_S) for nodeid in sorted(nodeids)}
    portions, before, total = {}, 0.0, sum(lasting.values())
    for nodeid, its_own in lasting.items():
        portions[nodeid] = 1 + min(int((before + its_own / 2) / total * count), count - 1)
        before += its_own
    return portions


def draw(nodeids, seed, number, seconds):
    """One case of each slow test function, drawn. Functions whose cases take LONG_S or more take turns: those of about
    TURN_S are drawn from, and of successive numbers others, until all have been.

    nodeids: of all slow cases. number: the Turn's. Returns a set of cases.
    """
    cases = defaultdict(list)
    for nodeid in sorted(nodeids):
        cases[function_of(nodeid)].append(nodeid)
    turns = turns_of(cases, seconds)
    now = number % max(turns.values(), default=1) + 1
    return {random.Random(f"{seed} {function}").choice(of_function) for function, of_function in cases.items()
            if turns.get(function, now) == now}


def turns_of(functions, seconds):
    """{function: its turn, from 1} of those whose cases take LONG_S or more, or are not measured."""
    long = {function: its_own for function in functions if (its_own := seconds.get(function, UNMEASURED_S)) >= LONG_S}
    return cut(long, math.ceil(sum(long.values()) / TURN_S), seconds)


def measured():
    return json.loads(SECONDS.read_text()) if SECONDS.is_file() else {}


@dataclass
class Record:
    """What a run of one portion came to."""

    portion: str                           # "3/32"
    why: str
    commit: str | None
    at: str                                # UTC
    passed: int
    failed: int
    skipped: int
    not_reached: int                       # the time was up
    failures: list[str]
    seconds: dict[str, float]              # {test function: mean of its cases, with what was set up for them}

    def line(self):
        return (f"slow tier, portion {self.portion} at commit {self.commit or 'unknown (no git)'} ({self.why}): "
                f"{self.passed} passed, {self.failed} failed, {self.skipped} were skipped, {self.not_reached} were not "
                f"reached in time")

    def add_to(self, file):
        """Append one line of JSON; the folder is made where it is missing."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(self)) + "\n")


def record_of(portion, reports, folder):
    """The Record of a Portion. reports: pytest's {outcome: [report]}."""
    late = {report.nodeid for report in reports.get("skipped", ()) if ordering.NO_TIME in str(report.longrepr)}
    failures = sorted({report.nodeid for outcome in ("failed", "error") for report in reports.get(outcome, ())})
    return Record(
        f"{portion.number}/{portion.count}", portion.why, _git(folder, "rev-parse", "HEAD"),
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        passed=len({report.nodeid for report in reports.get("passed", ())} - {*failures}), failed=len(failures),
        skipped=len({report.nodeid for report in reports.get("skipped", ())} - late), not_reached=len(late),
        failures=failures, seconds=_seconds_of(reports, late))


def _seconds_of(reports, late):
    total, cases = Counter(), defaultdict(set)
    for report in (report for outcome in ("", "passed", "failed") for report in reports.get(outcome, ())):
        if hasattr(report, "duration") and report.nodeid not in late:
            total[function_of(report.nodeid)] += report.duration
            cases[function_of(report.nodeid)].add(report.nodeid)
    return {function: round(total[function] / len(cases[function]), 2) for function in sorted(total)}


def _git(folder, *words):
    """What git prints, or None: there is no git, or no commit."""
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    return None


def is_there(function):
    """Is there such a test function (file::name)?"""
    path, _, name = function.partition("::")
    return (ROOT / path).is_file() and re.search(rf"^\s*def {name}\(", (ROOT / path).read_text(encoding="utf-8"),
                                                 re.MULTILINE) is not None


def main(files):
    seconds = measured()
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            seconds |= json.loads(line)["seconds"]
    seconds = {function: its_own for function, its_own in sorted(seconds.items()) if is_there(function)}
    SECONDS.write_text(json.dumps(seconds, indent=1) + "\n")
    print(f"{len(seconds)} test functions in {SECONDS}")


if __name__ == "__main__":
    main(sys.argv[1:])
