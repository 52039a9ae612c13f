"""The commands of the backend: what they are called, and what their help says.
test_docs.py holds the documented ones."""

import argparse
import re

import pytest

from xdit_backend.__main__ import BENCHES, Defaults, completed, make_parser


def test_bench_alone_and_with_layouts_times_the_methods():
    for line in ("bench", "bench one pipefusion2 --patches 2 4", "bench --rounds 3", "bench methods one"):
        assert make_parser().parse_args(completed(line.split())).run is BENCHES["methods"].main
    assert make_parser().parse_args(completed(["bench", "one", "--patches", "2", "4"])).layouts == ["one"]


@pytest.mark.parametrize("name", BENCHES)
def test_help_says_what_every_option_does(name):
    parser = argparse.ArgumentParser(formatter_class=Defaults)
    BENCHES[name].add_arguments(parser)

    assert [action.dest for action in parser._actions if not action.help] == []
    shown = parser.format_help().partition("options:")[2]
    assert "[" not in re.sub(r"\[(N|FILE|NAME|FORM|TYPE) \.\.\.\]", "", shown)        # a default as Python writes it
    assert "default: )" not in shown
    assert "--device" not in shown or "(default: auto)" in shown
