"""What ComfyUI's own page sends to its server of its stock templates, as they are and after Run on all GPUs. Used by
tests/programs/stock_templates.py."""

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.support.chromium import ARGUMENTS, find_chromium
from tests.support.comfyui_server import Host, comfyui_folder, make_base

PROMPT = "async () => (await app.graphToPrompt()).output"


def prompts_of(templates):
    """Yield (name, prompt, prompt on all GPUs), each {id of a node: {"class_type", "inputs"}}, of {name: workflow}. An
    exception in the place of both is what the page raised."""
    from playwright.sync_api import Error, sync_playwright
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xdit-templates-")))
        make_base(base)
        host = stack.enter_context(Host(comfyui_folder(), base))
        browser = stack.enter_context(sync_playwright()).chromium.launch(executable_path=find_chromium(),
                                                                         args=ARGUMENTS)
        stack.callback(browser.close)
        page = browser.new_page(viewport={"width": 1600, "height": 900})
        page.set_default_timeout(120_000)
        page.goto(host.url)
        page.wait_for_function("() => window.app?.graph && window.LiteGraph?.registered_node_types?.XDiTLoadModel")
        page.wait_for_function("() => app.graph.nodes.length > 0")
        for name, workflow in templates.items():
            try:
                yield name, *_both(page, workflow)
            except Error as error:
                yield name, error, error


def _both(page, workflow):
    page.evaluate("graph => app.loadGraphData(graph)", json.loads(json.dumps(workflow)))
    # the page goes on changing what it has loaded for a moment
    page.wait_for_timeout(500)
    given = page.evaluate(PROMPT)
    page.evaluate("name => app.extensionManager.command.execute(name)", "xdit.RunOnAllGpus")
    return given, page.evaluate(PROMPT)
