"""What is said of the VAEs that can be run comes from their registry, and the registry is whole."""

import re
from pathlib import Path

import diffusers
import pytest

from xdit_backend.autoencoders import FAMILIES, supported
from xdit_backend.checkpoints.build_vae import load_autoencoder
from xdit_backend.protocol.errors import CheckpointError

ROOT = Path(__file__).parents[3]
LOADED = {key: family for key, family in FAMILIES.items() if family.models}


@pytest.mark.parametrize("page", ["XDiTVAEDecode.md", "XDiTVAEEncode.md"])
def test_help_pages_name_every_model(page):
    text = (ROOT / "web" / "docs" / page).read_text(encoding="utf-8")

    assert [name for family in LOADED.values() for name in family.models
            if not re.search(rf"\b{re.escape(name)}\b", text)] == []


@pytest.mark.parametrize("key", FAMILIES)
def test_a_family_is_told_from_the_others(key):
    """By its class, and where ComfyUI has VAEs of it by names of tensors that no other family's marks are in."""
    family = FAMILIES[key]

    assert family.is_comfyuis or hasattr(diffusers, family.autoencoder)
    assert [other.autoencoder for other in FAMILIES.values()].count(family.autoencoder) == 1
    assert not [mark for mark in family.markers for other in LOADED.values() if other is not family
                for its in other.markers
                if its in mark]


def test_one_family_takes_what_has_no_mark():
    assert [key for key, family in LOADED.items() if not family.markers] == ["kl"]


def test_a_refusal_names_the_models():
    with pytest.raises(CheckpointError, match="^Use VAE .*" + re.escape(f"work with the VAEs of {supported()}.")):
        load_autoencoder({}, "float32", "cpu")
