"""The VAE's benchmark runs every group of workers, and what it measures is what it estimates.
Its speeds are not judged here."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT


def bench(*arguments):
    return subprocess.run([sys.executable, "-m", "xdit_backend", "bench", "vae", *arguments], cwd=ROOT,
                          capture_output=True, text=True, timeout=1800)


@pytest.mark.slow
def test_bench_vae_prints_times_and_memory():
    result = bench("--sizes", "128", "256", "--workers", "1", "2", "--width", "32", "--rounds", "1", "--tile", "128")

    assert result.returncode == 0, result.stderr
    rows = [line.replace(" x ", "x").split() for line in result.stdout.splitlines()
            if line.strip().startswith(("128 x", "256 x"))]
    theirs = [row for row in rows if len(row) < 9]
    rows = [row for row in rows if len(row) > 9]
    assert [row[:2] for row in rows] == [["128x128", "1"], ["128x128", "2"], ["256x256", "1"], ["256x256", "2"]]
    for _, workers, seconds, ratio, cpu_s, peak, formula, of_one, sent, off in rows:
        assert float(off) < 0.01                               # parts of 255, from ComfyUI's own picture
        # at least 32 MB a block
        assert float(seconds) > 0 and 0.9 * float(formula) < float(peak) < 1.1 * float(formula) + 32
        assert (float(sent) > 0) == (workers == "2")
    assert [row[:3] for row in theirs] == [[size, *way] for size in ("128x128", "256x256")
                                           for way in (("VAE", "Decode"), ("tiled", "128"))]
    assert all(float(row[-1]) > 1 for row in theirs[1::2])     # tiles are seen
    # of one worker's; at this size a block is nearly the whole
    assert float(rows[3][7]) < 0.75


@pytest.mark.slow
def test_bench_vae_refuses_sizes_that_are_no_images():
    result = bench("--sizes", "100")

    assert result.returncode != 0 and "Use multiples of 8 for --sizes" in result.stderr
