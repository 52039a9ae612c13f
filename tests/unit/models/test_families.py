"""What is said of the model families comes from their registry, and each family is one small file."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from tests.unit.checkpoints.test_header import PUBLISHED
from xdit_backend import models
from xdit_backend.models import FAMILIES

ROOT = Path(__file__).parents[3]
# By where the registry has each from: files import other families' too.
MODULES = {getattr(models, alias.name).name: importlib.import_module(f"xdit_backend.models.{node.module}")
           for node in ast.parse(inspect.getsource(models)).body if isinstance(node, ast.ImportFrom) and node.level == 1
           for alias in node.names if getattr(models, alias.name) in FAMILIES.values()}


def test_the_help_page_names_every_family():
    text = (ROOT / "web" / "docs" / "XDiTLoadModel.md").read_text(encoding="utf-8")

    assert [family.title for family in FAMILIES.values() if family.title not in text] == []


def test_the_help_page_lists_the_families_that_take_controlnets():
    taking = {family.name for family in FAMILIES.values() if family.takes_controlnets}
    text = (ROOT / "web" / "docs" / "XDiTLoadModel.md").read_text(encoding="utf-8")

    assert set(text.partition("takes them for: ")[2].partition(". One")[0].split(", ")) == taking


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_one_small_file(name):
    """Excluding imports, a key table and private functions, a family is at most 64 lines."""
    source = inspect.getsource(MODULES[name])
    keys = re.search(r"^KEYS = table\(.*?\n\n", source, re.MULTILINE | re.DOTALL)
    functions = [value for value in vars(MODULES[name]).values() if inspect.isfunction(value)
                 and value.__module__ == MODULES[name].__name__ and value.__name__.startswith("_")]
    imports = re.findall(r"^(?:from \S+ )?import (?:\([^)]*\)|.*)\n", source, re.MULTILINE)
    others = [keys.group() if keys else "", *imports, *(inspect.getsource(function) for function in functions)]
    num_lines = lambda text: len([line for line in text.splitlines() if line.strip()])  # noqa: E731

    assert num_lines(source) - sum(num_lines(other) for other in others) <= 64


# of the others, some are folders, and metadata says what some are
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items()
                                  if not family.sampled and not family.detection.described])
def test_a_file_is_of_one_family(name):
    published = [shapes for family, shapes, _ in PUBLISHED.values() if family == name]

    assert published
    for shapes in published:
        assert [family.name for family in FAMILIES.values()
                if not family.detection.described and family.detection.recognise(shapes)] == [name]


def test_a_diffusers_that_is_too_old_for_a_family_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.36.0")

    assert FAMILIES["Qwen-Image"].detection.refuse({}) == "it needs diffusers 0.37 or newer, and this is 0.36.0"
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.37.0")
    assert FAMILIES["Qwen-Image"].detection.refuse({}) is None
