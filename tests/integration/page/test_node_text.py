"""Text on nodes while a prompt waits, starts and ends; the events are those of ComfyUI's server."""

import pytest

from tests.integration.page.conftest import template

TEXTS = """() => Object.fromEntries(app.graph.nodes.filter(node => node.widgets).map(node => [node.type,
    node.widgets.find(widget => widget.name === "$$node-text-preview")?.value])
    .filter(([, text]) => text !== undefined))"""
SEND = "([type, detail]) => window.comfyAPI.api.api.dispatchCustomEvent(type, detail)"
BOX = """() => {
    const { element } = app.graph.nodes.find(node => node.type === "XDiTParallelSampler").widgets
        .find(widget => widget.name === "$$node-text-preview");
    const { overflowWrap, wordBreak, whiteSpace } = getComputedStyle(element);
    return { overflowWrap, wordBreak, whiteSpace, role: element.role, isShown: element.isConnected };
}"""
WAITS = {"XDiTParallelSampler": "waiting for its turn", "XDiTVAEDecode": "waiting for its turn"}


@pytest.fixture
def demo(page):
    """The page with the Demo template: (send an event, texts of nodes by type, id of a node by type)."""
    page.evaluate("graph => app.loadGraphData(graph)", template("Demo"))
    page.wait_for_timeout(300)
    ids = page.evaluate("() => Object.fromEntries(app.graph.nodes.map(node => [node.type, String(node.id)]))")
    yield lambda type_, detail: page.evaluate(SEND, [type_, detail]), lambda: page.evaluate(TEXTS), ids
    page.evaluate(SEND, ["execution_success", {}])


def test_text_is_on_the_node_before_the_server_has_the_prompt(page, demo):
    """In the same turn of the event loop as the press of Run."""
    _, texts, _ = demo
    page.route("**/prompt", lambda route: route.abort())

    at_once = page.evaluate(f"() => {{ app.queuePrompt(0).catch(() => null); return ({TEXTS})(); }}")
    page.wait_for_function(f"() => !({TEXTS})().XDiTParallelSampler")        # the server did not take it
    page.unroute("**/prompt")

    assert at_once == WAITS


def test_a_node_that_starts_says_so_and_one_that_is_cached_gets_its_text_back(demo):
    send, texts, ids = demo
    send("promptQueueing", {})
    send("execution_start", {"prompt_id": "1"})
    send("executing", ids["XDiTVAEDecode"])
    assert texts() == WAITS | {"XDiTVAEDecode": "starting"}
    send("execution_success", {"prompt_id": "1"})
    assert set(texts().values()) == {""}

    for node in WAITS:
        send("progress_text", {"nodeId": ids[node], "text": "20 steps in 4.0 s"})
    send("promptQueueing", {})
    send("execution_cached", {"nodes": [ids["XDiTVAEDecode"]], "prompt_id": "2"})
    assert texts()["XDiTParallelSampler"] == "waiting for its turn"


def test_a_prompt_that_waits_for_a_running_one_leaves_its_texts(demo):
    send, texts, _ = demo
    send("execution_start", {"prompt_id": "1"})
    send("promptQueueing", {})

    assert "waiting for its turn" not in texts().values()


def test_text_wraps_at_words(page, demo):
    send, _, _ = demo
    send("promptQueueing", {})

    box = page.evaluate(BOX)

    assert box == {"overflowWrap": "break-word", "wordBreak": "normal", "whiteSpace": "pre-wrap", "role": "status",
                   "isShown": True}
