"""What the server that ranks are forked from imports, so that no rank has to:
our packages, and diffusers' class of every family."""

import gc
import importlib
import os
import pkgutil
import runpy
from pathlib import Path

# no library asks CUDA for GPUs: ranks could not use any then
visible = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

import diffusers  # noqa: E402
import pytest  # noqa: E402, F401
import torch.distributed  # noqa: E402, F401

runpy.run_path(str(Path(__file__).parents[2] / "conftest.py"))      # makes our packages importable

import xdit_backend  # noqa: E402
from xdit_backend.models import FAMILIES  # noqa: E402

for module in pkgutil.walk_packages(xdit_backend.__path__, "xdit_backend."):
    if not module.name.endswith("__main__") and not module.name.startswith("xdit_backend.system."):
        importlib.import_module(module.name)
for family in FAMILIES.values():
    if not family.is_comfyuis:
        getattr(diffusers, family.transformer)
importlib.import_module("tests.support.model_zoo")
importlib.import_module("tests.support.vae_zoo")
gc.collect()
gc.freeze()                                                         # its pages stay shared with the ranks
del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"], os.environ["CUDA_VISIBLE_DEVICES"]
if visible is not None:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
