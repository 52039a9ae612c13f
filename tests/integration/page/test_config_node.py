"""xDiT Parallel Config in the page: the widgets that count, and files that open as they were."""

import pytest

from tests.integration.page.conftest import PANEL_BUTTON, template

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


def open_demo(page, **values):
    """Open the template Demo and set these widgets, one after the other.
    Returns the node's height, as the last one leaves it."""
    page.evaluate("graph => app.loadGraphData(graph)", template("Demo"))
    return [page.evaluate(SET, [name, value]) for name, value in values.items()][-1]


def test_it_shows_what_counts(page):
    low = open_demo(page, mode="auto", warmup_steps=1, num_patches=0)
    always = {"devices", "mode", "weights_memory", "compile", "attention", "sparse_attention"}
    steps = [("mode", "auto", always | {"approximate", "exchange"}),
             ("num_patches", 8, always | {"approximate", "exchange", "num_patches"}),
             ("mode", "manual", always | DEGREES),
             ("ring_degree", 2, always | DEGREES | {"exchange"}),
             ("exchange", "all in fp8", always | DEGREES | {"approximate", "exchange"}),
             ("ring_degree", 1, always | DEGREES),
             ("sparse_attention", "sla", always | DEGREES | {"approximate", "sparse_settings"}),
             ("sparse_attention", "off", always | DEGREES),
             ("pipefusion_degree", 2, always | {"approximate"} | DEGREES | PIPEFUSION),
             ("pipefusion_degree", 1, always | DEGREES),
             ("displaced_degree", 2, always | {"warmup_steps", "forecast_keys_values", "displaced_mode", "approximate"}
              | DEGREES)]
    for name, value, expected in steps:
        high = page.evaluate(SET, [name, value])
        assert set(page.evaluate(SHOWN)) == expected, (name, value)
    assert high > low + 200


def test_a_new_node_is_as_high_as_what_it_shows(page):
    high, needed = page.evaluate("""() => {
        const node = LiteGraph.createNode("XDiTParallelConfig");
        return [node.size[1], node.computeSize()[1]];
    }""")

    assert high == needed < 230


@pytest.mark.parametrize("name", ["Demo", "Flux.1 larger than one GPU, PipeFusion"])
def test_a_file_opens_and_is_saved_as_it_was(page, name):
    given = template(name)
    page.evaluate("graph => app.loadGraphData(graph)", given)
    saved = page.evaluate("() => app.rootGraph.serialize()")
    shown = set(page.evaluate(SHOWN))

    for node in given["nodes"]:
        other = next(one for one in saved["nodes"] if int(one["id"]) == node["id"])
        assert other.get("widgets_values", []) == node.get("widgets_values", [])
    assert (PIPEFUSION <= shown) == (name != "Demo")
    assert page.problems == []


MARKED = """() => Object.fromEntries(app.graph.nodes.flatMap(node => (node.inputs ?? []).filter(slot => slot.hasErrors)
    .map(slot => [node.type, slot.name])))"""
BUTTON = """() => app.graph.nodes.find(node => node.type === "XDiTParallelConfig")
    .widgets.find(widget => widget.name === "xdit_fit")"""


def test_a_refused_layout_marks_its_widget_and_offers_what_fits(page):
    open_demo(page, devices="cpu,cpu", mode="manual", ring_degree=3)
    saved = page.evaluate("() => app.rootGraph.serialize().nodes")

    page.evaluate("() => app.queuePrompt(0).catch(() => null)")
    page.wait_for_function(f"() => JSON.stringify(({MARKED})()) !== '{{}}'", timeout=120_000)
    marked, label = page.evaluate(MARKED), page.evaluate(f"() => ({BUTTON})().label")
    with_button = page.evaluate("() => app.rootGraph.serialize().nodes.map(node => node.widgets_values ?? [])")
    page.evaluate(f"() => ({BUTTON})().callback()")
    page.wait_for_function(f"() => !({BUTTON})()", timeout=120_000)
    values = page.evaluate("""() => Object.fromEntries(app.graph.nodes.find(node => node.type === "XDiTParallelConfig")
        .widgets.map(widget => [widget.name, widget.value]))""")

    assert marked == {"XDiTParallelConfig": "ring_degree"} and label == "Use settings that fit this machine"
    assert with_button == [node.get("widgets_values", []) for node in saved]       # it is not saved
    assert (values["devices"], values["mode"], values["ring_degree"],
            values["cfg_degree"]) == ("cpu,cpu", "manual", 2, 1)
    assert page.problems == []


