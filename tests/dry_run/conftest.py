"""Kernels are counted as of a worker: tests in float64 have ComfyUI's own modules rotate as in training."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _as_in_a_worker(monkeypatch):
    management = sys.modules.get("comfy.model_management")
    if management is not None:
        monkeypatch.setattr(management, "in_training", False)
