"""The benchmark command runs layouts, and what it counts is the formula. Its speeds are not judged here."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from xdit_backend.protocol.errors import ConfigError
from xdit_backend.tools.bench.methods import parse_layout
from xdit_backend.tools.bench.pipefusion import bubble_ratio


@pytest.mark.parametrize("name, expected", [
    ("one", {"cfg": 1, "pipefusion": 1, "ring": 1, "ulysses": 1, "tensor": 1}),
    ("pipefusion3-ring2-ulysses4", {"cfg": 1, "pipefusion": 3, "ring": 2, "ulysses": 4, "tensor": 1})])
def test_layouts_are_read(name, expected):
    assert parse_layout(name) == expected


@pytest.mark.parametrize("name", ["two", "ulysses", "2", "vae2", "ring2ulysses2"])
def test_layouts_that_are_none_are_refused(name):
    with pytest.raises(ConfigError, match="is not an axis and a degree"):
        parse_layout(name)


@pytest.mark.parametrize("num_stages, num_patches, expected",
                         [(2, 2, 1.83), (2, 4, 1.86), (2, 8, 1.87), (4, 2, 1.855), (1, 1, 1.0)])
def test_bubble_formula(num_stages, num_patches, expected):
    """docs/design/pipefusion.md: 16 steps, one of them warm-up. Fewer patches than stages leave stages idle."""
    assert bubble_ratio(16, 1, num_stages, num_patches) == pytest.approx(expected, abs=0.005)


@pytest.mark.slow
def test_bench_prints_times_and_ratios_and_counts_what_the_formulas_say():
    command = [sys.executable, "-m", "xdit_backend", "bench", "one", "cfg2", "ring2", "tensor2",
               "pipefusion2", "--tokens",
               "64", "--text-tokens", "8", "--width", "256", "--blocks", "1", "3", "--rounds", "1", "--steps", "4",
               "--patches", "2", "4"]

    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)

    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    names = {"one", "cfg2", "ring2", "tensor2"}
    rows = {line[0]: line for line in lines if line and line[0] in names and "x" in "".join(line)}
    assert set(rows) == names
    assert all(float(row[1]) > 0 and row[3] == row[4] and row[5] == row[6] for row in rows.values())
    assert (float(rows["cfg2"][3]) == 0 and float(rows["ring2"][3]) > 0
            and float(rows["tensor2"][5]) < 0.7 * float(rows["one"][5]))
    staged = [line for line in lines if line[:1] == ["pipefusion2"] and line[1].startswith("M=")]
    assert [row[1] for row in staged] == ["M=2", "M=4"]
    for _, _, seconds, _, _, _, _, sent, sent_formula, weights, weight_formula, kept, cached_formula in staged:
        assert float(seconds) > 0 and float(sent) > 0
        assert (sent, weights, kept) == (sent_formula, weight_formula, cached_formula)
