"""The page's commands Run on all GPUs and Run on one GPU:
in ComfyUI's own page, on its own templates, and what the server says to both."""

import importlib.util
import json
import random
from pathlib import Path

import pytest

from tests.integration.page.conftest import CHECKED, post, validated
from tests.support.tiers import by_default

# Of families that the workers run: an all-in-one checkpoint, two of them, subgraphs with promoted widgets, two models,
# LoRA, video.
TEMPLATES = ["default", "sdxl_simple_example", "01_get_started_text_to_image", "video_wan2_2_14B_t2v",
             "flux_dev_full_text_to_image", "ltxv_text_to_video", "sd3.5_simple_example"]
DRAWN = 12
SERIALIZE = "() => app.rootGraph.serialize()"
COUNT_UNDO = """() => {
    const history = app.extensionManager.workflow.activeWorkflow.changeTracker;
    history.captureCanvasState();
    return history.undoQueue.length;
}"""


def stock(name):
    found = importlib.util.find_spec("comfyui_workflow_templates_json")
    if found is None:
        pytest.skip("no templates of ComfyUI's own")
    path = Path(found.origin).parent / "templates" / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"this version of ComfyUI's templates has no {name}")
    return json.loads(path.read_text(encoding="utf-8"))


def without_order(workflow):
    """The bytes of a workflow without what the page sets itself: the order in which its nodes run, and the order in
    which it writes links."""
    workflow = json.loads(json.dumps(workflow))
    for graph in graphs_of(workflow):
        for node in graph["nodes"]:
            node.pop("order", None)
        graph["links"] = sorted(graph["links"], key=lambda link: link["id"] if isinstance(link, dict) else link[0])
    return json.dumps(workflow)


def with_a_loader():
    """Names of ComfyUI's templates that load a diffusion model."""
    folder = Path(importlib.util.find_spec("comfyui_workflow_templates_json").origin).parent / "templates"
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.json"))}
    return [name for name, text in texts.items() if '"nodes"' in text
            and ('"type": "UNETLoader"' in text or '"type": "CheckpointLoaderSimple"' in text)]


def run_command(page, name):
    page.evaluate("name => app.extensionManager.command.execute(name)", f"xdit.{name}")


def types_of(workflow):
    return {node["type"] for graph in graphs_of(workflow) for node in graph["nodes"]}


def graphs_of(workflow):
    return [workflow, *(workflow.get("definitions") or {}).get("subgraphs", [])]


@pytest.mark.parametrize("name", by_default({"sdxl_simple_example"}, TEMPLATES))
def test_a_template_there_and_back(page, host, tmp_path, name):
    """In one step of the history each; the graph on all GPUs is one that the server takes."""
    given = stock(name)
    files = {(one["directory"], one["name"]) for graph in graphs_of(given)
             for node in graph["nodes"] for one in node.get("properties", {}).get("models", [])}
    # as if they were whole
    page.route("**/xdit/check", lambda route: route.fulfill(json=CHECKED))
    page.evaluate("graph => app.loadGraphData(graph)", given)
    # the page goes on changing what it has loaded for a moment
    page.wait_for_timeout(500)
    undo = page.evaluate(COUNT_UNDO)
    before = page.evaluate(SERIALIZE)

    run_command(page, "RunOnAllGpus")
    on_all = page.evaluate(SERIALIZE)
    prompt = page.evaluate("async () => (await app.graphToPrompt()).output")
    assert page.evaluate(COUNT_UNDO) == undo + 1
    run_command(page, "RunOnOneGpu")
    after = page.evaluate(SERIALIZE)
    page.evaluate("() => app.extensionManager.workflow.activeWorkflow.changeTracker.undo()")
    page.unroute("**/xdit/check")

    assert {"XDiTLoadModel", "XDiTVAEDecode"} <= types_of(on_all)
    assert not {"UNETLoader", "CheckpointLoaderSimple", "KSampler", "VAEDecode"} & types_of(on_all)
    assert without_order(after) == without_order(before)
    assert page.evaluate(SERIALIZE) == on_all
    assert page.problems == []
    base = Path(host.log).parent / "models"
    made = [base / folder / file for folder, file in files if not (base / folder / file).exists()]
    for path in made:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    try:
        status, answer = validated(host, prompt)
    finally:
        for path in made:
            path.unlink()
    assert (status, answer.get("node_errors")) == (200, {})


@pytest.mark.slow
def test_drawn_templates_go_there_and_back_without_a_changed_byte(page):
    """All of them do so as files, in tests/integration/page/test_convert_in_node.py; this is through the page, which
    loads and writes them."""
    drawn = random.Random(DRAWN).sample(with_a_loader(), DRAWN)
    page.route("**/xdit/check", lambda route: route.fulfill(json=CHECKED))
    changed = {}
    for name in drawn:
        page.evaluate("graph => app.loadGraphData(graph)", stock(name))
        page.wait_for_timeout(300)
        before = page.evaluate(SERIALIZE)
        run_command(page, "RunOnAllGpus")
        changed[name] = "XDiTLoadModel" in types_of(page.evaluate(SERIALIZE))
        if changed[name]:
            run_command(page, "RunOnOneGpu")
        assert without_order(page.evaluate(SERIALIZE)) == without_order(before), name
    page.unroute("**/xdit/check")

    assert sum(changed.values()) >= DRAWN / 2 and page.problems == []


