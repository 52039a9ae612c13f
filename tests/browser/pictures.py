"""Takes the README's pictures of the page, with the real ComfyUI and two CPU workers:

    python -m tests.browser.pictures

Writes web/panel.png (the panel after a run with PipeFusion) and web/converted.png (a template of ComfyUI's own on all GPUs).
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

from tests.browser.chromium import ARGUMENTS, find_chromium
from tests.comfyui_server import ROOT, Host, comfyui_folder, make_base

TEMPLATE = "flux_dev_full_text_to_image"
SETTINGS = {"XDiTParallelConfig": {"devices": "cpu,cpu", "mode": "manual", "pipefusion_degree": 2, "num_patches": 4},
            "XDiTParallelSampler": {"steps": 12}}
READY = "() => window.LiteGraph?.registered_node_types?.XDiTLoadModel && window.app?.graph?.nodes.length > 0"
SET = """given => {
    for (const [type, values] of Object.entries(given))
        for (const [name, value] of Object.entries(values))
            app.graph.nodes.find(node => node.type === type).widgets.find(widget => widget.name === name).value = value;
}"""


def main():
    path, comfyui = find_chromium(), comfyui_folder()
    if path is None or comfyui is None:
        print("This needs Chromium (or XDIT_CHROMIUM) and ComfyUI: run `python3 start.py test` once.")
        return 2
    from playwright.sync_api import sync_playwright
    with tempfile.TemporaryDirectory() as base, sync_playwright() as playwright:
        make_base(base)
        with Host(comfyui, base) as host:
            browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
            page = browser.new_page(viewport={"width": 1400, "height": 1180}, device_scale_factor=1)
            page.goto(host.url)
            page.wait_for_function(READY, timeout=60_000)
            take_panel(page)
            take_converted(page)
            browser.close()
    return 0


def take_panel(page):
    page.evaluate("graph => app.loadGraphData(graph)", json.loads((ROOT / "workflows" / "demo.json").read_text(encoding="utf-8")))
    page.evaluate(SET, SETTINGS)
    page.locator(".xdit-tab-button").click()
    page.wait_for_selector(".xdit-device")
    page.evaluate("() => app.queuePrompt(0)")
    page.wait_for_selector(".xdit-panel dl[data-state=done]", timeout=300_000)
    page.wait_for_selector(".xdit-time rect[data-kind=decode]", state="attached", timeout=60_000)
    for _ in range(3):                                         # the sampling, without what came after it
        page.locator("[data-zoom=zoom_in]").click()
    for _ in range(10):
        page.locator(".xdit-time").press("ArrowLeft")
    page.wait_for_timeout(1500)
    page.locator(".xdit-panel").screenshot(path=ROOT / "web" / "panel.png")
    page.locator(".xdit-tab-button").click()


def take_converted(page):
    found = importlib.util.find_spec("comfyui_workflow_templates_json")
    template = Path(found.origin).parent / "templates" / f"{TEMPLATE}.json"
    page.route("**/xdit/refusals", lambda route: route.fulfill(json={"models": {}, "vaes": {}}))
    page.evaluate("graph => app.loadGraphData(graph)", json.loads(template.read_text(encoding="utf-8")))
    page.wait_for_timeout(1000)
    page.evaluate("() => app.extensionManager.command.execute('xdit.RunOnAllGpus')")
    page.wait_for_selector(".p-toast-message")
    page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    page.wait_for_timeout(1500)
    page.screenshot(path=ROOT / "web" / "converted.png")


if __name__ == "__main__":
    sys.exit(main())
