"""xDiT Parallel Config in the page: the widgets that count, and files that open as they were."""

import pytest

from tests.browser.conftest import template

pytestmark = pytest.mark.slow

SHOWN = """() => app.graph.nodes.find(node => node.type === "XDiTParallelConfig").widgets
    .filter(widget => !widget.hidden && !widget.options.hidden).map(widget => widget.name)"""
SET = """([name, value]) => {
    const node = app.graph.nodes.find(node => node.type === "XDiTParallelConfig");
    const widget = node.widgets.find(widget => widget.name === name);
    widget.value = value;
    widget.callback(value);
    return node.computeSize()[1];
}"""
DEGREES = {f"{name}_degree" for name in ("cfg", "data", "pipefusion", "ring", "ulysses", "tensor", "displaced")}
PIPEFUSION = {"num_patches", "warmup_steps", "stage_blocks", "warmup", "offload_keys_values", "forecast_keys_values"}


def test_it_shows_what_counts(page):
    page.evaluate("graph => app.loadGraphData(graph)", template("demo"))
    for name, value in (("mode", "auto"), ("warmup_steps", 1), ("num_patches", 0)):
        low = page.evaluate(SET, [name, value])
    steps = [("mode", "auto", {"devices", "mode"}),
             ("num_patches", 8, {"devices", "mode", "num_patches"}),
             ("mode", "manual", {"devices", "mode"} | DEGREES),
             ("pipefusion_degree", 2, {"devices", "mode"} | DEGREES | PIPEFUSION),
             ("pipefusion_degree", 1, {"devices", "mode"} | DEGREES),
             ("displaced_degree", 2, {"devices", "mode", "warmup_steps", "displaced_mode"} | DEGREES)]
    for name, value, expected in steps:
        high = page.evaluate(SET, [name, value])
        assert set(page.evaluate(SHOWN)) == expected, (name, value)
    assert high > low + 200


@pytest.mark.parametrize("name", ["demo", "flux1_pipefusion"])
def test_a_file_opens_and_is_saved_as_it_was(page, name):
    given = template(name)
    page.evaluate("graph => app.loadGraphData(graph)", given)
    saved = page.evaluate("() => app.rootGraph.serialize()")
    shown = set(page.evaluate(SHOWN))

    for node in given["nodes"]:
        other = next(one for one in saved["nodes"] if int(one["id"]) == node["id"])
        assert other.get("widgets_values", []) == node.get("widgets_values", [])
    assert (PIPEFUSION <= shown) == (name == "flux1_pipefusion")
    assert page.problems == []