def test_mark_and_button_go_as_soon_as_the_settings_fit(page):
    open_demo(page, devices="cpu,cpu", mode="manual", ring_degree=3)
    page.evaluate("() => app.queuePrompt(0).catch(() => null)")
    page.wait_for_function(f"() => ({BUTTON})()", timeout=120_000)
    page.evaluate(SET, ["ring_degree", 4])
    page.wait_for_timeout(1000)
    offered = page.evaluate(f"() => Boolean(({BUTTON})())")

    page.evaluate(SET, ["ring_degree", 2])
    page.wait_for_function(f"() => !({BUTTON})() && JSON.stringify(({MARKED})()) === '{{}}'", timeout=120_000)

    assert offered and page.problems == []


def choose_language(page, language):
    """The page reads its nodes anew for that, and then opens its graph again."""
    page.evaluate("""language => {
        app.graph.nodes[0].isOld = true;
        return app.extensionManager.setting.set("Comfy.Locale", language);
    }""", language)
    page.wait_for_function("() => app.graph.nodes.length && !app.graph.nodes.some(node => node.isOld)",
                           timeout=120_000)


@pytest.fixture
def chinese(page):
    """The page in Chinese."""
    choose_language(page, "zh")
    yield
    choose_language(page, "en")


def test_what_is_refused_is_told_in_the_place_of_the_run_before(page, chinese):
    """On the nodes and in the panel; in Chinese where the page is."""
    open_demo(page, devices="cpu,cpu", mode="manual", ring_degree=3)
    titles = page.evaluate("() => app.graph.nodes.filter(node => node.type === 'XDiTDemoPrompt')"
                           ".map(node => node.title)")
    page.evaluate("""() => { app.graph.nodes.find(node => node.type === "XDiTParallelSampler")
        .addWidget("text", "$$node-text-preview", "20 steps in 9.0 s", () => null); }""")
    page.locator(PANEL_BUTTON).click()
    page.wait_for_selector(".xdit-device")

    page.evaluate("() => app.queuePrompt(0).catch(() => null)")
    page.wait_for_selector(".xdit-panel dl[data-state=refused]", timeout=120_000)
    panel = page.locator(".xdit-panel [data-fact=run_error]").inner_text()
    node = page.evaluate("""() => app.graph.nodes.find(node => node.type === "XDiTParallelSampler")
        .widgets.find(widget => widget.name === "$$node-text-preview").value""")
    timeline = page.locator(".xdit-time").is_visible()
    page.locator(PANEL_BUTTON).click()

    assert titles == ["正向提示词", "负向提示词"]
    assert panel == ("请把 mode 设为 auto，或例如 ulysses_degree 2：各并行度（ring_degree=3）的乘积为 3，"
                     "而有 2 个设备。")
    assert node == "未运行：提示被拒绝" and not timeline


def test_what_fits_is_offered_no_more_when_a_run_begins(page):
    open_demo(page, devices="cpu,cpu", mode="manual", ring_degree=3)
    page.evaluate("() => app.queuePrompt(0).catch(() => null)")
    page.wait_for_function(f"() => ({BUTTON})()", timeout=120_000)

    page.evaluate("""async () => (await import("/scripts/api.js")).api
        .dispatchEvent(new CustomEvent("execution_start", { detail: {} }))""")

    assert page.evaluate(f"() => !({BUTTON})()")


def test_an_error_of_a_run_marks_the_widget_of_the_settings(page):
    """Heads are known when the model is loaded: the loader fails, and the widget is on another node."""
    open_demo(page, devices="cpu,cpu,cpu,cpu,cpu", mode="manual", ulysses_degree=5)

    page.evaluate("() => app.queuePrompt(0)")
    page.wait_for_function(f"() => JSON.stringify(({MARKED})()) !== '{{}}'", timeout=120_000)

    assert page.evaluate(MARKED) == {"XDiTParallelConfig": "ulysses_degree"}
    page.evaluate(SET, ["ulysses_degree", 1])
    assert page.evaluate(MARKED) == {}


@pytest.mark.parametrize("message, expected", [
    ("Set mode to auto, or for example ulysses_degree 2: the degrees (ring_degree=3) multiply to 3, and there are 2 "
     "devices.", "ring_degree"),
    ("Set mode to auto: the degrees (all 1) multiply to 1, and there are 2 devices.", "mode"),
    ('devices="gpu0": "gpu0" is not a device.', "devices"), ("no tensor of this", None), ("my_devices=3", None)])
def test_which_widget_a_message_is_about(page, message, expected):
    found = page.evaluate("""async message => (await import("/extensions/xdit-comfyui/errors.js"))
        .namedIn(message, ["mode", "devices", "ring_degree"])""", message)

    assert found == expected
