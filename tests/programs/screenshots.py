"""Takes the README's pictures of the page, with the real ComfyUI and two CPU workers:

    python -m tests.programs.screenshots

Writes web/graph.png (a template), web/panel.png (the panel after a run with PipeFusion) and web/converted.png (a
template of ComfyUI's own on all GPUs).
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

from tests.integration.page.conftest import PANEL_BUTTON
from tests.support.chromium import ARGUMENTS, find_chromium
from tests.support.comfyui_server import ROOT, Host, comfyui_folder, make_base

TEMPLATE = "flux_schnell_full_text_to_image"
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
        template, own = template_of_comfyui(), json.loads(
            (ROOT / "workflows" / "SD3.5.json").read_text(encoding="utf-8"))
        # with the files it names; the page marks a node that lacks one
        for node in template["nodes"] + own["nodes"]:
            for name in node.get("widgets_values", ()):
                if str(name).endswith(".safetensors"):
                    for folder in ("diffusion_models", "text_encoders", "vae"):
                        path_of_one = Path(base) / "models" / folder / name
                        path_of_one.parent.mkdir(parents=True, exist_ok=True)
                        path_of_one.touch()
        with Host(comfyui, base) as host:
            browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
            page = browser.new_page(viewport={"width": 1400, "height": 1180}, device_scale_factor=1)
            page.goto(host.url)
            page.wait_for_function(READY, timeout=60_000)
            take_graph(page, own)
            take_panel(page)
            take_converted(page, template)
            browser.close()
    return 0


def take_graph(page, template):
    for setting, value in (("LiteGraph.Canvas.MinFontSizeForLOD", 0), ("Comfy.Minimap.Visible", False)):
        page.evaluate("given => app.extensionManager.setting.set(...given)", [setting, value])
    page.set_viewport_size({"width": 1700, "height": 760})
    page.evaluate("graph => app.loadGraphData(graph)", template)
    page.wait_for_timeout(1000)
    page.evaluate("""() => {
        const { ds } = app.canvas;
        [ds.scale, ds.offset[0], ds.offset[1]] = [0.7, 540, 200];
        app.canvas.setDirty(true, true);
    }""")
    page.wait_for_timeout(1500)
    page.screenshot(path=ROOT / "web" / "graph.png", clip={"x": 70, "y": 98, "width": 1415, "height": 500})


def take_panel(page):
    page.set_viewport_size({"width": 1400, "height": 1180})

    page.evaluate("graph => app.loadGraphData(graph)",
                  json.loads((ROOT / "workflows" / "Demo.json").read_text(encoding="utf-8")))
    page.evaluate(SET, SETTINGS)
    page.locator(PANEL_BUTTON).click()
    page.wait_for_selector(".xdit-device")
    page.evaluate("() => app.queuePrompt(0)")
    page.wait_for_selector(".xdit-panel dl[data-state=done]", timeout=300_000)
    page.wait_for_selector(".xdit-time rect[data-kind=decode]", state="attached", timeout=60_000)
    for _ in range(2):                                         # steps of the middle
        page.locator("[data-zoom=zoom_in]").click()
    page.wait_for_timeout(1500)
    page.locator(".xdit-panel").screenshot(path=ROOT / "web" / "panel.png")
    page.locator(PANEL_BUTTON).click()


def template_of_comfyui():
    found = importlib.util.find_spec("comfyui_workflow_templates_json")
    return json.loads((Path(found.origin).parent / "templates" / f"{TEMPLATE}.json").read_text(encoding="utf-8"))


def take_converted(page, template):
    template["nodes"] = [node for node in template["nodes"] if "Note" not in node["type"]]
    next(node for node in template["nodes"] if node["type"] == "SaveImage")["size"] = [280, 300]
    page.set_viewport_size({"width": 1400, "height": 760})
    page.route("**/xdit/check", lambda route: route.fulfill(json={
        "models": {}, "vaes": {}, "absent": [], "missing": [], "nodes": {}}))
    page.evaluate("graph => app.loadGraphData(graph)", template)
    page.wait_for_timeout(1000)
    page.evaluate("() => app.extensionManager.command.execute('xdit.RunOnAllGpus')")
    page.wait_for_selector(".p-toast-message")
    page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    page.wait_for_timeout(1500)
    page.screenshot(path=ROOT / "web" / "converted.png")


if __name__ == "__main__":
    sys.exit(main())
