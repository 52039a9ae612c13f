"""The templates open in ComfyUI's own page without anything missing, and the page shows their pictures and help."""

import functools
import importlib.util
import json
import math
import re
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.integration.page.conftest import files_of_note, template, template_paths, validated
from tests.support.comfyui_server import PACK, ROOT
from tests.support.tiers import by_default

PAGE_ONLY = {"upload"}                     # LoadImage's button
NAMES = [path.stem for path in template_paths()]
TITLE, WORDS = 30, 70                      # pixels of a node's title, and of two lines under its widgets
SAY = {"XDiTParallelSampler", "XDiTVAEDecode", "XDiTVAEEncode", "XDiTUpscaleImage", "KSamplerAdvanced",
       "SamplerCustom", "SamplerCustomAdvanced"}
NODE_IDS = ["XDiTLoadModel", "XDiTParallelConfig", "XDiTParallelSampler", "XDiTVAEDecode", "XDiTVAEEncode",
            "XDiTUpscaleImage", "XDiTLoadClipVae", "XDiTDemoPrompt"]

# What the page made of a graph: nodes, links with both ends' types, and widget values in the order of the file.
READ_GRAPH = """() => ({
    nodes: app.graph.nodes.map(node => ({
        id: Number(node.id), type: node.type,
        missing: !(node.type in LiteGraph.registered_node_types) || !!node.has_errors,
        inputs: node.inputs.map(slot => [slot.name, slot.type]), widgets: node.serialize().widgets_values ?? [],
    })),
    links: [...app.graph.links.values()].map(link => {
        const origin = app.graph.getNodeById(link.origin_id), target = app.graph.getNodeById(link.target_id);
        return {id: link.id, type: link.type, from: origin?.outputs[link.origin_slot]?.type,
                to: target?.inputs[link.target_slot]?.type, held: target?.inputs[link.target_slot]?.link};
    }),
})"""
# Dialogs, and the panels in which the page reports missing nodes, missing models and failed runs.
READ_COMPLAINTS = """() => [...document.querySelectorAll(
    "[role=dialog], [role=alertdialog], .p-dialog, .p-toast-message-error, " +
    "[data-testid*=error-overlay], [data-testid*=missing]")]
    .filter(element => element.checkVisibility()).map(element => element.innerText)"""


@pytest.mark.parametrize("name", by_default({"Demo"}, NAMES))
def test_template_opens_with_nothing_missing_and_the_server_takes_it(page, host, name):
    given = template(name)

    page.evaluate("graph => app.loadGraphData(graph)", given)
    page.wait_for_timeout(1500)  # dialogs open a moment later
    graph = page.evaluate(READ_GRAPH)

    assert page.evaluate(READ_COMPLAINTS) == []
    assert page.problems == []
    assert [node["type"] for node in graph["nodes"] if node["missing"]] == []
    shown = {node["id"]: node for node in graph["nodes"]}
    assert {id: node["type"] for id, node in shown.items()} == {node["id"]: node["type"] for node in given["nodes"]}
    for node in given["nodes"]:
        assert shown[node["id"]]["widgets"] == node.get("widgets_values", []), node["type"]
        # The same names as in the file: a slot that a node no longer has would be kept by the page, and lead nowhere.
        assert shown[node["id"]]["inputs"] == [[slot["name"], slot["type"]] for slot in node["inputs"]], node["type"]
    assert sorted(link["id"] for link in graph["links"]) == sorted(link[0] for link in given["links"])
    status, answer = validated(host, page.evaluate("async () => (await app.graphToPrompt()).output"))
    refused = {error["class_type"] for error in answer["node_errors"].values()}
    assert (status, refused) == (200, set()) or ("PipeFusion" in name and refused == {"XDiTParallelConfig"})  # 2 GPUs
    for link in graph["links"]:
        assert link["from"] == link["to"] == link["type"] and link["held"] == link["id"], link


