"""bench runs: every run begins and ends by itself, and its first step is told apart. Its speeds are not judged here."""

import argparse

import pytest

from xdit_backend.tools.bench import runs


class Client:
    """Notes what is asked of it."""

    def __init__(self):
        self.requested = []

    def predict(self, spec, layout, num_channels, calls, run=None):
        self.requested.append(run)

    def end_run(self, run):
        self.requested.append(f"end {run}")


def test_each_run_has_a_name_of_its_own_and_ends():
    client = Client()
    run = runs._runs(client, None, None, [])

    assert [len(run(num_steps)) for num_steps in (2, 1)] == [2, 1]
    assert client.requested == ["bench 0", "bench 0", "end bench 0", "bench 1", "end bench 1"]


def test_rows_say_the_first_step_beside_the_others(capsys):
    options = argparse.Namespace(rounds=3, steps=(1, 5))
    found = runs._measure({"ours": lambda num_steps: [1.5, *[1.0] * (num_steps - 1)]}, options)

    runs._print(found)

    _, one, five = (line.split() for line in capsys.readouterr().out.splitlines())
    assert {way: len(rounds) for way, rounds in found.items()} == {("ours", 1): 3, ("ours", 5): 3}
    assert one[:5] == ["ours", "1", "1.500", "1.500", "1.500"] and len(one) == 6
    assert five[:6] == ["ours", "5", "1.100", "1.100", "1.100", "1.50"] and float(five[6]) >= 0


@pytest.mark.parametrize("layouts", [[], ["one", "ulysses2"]])
def test_layouts_are_those_of_methods(layouts):
    parser = argparse.ArgumentParser()
    runs.add_arguments(parser)

    options = parser.parse_args(layouts)

    assert options.layouts == (layouts or list(runs.LAYOUTS)) and tuple(options.steps) == (1, 2, 8)