def test_the_keys_convert_and_the_page_says_what_stays(page):
    page.evaluate("graph => app.loadGraphData(graph)", stock("utility_image_segment_sam3"))
    before = page.evaluate(SERIALIZE)

    page.keyboard.press("Alt+Shift+G")
    page.wait_for_function("words => document.querySelector('.p-toast')?.innerText.includes(words)",
                           arg="for SAM 3, which xDiT does not support")

    assert page.evaluate(SERIALIZE) == before
    assert page.problems == []


# Of each kind of answer: models that are not run, by the node that says so, and models whose files are not here.
ANSWERS = {"utility_image_segment_sam3": "for SAM 3, which xDiT does not support",
           "utility_sdpose_ood_image_to_pose": "for SDPose, which xDiT does not support",
           "video_causal_forcing_i2v": "the sampler ar_video (Sampler AR Video)",
           "video_wan21_scail2_character_replacement": "is not here, so it was not checked|are not here, so they were",
           "image_omnigen2_t2i": "omnigen2_fp16.safetensors is not here, so it was not checked"}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_page_asks_what_would_refuse_a_run(page, name):
    page.evaluate("() => app.extensionManager.toast.removeAllGroups?.()")
    page.evaluate("graph => app.loadGraphData(graph)", stock(name))
    page.wait_for_timeout(500)

    page.evaluate("""() => {
        window.toasts = [];
        const { toast } = app.extensionManager, add = toast.add;
        toast.add = (message) => { toasts.push(message); toast.add = add; return add.call(toast, message); };
    }""")
    run_command(page, "RunOnAllGpus")
    [toast] = page.evaluate("() => toasts")

    is_left = "does not support" in ANSWERS[name] or "ar_video" in ANSWERS[name]
    assert any(words in f"{toast['summary']} {toast['detail']}" for words in ANSWERS[name].split("|")), toast
    assert toast["severity"] == "warn"                         # ComfyUI would refuse it: its files are not here
    assert ("XDiTLoadModel" in types_of(page.evaluate(SERIALIZE))) != is_left
    assert page.problems == []


@pytest.mark.parametrize("body", [b"no json", b"[]", b"{}", b'{"prompt": []}', b'{"prompt": {}, "more": []}',
                                  b'{"prompt": {"1": {"class_type": 1, "inputs": {}}}}',
                                  b'{"prompt": {"1": {"class_type": "KSampler", "inputs": []}}}'])
def test_a_check_of_another_form_is_refused(host, body):
    status, answer = post(host, "/xdit/check", body)

    assert status == 400 and "API format" in answer["error"]


def test_the_server_says_which_files_it_would_refuse(host):
    prompt = {str(number): {"class_type": "UNETLoader", "inputs": {"unet_name": name}} for number, name in enumerate(
        ("sd3.5_medium.safetensors", "../comfyui.log", "absent.safetensors", "xdit_demo.safetensors"))}
    prompt |= {f"vae {name}": {"class_type": "VAELoader", "inputs": {"vae_name": name}}
               for name in ("ae.safetensors", "xdit_demo_vae.safetensors")}
    prompt |= {f"user {loader}": {"class_type": "VAEDecode", "inputs": {"vae": [loader, 0]}} if "vae" in loader else
               {"class_type": "KSampler", "inputs": {"model": [loader, 0]}} for loader in prompt}
    status, answer = post(host, "/xdit/check", json.dumps({"prompt": prompt}).encode())

    assert status == 200                                       # the files of the templates are empty
    assert answer["models"] == {"sd3.5_medium.safetensors": "Download sd3.5_medium.safetensors again: it is empty."}
    assert set(answer["vaes"]) == {"ae.safetensors"} and answer["absent"] == ["absent.safetensors"]


STOCK, SEED = 45, 12
# Boxes with titles, as drawn: [graph, id, type, left, top, right, bottom, whether the conversion made or changed it].
READ_BOXES = """() => [app.rootGraph, ...app.rootGraph.subgraphs.values()].flatMap((graph, index) =>
  graph.nodes.map((node) => {
    const [left, top, width, height] = node.boundingRect;
    const was = Boolean(node.properties.xdit_was);
    return [index, String(node.id), node.type, left, top, left + width, top + height, was];
}))"""


def stock_sample():
    return random.Random(SEED).sample(with_a_loader(), STOCK) if has_stock() else ["default"]


def has_stock():
    return importlib.util.find_spec("comfyui_workflow_templates_json") is not None


def overlaps(boxes):
    """Pairs of types of nodes whose boxes overlap, if one of them was converted."""
    return [(one[2], other[2]) for at, one in enumerate(boxes) for other in boxes[:at]
            if one[0] == other[0] and (one[7] or other[7])
            and max(one[3], other[3]) < min(one[5], other[5]) and max(one[4], other[4]) < min(one[6], other[6])]


@pytest.mark.parametrize("name", by_default({"default"}, stock_sample()))
def test_converted_nodes_cover_no_other_one(page, name):
    """In the page, which enlarges nodes whose slots or title need it."""
    page.route("**/xdit/check", lambda route: route.fulfill(
        json={"models": {}, "vaes": {}, "absent": [], "missing": [], "nodes": {}}))
    page.evaluate("graph => app.loadGraphData(graph)", stock(name))
    page.wait_for_timeout(300)
    run_command(page, "RunOnAllGpus")
    page.wait_for_timeout(300)
    page.evaluate("() => { for (const node of app.rootGraph.nodes) node.updateArea(); }")
    boxes = page.evaluate(READ_BOXES)
    page.unroute("**/xdit/check")

    assert overlaps(boxes) == [] and len(boxes) > 2
