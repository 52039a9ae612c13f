"""The benchmark command runs every layout, and what it counts is the formula. Its speeds are not judged here."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from xdit_backend.bench import parse_layout
from xdit_backend.protocol.errors import ConfigError


@pytest.mark.parametrize("name, expected", [
    ("one", {"cfg": 1, "ring": 1, "ulysses": 1}), ("ring2-ulysses4", {"cfg": 1, "ring": 2, "ulysses": 4})])
def test_layouts_are_read(name, expected):
    assert parse_layout(name) == expected


@pytest.mark.parametrize("name", ["two", "ulysses", "2", "tensor2", "ring2ulysses2"])
def test_layouts_that_are_none_are_refused(name):
    with pytest.raises(ConfigError, match="is not an axis and a degree"):
        parse_layout(name)


@pytest.mark.slow
def test_bench_prints_times_ratios_and_traffic():
    command = [sys.executable, "-m", "xdit_backend", "bench", "--tokens", "64", "--text-tokens", "8", "--width", "256",
               "--blocks", "1", "1", "--rounds", "1"]

    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert result.returncode == 0, result.stderr
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if "x" in line and line.split()[0] in (
        "one", "cfg2", "ulysses2", "ring2")}
    assert set(rows) == {"one", "cfg2", "ulysses2", "ring2"}
    assert all(float(row[1]) > 0 and row[3] == row[4] for row in rows.values())
    assert float(rows["cfg2"][3]) == 0 and float(rows["ring2"][3]) > 0
