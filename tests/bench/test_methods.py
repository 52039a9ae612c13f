"""The benchmark command runs every layout, and what it counts is the formula. Its speeds are not judged here."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from xdit_backend.bench.methods import parse_layout
from xdit_backend.bench.pipefusion import bubble_ratio
from xdit_backend.protocol.errors import ConfigError


@pytest.mark.parametrize("name, expected", [
    ("one", {"cfg": 1, "pipefusion": 1, "ring": 1, "ulysses": 1}),
    ("pipefusion3-ring2-ulysses4", {"cfg": 1, "pipefusion": 3, "ring": 2, "ulysses": 4})])
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


@pytest.mark.parametrize("num_stages, num_patches, expected", [(2, 2, 1.83), (2, 4, 1.86), (2, 8, 1.87), (4, 2, 1.855), (1, 1, 1.0)])
def test_bubble_formula(num_stages, num_patches, expected):
    """docs/algorithms.md 2.4: 16 steps, one of them warm-up. Fewer patches than stages leave stages idle."""
    assert bubble_ratio(16, 1, num_stages, num_patches) == pytest.approx(expected, abs=0.005)


@pytest.mark.slow
def test_bench_of_pipefusion_counts_what_the_formulas_say():
    command = [sys.executable, "-m", "xdit_backend", "bench", "one", "pipefusion2", "--tokens", "64", "--text-tokens", "8", "--width",
               "256", "--blocks", "1", "3", "--rounds", "1", "--steps", "4", "--patches", "2", "4", "--no-diffusers"]

    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("pipefusion2 M=")]
    assert [row[1] for row in rows] == ["M=2", "M=4"]
    for _, _, seconds, _, _, _, _, sent, sent_formula, weights, weight_formula, kept, kept_formula in rows:
        assert float(seconds) > 0 and float(sent) > 0
        assert (sent, weights, kept) == (sent_formula, weight_formula, kept_formula)
