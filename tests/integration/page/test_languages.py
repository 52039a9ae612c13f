"""Every text of ours is there in English and in Chinese:
nodes, widgets and tooltips, the page's messages, the help pages."""

import json
import re

import pytest

from tests.support.comfyui_server import ROOT
from xdit_backend.planner.descriptions import REASONS

CHINESE = re.compile(r"[\u4e00-\u9fff]")
ZH = json.loads((ROOT / "locales" / "zh" / "nodeDefs.json").read_text(encoding="utf-8"))


def test_nodes_have_both(comfyui):
    ours = {name: node for name, node in comfyui.nodes.NODE_CLASS_MAPPINGS.items() if name.startswith("XDiT")}
    assert set(ZH) == set(ours) and len(ours) >= 7
    for name, node in ours.items():
        declared = node.INPUT_TYPES()
        inputs = {**declared.get("required", {}), **declared.get("optional", {})}
        tooltips = {key for key, spec in inputs.items() if len(spec) > 1 and spec[1].get("tooltip")}
        outputs = {str(index) for index, text in enumerate(getattr(node, "OUTPUT_TOOLTIPS", None) or []) if text}
        assert set(ZH[name]["inputs"]) == tooltips == set(inputs), name
        assert set(ZH[name].get("outputs", {})) >= outputs, name
        for text in (ZH[name]["display_name"], ZH[name]["description"],
                     *(entry["tooltip"] for entry in ZH[name]["inputs"].values())):
            assert CHINESE.search(text), text
        # what they are called in messages stands beside it, where both languages have other words
        assert [key for key, entry in ZH[name]["inputs"].items()
                if not CHINESE.search(entry["name"]) and not re.fullmatch(r"(Ring|Ulysses) \w+", entry["name"])] == []
        assert all(key in entry["name"] for key, entry in ZH["XDiTParallelConfig"]["inputs"].items())


def test_messages_of_the_page_have_both():
    texts = {language: dict(entries) for language, entries in entries_of_the_page().items()}

    assert set(texts) == {"en", "zh"} and len(texts["en"]) >= 20
    assert texts["zh"].keys() == texts["en"].keys()
    for key, text in texts["en"].items():
        assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", texts["zh"][key])), key
        assert CHINESE.search(texts["zh"][key]) or text == "{text}", key


def test_no_message_of_the_page_stands_twice():
    """The later would win, wherever the page asks for the earlier."""
    for language, entries in entries_of_the_page().items():
        keys = [key for key, _ in entries]
        assert [key for key in sorted(set(keys)) if keys.count(key) > 1] == [], language


def test_each_message_that_the_page_asks_for_is_there():
    keys = {key for key, _ in entries_of_the_page()["en"]}
    requested = {key for path in (ROOT / "web").glob("*.js")
             for key in re.findall(r"\btext\(\"(\w+)\"", path.read_text(encoding="utf-8"))}

    assert len(requested) >= 20 and requested <= keys


def test_each_bottleneck_of_an_estimate_has_a_text():
    keys = {key for key, _ in entries_of_the_page()["en"]}

    assert {f"limited_{cause.replace('-', '')}" for cause in REASONS} <= keys


def entries_of_the_page():
    """{language: [(key, text), ...]}, as they stand in the file."""
    source = (ROOT / "web" / "texts.js").read_text(encoding="utf-8")
    return {language: re.findall(r'^    (\w+): "(.*)",$', block, re.M) for language, block
            in re.findall(r"^  (\w+): \{\n(.*?)^  \},$", source, re.M | re.S)}


@pytest.mark.parametrize("name", sorted(ZH))
def test_help_pages_have_both(name):
    """In the same sections, with the same inputs named."""
    english = (ROOT / "web" / "docs" / f"{name}.md").read_text(encoding="utf-8")
    chinese = (ROOT / "web" / "docs" / name / "zh.md").read_text(encoding="utf-8")

    assert len(re.findall("^#+ ", chinese, re.M)) == len(re.findall("^#+ ", english, re.M))
    assert set(ZH[name]["inputs"]) <= set(re.findall(r"\w+", chinese))
    assert CHINESE.search(chinese)
