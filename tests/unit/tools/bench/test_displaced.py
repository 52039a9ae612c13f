"""The benchmark of displaced patches: what is sent and kept is the formula to the byte.
Its speeds are not judged here."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_bench_displaced_counts_what_the_formula_says():
    arguments = ["--sizes", "24", "--width", "32", "--rounds", "1", "--calls", "2", "--dtype", "bfloat16"]
    result = subprocess.run([sys.executable, "-m", "xdit_backend", "bench", "displaced", *arguments], cwd=ROOT,
                            capture_output=True, text=True, timeout=1800)

    assert result.returncode == 0, result.stderr
    rows = [line.replace(" x ", "x").split() for line in result.stdout.splitlines() if " x " in line[:10]]
    assert [row[:2] for row in rows] == [["24x24", way] for way in ("one", "apart", "synchronous", "stale")]
    counted = [row[8:] for row in rows if len(row) > 8]
    assert all(float(least) <= float(median) <= float(most) for _, _, least, median, most, *_ in rows)
    assert (len(counted) == 2 and all(sent == by_formula and kept == kept_by_formula
                                      for sent, by_formula, kept, kept_by_formula in counted))
