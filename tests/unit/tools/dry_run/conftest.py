"""Kernels are counted as of a worker: tests in float64 have ComfyUI's own modules rotate by what takes it."""

import sys

import pytest

from tests.support.model_zoo import rotate_in_float64


@pytest.fixture(autouse=True)
def _as_in_a_worker():
    if "comfy.model_management" in sys.modules:
        rotate_in_float64(False)