@pytest.mark.parametrize("name", by_default({"Demo"}, NAMES))
def test_template_inputs_are_those_the_nodes_declare(host, name):
    """The page keeps what a file says about a node's slots, so the names are compared with the server's as well."""
    for node in template(name)["nodes"]:
        if node["type"] == "MarkdownNote":  # lives in the page alone
            continue
        declared = host.get(f"/object_info/{node['type']}")[node["type"]]["input"]

        names = {slot["name"] for slot in node["inputs"]} - PAGE_ONLY
        assert names == set(declared.get("required", {})) | set(declared.get("optional", {}))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_can_offer_each_file_of_the_note_for_download(name):
    """It reads `models` of the nodes. ComfyUI's own templates have the same addresses,
    where they take a file from the same repository."""
    rows, text = files_of_note(name)
    given = [(node, model) for node in template(name)["nodes"]
             for model in node.get("properties", {}).get("models", [])]
    places = comfyuis_places()

    assert {model["name"] for _, model in given} == {name for _, names in rows for name in names}
    for node, model in given:
        repository, file = re.fullmatch(r"https://huggingface.co/([^/]+/[^/]+)/resolve/main/(?:.+/)?([^/]+)",
                                        model["url"]).groups()
        assert model["name"] in node["widgets_values"] and f"`{repository}`" in text
        assert file == model["name"] or "(rename it)" in text
        assert f"`models/{model['directory']}`" in next(line for line in text.splitlines()
                                                        if f"`{model['name']}`" in line)
        same = {place for place in places.get(model["name"], ()) if repository in place[0]}
        assert not same or (model["url"], model["directory"]) in same


@pytest.mark.parametrize("name", NAMES)
def test_no_node_covers_another_also_with_what_it_says_under_its_widgets(name):
    nodes = template(name)["nodes"]
    places = []
    for node in nodes:
        (x, y), (width, height) = node["pos"], node["size"]
        places.append((x, y - TITLE, x + width, y + height + (WORDS if node["type"] in SAY else 0)))

    assert [(one["type"], other["type"]) for index, one in enumerate(nodes) for at, other in enumerate(nodes[:index])
            if max(places[index][0], places[at][0]) < min(places[index][2], places[at][2])
            and max(places[index][1], places[at][1]) < min(places[index][3], places[at][3])] == []


@pytest.mark.parametrize("name", by_default({"Demo", "Compare"}, NAMES))
def test_no_node_covers_another_in_the_page(page, name):
    """The page enlarges nodes whose widgets need it."""
    page.evaluate("graph => app.loadGraphData(graph)", template(name))
    page.wait_for_timeout(500)
    boxes = page.evaluate("""() => app.graph.nodes.map((node) => {
        node.updateArea();
        const [left, top, width, height] = node.boundingRect;
        return [node.type, left, top, left + width, top + height];
    })""")

    assert [(one[0], other[0]) for at, one in enumerate(boxes) for other in boxes[:at]
            if max(one[1], other[1]) < min(one[3], other[3]) and max(one[2], other[2]) < min(one[4], other[4])] == []


def test_no_link_of_the_demo_runs_behind_a_node():
    """Drawn as the page draws it: a curve whose ends leave their slots flat, by a quarter of the way."""
    graph = template("Demo")
    nodes = {node["id"]: node for node in graph["nodes"]}
    behind = set()
    for _, begin, output, end, input_, _ in graph["links"]:
        (x, y), (width, _) = nodes[begin]["pos"], nodes[begin]["size"]
        start = (x + width, y + 20 * output + 14)
        stop = (nodes[end]["pos"][0], nodes[end]["pos"][1] + 20 * input_ + 14)
        reach = math.dist(start, stop) / 4
        for t in (step / 50 for step in range(51)):
            weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t ** 3)
            at = [sum(weight * value for weight, value in zip(weights, values)) for values in (
                (start[0], start[0] + reach, stop[0] - reach, stop[0]), (start[1], start[1], stop[1], stop[1]))]
            behind |= {(begin, end, node["id"]) for node in nodes.values() if all(
                low < value < high for value, low, high in zip(
                    at, (node["pos"][0], node["pos"][1] - TITLE),
                    (node["pos"][0] + node["size"][0], node["pos"][1] + node["size"][1])))}

    assert behind == set()


