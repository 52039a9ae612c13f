"""The answer of a check turned into a conversion and its report: in Node, without a page."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.page_modules import evaluate

REASON = "this node is for SAM 3, which xDiT does not support."
NODE = {"id": 1, "type": "UNETLoader", "title": "Loader"}


@pytest.fixture(scope="module")
def segments():
    """ComfyUI's template whose SAM 3 is in a subgraph: (workflow, id of the subgraph's node, its nodes by type)."""
    found = importlib.util.find_spec("comfyui_workflow_templates_json")
    if found is None:
        pytest.skip("no templates of ComfyUI's own")
    path = Path(found.origin).parent / "templates" / "utility_image_segment_sam3.json"
    workflow = json.loads(path.read_text(encoding="utf-8"))
    [subgraph] = [one for one in workflow["definitions"]["subgraphs"]
                  if "SAM3_Detect" in {node["type"] for node in one["nodes"]}]
    [instance] = [node for node in workflow["nodes"] if node["type"] == subgraph["id"]]
    return workflow, instance["id"], {node["type"]: node["id"] for node in subgraph["nodes"]}


def converted(node, modules, workflow, check):
    """{others, left, types} after a conversion with the server's answer `check`."""
    return evaluate(node, modules / "convert.mjs", "toAllGpus", f"""(async () => {{
        const {{ verdictsOf }} = await import({json.dumps(str(modules / "check.mjs"))});
        const workflow = {json.dumps(workflow)};
        const {{ refusals, others }} = verdictsOf(workflow, {json.dumps(check)});
        const result = toAllGpus(workflow, refusals);
        const graphs = [result.workflow, ...(result.workflow.definitions?.subgraphs ?? [])];
        return {{ others, left: result.left, changed: result.changed,
            types: graphs.flatMap((graph) => graph.nodes.map((node) => node.type)) }};
    }})()""")


def answer(nodes=None, **other):
    return {"models": {}, "vaes": {}, "absent": [], "missing": [], "nodes": nodes or {}} | other


def test_a_refusal_inside_a_subgraph_leaves_its_loader_with_the_node_and_the_reason(node, modules, segments):
    workflow, instance, ids = segments
    loader, detect = (f"{instance}:{ids[kind]}" for kind in ("CheckpointLoaderSimple", "SAM3_Detect"))
    check = answer({loader: {"verdict": "refused", "by": detect, "reason": REASON}})

    found = converted(node, modules, workflow, check)

    [left] = [one for one in found["left"] if one["type"] == "CheckpointLoaderSimple"]
    assert (left["reason"], left["text"], left["inside"]) == ("patch", REASON, "Image Segment (SAM3)")
    assert left["by"]["type"] == "SAM3_Detect" and left["by"]["inside"] == "Image Segment (SAM3)"
    assert "XDiTLoadModel" not in found["types"]
    assert "XDiTLoadModel" in converted(node, modules, workflow, answer())["types"]


def test_a_loader_of_the_pack_that_would_be_rejected_is_named_as_well(node, modules, segments):
    workflow, instance, ids = segments
    ours = json.loads(json.dumps(workflow).replace('"CheckpointLoaderSimple"', '"XDiTLoadModel"'))
    loader = f"{instance}:{ids['CheckpointLoaderSimple']}"

    found = converted(node, modules, ours, answer({loader: {"verdict": "refused", "by": loader, "reason": REASON}}))

    assert [one["text"] for one in found["others"]["refused"]] == [REASON]


def report(node, modules, result, found=None, done="all_done", locale="en"):
    return evaluate(node, modules / "report.mjs", "reportOf", f"""(async () => {{
        const {{ say }} = await import({json.dumps(str(modules / "texts.mjs"))});
        return reportOf({json.dumps({"left": [], "stay": [], "already": False} | result)}, "{done}",
            {json.dumps(found or {})}, {{ text: (key, values) => say("{locale}", key, values),
            nameOf: ({{ title, type, id }}) => `${{title ?? type}} (${{id}})`, titleOf: (type) => type,
            translated: (message) => message }});
    }})()""")


def test_a_conversion_that_runs_is_green_and_says_how_many_nodes(node, modules):
    found = report(node, modules, {"changed": 3})

    assert (found["severity"], found["head"]) == ("success", "3 nodes converted")
    assert report(node, modules, {"changed": 1})["head"] == "1 node converted"


@pytest.mark.parametrize("found", [{"absent": ["flux1-dev.safetensors"]}, {"missing": ["clip_l.safetensors"]},
                                   {"unknown": ["NewNode"]}, {"others": {"refused": [{**NODE, "reason": "file",
                                                                                    "text": "No."}]}}], ids=str)
def test_no_toast_is_green_for_a_workflow_that_comfyui_would_refuse(node, modules, found):
    shown = report(node, modules, {"changed": 3}, found)

    assert shown["severity"] == "warn"
    told = " ".join([shown["head"], *shown["lines"]])
    assert all(name in told for name in ("flux1-dev", "clip_l", "NewNode", "No.") if name in json.dumps(found))


def test_a_file_that_is_not_here_was_not_checked(node, modules):
    heads = [report(node, modules, {"changed": 3}, {"absent": files})["head"] for files in (
        ["flux1-dev.safetensors"], ["a.safetensors", "b.safetensors"])]

    assert heads == ["3 nodes converted; flux1-dev.safetensors is not here, so it was not checked",
                     "3 nodes converted; a.safetensors, b.safetensors are not here, so they were not checked"]
    assert "flux1-dev.safetensors" in report(node, modules, {"changed": 3}, {"absent": ["flux1-dev.safetensors"]},
                                             locale="zh")["head"]


def test_each_node_stands_once_under_the_heading_that_is_true_of_it(node, modules):
    same = {"id": 4, "type": "KSamplerAdvanced", "reason": "as_it_is"}
    refused = {"id": 5, "type": "UNETLoader", "reason": "file", "text": "It is empty."}
    tiled = {"id": 6, "type": "VAEDecodeTiled", "reason": "tiled"}
    others = {"unchanged": [{"id": 7, "type": "LoraLoader"}, same], "no_effect": [{"id": 8, "type": "wanBlockSwap"}]}

    lines = report(node, modules, {"changed": 2, "left": [refused, refused], "stay": [same, same, tiled]},
                   {"others": others})["lines"]

    assert lines[:3] == ["Work unchanged: LoraLoader (7), KSamplerAdvanced (4)", "Change nothing: wanBlockSwap (8)",
                         "Not converted:"]
    assert lines[3] == "UNETLoader (5): It is empty." and lines[4].startswith("VAEDecodeTiled (6): its tiles")
    assert len(lines) == len(set(lines)) == 6


def test_where_nothing_is_converted_the_reason_is_the_heading(node, modules):
    refused = {"id": 5, "type": "UNETLoader", "reason": "patch", "by": {"id": 6, "type": "SAM3_Detect"}, "text": REASON}
    stays = {"id": 7, "type": "KSampler", "reason": "model_stays", "by": "UNETLoader"}

    found = report(node, modules, {"changed": 0, "left": [refused, stays], "stay": []},
                   {"absent": ["a.safetensors"], "others": {"unchanged": [{"id": 8, "type": "LoraLoader"}]}})

    assert found["severity"] == "warn"
    assert found["head"] == f"UNETLoader (5): because of SAM3_Detect (6): {REASON}"
    assert found["lines"] == ["Not converted:", "KSampler (7): its model is from UNETLoader, which is unchanged"]
