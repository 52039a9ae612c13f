"""What the quick tier runs: of tests whose whole matrix takes minutes, a few families and a few values."""

import pytest

from tests.tiny_checkpoints import AUTOENCODERS, families
from tests.vae_zoo import KINDS
from xdit_backend.models import FAMILIES

# Of each structure one: two streams, two kinds of blocks, one stream, video, a U-Net; and their tiny files.
QUICK_FAMILIES = {"SD3", "Flux.1", "PixArt-Sigma", "Wan", "SDXL", "sd3", "flux", "pixart", "wan", "sdxl"}
QUICK_VAES = {"sd", "wan", "vae-sd", "vae-wan"}
RUN_WORKERS = ("parallel", "nodes", "host")                                    # folders of tests whose families take long


def quick(chosen, values):
    """Parameters for all of `values`; those that are not chosen are marked slow. chosen: (value) -> bool, or the values."""
    is_chosen = chosen if callable(chosen) else lambda value: value in chosen
    return [value if is_chosen(value) else pytest.param(value, marks=pytest.mark.slow) for value in values]


def is_of_another_family(item):
    """Does this test run workers for a family or a VAE which the quick tier leaves out?"""
    if item.path.parent.name not in RUN_WORKERS or not hasattr(item, "callspec"):
        return False
    others = {*FAMILIES, *families(), *AUTOENCODERS, *KINDS} - QUICK_FAMILIES - QUICK_VAES
    return any(isinstance(value, str) and value in others for value in item.callspec.params.values())