@functools.cache
def comfyuis_places():
    """{name: [(address, folder)]}: from where ComfyUI's own templates take a file."""
    found = importlib.util.find_spec("comfyui_workflow_templates_json")
    places = {}
    for path in (Path(found.origin).parent / "templates").glob("*.json"):
        for graph in graphs(json.loads(path.read_text(encoding="utf-8"))):
            for node in graph.get("nodes", []):
                for model in (node.get("properties") or {}).get("models") or []:
                    url = model["url"].split("?")[0].replace("/blob/", "/resolve/")
                    places.setdefault(model["name"], []).append((url, model["directory"]))
    return places


def graphs(workflow):
    return [workflow, *workflow.get("definitions", {}).get("subgraphs", [])] if isinstance(workflow, dict) else []


@pytest.mark.slow
def test_the_page_of_start_py_opens_the_demo_the_first_time(chromium, host):
    """The demo's own pack is not among those of this host: its script comes by the browser."""
    page = chromium.new_page()
    script = "/extensions/demo_page/open_demo.js"
    page.route("**/extensions", lambda route: route.fulfill(json=[*route.fetch().json(), script]))
    source = ROOT / "tests" / "support" / "demo_page" / "web" / "open_demo.js"
    page.route(f"**{script}", lambda route: route.fulfill(path=source, content_type="text/javascript"))
    page.goto(host.url)
    page.wait_for_function("() => window.app?.graph?.nodes?.some(node => node.type === 'XDiTDemoPrompt')",
                           timeout=120_000)
    types = page.evaluate("() => app.graph.nodes.map(node => node.type)")
    page.wait_for_url(lambda url: "template" not in url)       # ComfyUI takes it away once the template is there
    page.goto(host.url)                                        # again: what was left there, and no redirection
    page.wait_for_function("() => window.app?.graph?.nodes?.length", timeout=120_000)
    again = page.url
    page.close()

    assert "CheckpointLoaderSimple" not in types and "template" not in again


@pytest.mark.slow
def test_the_page_shows_titles_with_a_sentence_each(page):
    page.evaluate("() => app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    page.get_by_text(PACK).first.click()
    page.get_by_text("Generates emoji right away").first.wait_for()
    titles = [page.get_by_text(text, exact=True).count() for text in ("Demo", "Compare", "Flux.1 Kontext")]
    page.keyboard.press("Escape")

    assert titles == [1, 1, 1]                                 # none stands below itself


def test_templates_are_listed(host):
    assert sorted(host.get("/api/workflow_templates")[PACK]) == sorted(NAMES)
    assert len(NAMES) >= 2


@pytest.mark.parametrize("name", by_default({"Demo"}, NAMES))
def test_template_has_a_thumbnail_the_page_can_show(page, host, name):
    url = f"{host.url}/api/workflow_templates/{PACK}/{name}.jpg"

    width = page.evaluate("async url => { const i = new Image(); i.src = url; await i.decode(); return "
                          "i.naturalWidth }", url)

    assert width == 512
    assert len(host.get(f"/api/workflow_templates/{PACK}/{quote(name)}.jpg")) < 60_000


@pytest.mark.parametrize("node_id", NODE_IDS)
def test_node_has_a_help_page(host, node_id):
    assert host.get(f"/extensions/{PACK}/docs/{node_id}.md").decode().startswith("# ")


def test_the_page_is_given_chinese(host):
    assert host.get("/api/i18n")["zh"]["nodeDefs"]["XDiTParallelSampler"]["display_name"] == "并行采样器"
    assert host.get(f"/extensions/{PACK}/docs/XDiTParallelSampler/zh.md").decode().startswith("# 并行采样器")
