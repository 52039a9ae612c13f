"""What the server that ranks are forked from imports, so that no rank has to:
our packages, and diffusers' class of every family."""

import gc
import importlib
import pkgutil
import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))      # makes our packages importable

from xdit_backend.worker.torchrun import no_gpu  # noqa: E402

with no_gpu():
    import diffusers
    import pytest  # noqa: F401
    import torch.distributed  # noqa: F401

    import xdit_backend
    from xdit_backend.models import FAMILIES

    for module in pkgutil.walk_packages(xdit_backend.__path__, "xdit_backend."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for family in FAMILIES.values():
        if not family.is_comfyuis:
            getattr(diffusers, family.transformer)
    importlib.import_module("tests.models.zoo")
    importlib.import_module("tests.vae_zoo")
gc.collect()
gc.freeze()                                                         # its pages stay shared with the ranks
