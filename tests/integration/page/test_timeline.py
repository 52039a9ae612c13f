"""Shares of a run's time in the panel's table, and what its timeline draws: in Node, without a page."""

import json

import pytest

from tests.support.page_modules import evaluate

NAMES = "compute", "wait", "transfer", "idle"


def summary(node, modules, spans, begin, end):
    return evaluate(node, modules / "timeline.mjs", "summarise", f"summarise({json.dumps(spans)}, {begin}, {end})")


@pytest.mark.parametrize("kind, share", [("wait", "wait"), ("weights", "transfer"), ("exchange", "transfer")])
def test_each_moment_counts_once_and_the_shares_add_up(node, modules, kind, share):
    """Two steps of 4 s in 10 s, of which 1 s is a wait or a transfer; a decode after them is outside."""
    spans = [["whole", 0, 4, 1, 0], [kind, 1, 2, 1, 0], ["patch", 6, 10, 2, 0], ["decode", 12, 13, 0, 0]]

    found = summary(node, modules, spans, 0, 10)

    assert found == {"steps": 2, "compute": 70, "wait": 0, "transfer": 0, "idle": 20} | {share: 10}
    assert summary(node, modules, spans, 2, 10)["compute"] == 75             # 6 of 8 s
    assert summary(node, modules, spans, 2, 10)["idle"] == 25


def test_rounded_shares_add_up_to_100(node, modules):
    """Thirds, which would each be 33 %."""
    spans = [["whole", 0, 2, 1, 0], ["wait", 1, 2, 1, 0]]

    found = summary(node, modules, spans, 0, 3)

    assert sum(found[name] for name in NAMES) == 100 and {found[name] for name in NAMES} == {0, 33, 34}
    assert summary(node, modules, [], 0, 5) == {"steps": 0, "compute": 0, "wait": 0, "transfer": 0, "idle": 100}


def test_overlapping_transfers_of_one_step_count_once(node, modules):
    spans = [["whole", 0, 10, 1, 0], ["exchange", 1, 4, 1, 0], ["weights", 3, 5, 1, 0], ["exchange", 2, 3, 1, 0]]

    assert summary(node, modules, spans, 0, 10) == {"steps": 1, "compute": 60, "wait": 0, "transfer": 40, "idle": 0}


def test_the_timeline_draws_what_is_visible(node, modules):
    spans = [["whole", 0, 4, 1, 0], ["patch", 6, 10, 2, 0], ["decode", 12, 13, 0, 0]]

    drawn = evaluate(node, modules / "timeline.mjs", "rectangles", f"""rectangles({json.dumps(spans)}, 5, 15, 100)
        .map(({{ x, width, span }}) => [span[0], x, width])""")

    assert drawn == [["patch", 10, 40], ["decode", 70, 10]]
