"""Fixtures of the browser tests: a real ComfyUI with this pack and the templates' files, and its page in Chromium."""

import json
import re
import urllib.error
import urllib.request

import pytest
from PIL import Image

from tests.support.chromium import ARGUMENTS, find_chromium
from tests.support.comfyui_server import ROOT, Host, comfyui_folder, make_base

# the answer of POST /xdit/check for a graph without anything to reject, whose files are all here
CHECKED = {"models": {}, "vaes": {}, "absent": [], "missing": [], "nodes": {}}
PANEL_BUTTON = ".xdit-tab-button, [data-testid=xdit-tab-button]"     # the second in newer pages


@pytest.fixture(scope="package")
def host(tmp_path_factory):
    comfyui = comfyui_folder()
    if comfyui is None:
        pytest.skip("no ComfyUI: run `python3 start.py test`, or name one in XDIT_COMFYUI")
    if not (ROOT / "__init__.py").is_file():
        pytest.skip("the pack has no __init__.py")
    base = tmp_path_factory.mktemp("comfyui")
    make_base(base)
    for folder, names in template_files():
        (base / "models" / folder).mkdir(parents=True, exist_ok=True)
        # empty: the page lists names, and marks those that are not there
        for name in names:
            (base / "models" / folder / name).touch()
    (base / "input").mkdir(exist_ok=True)
    Image.new("RGB", (64, 64)).save(base / "input" / "example.png")         # ComfyUI brings one of this name
    with Host(comfyui, base) as host:
        yield host


@pytest.fixture(scope="package")
def chromium():
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium or Chrome: install one, or name it in XDIT_CHROMIUM")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:  # each launch has a new, empty user-data-dir
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(chromium, host):
    """ComfyUI's page, loaded and ready; exceptions of its scripts are collected in `page.problems`."""
    page = chromium.new_page(viewport={"width": 1600, "height": 900})
    page.set_default_timeout(120_000)      # of a busy machine
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(host.url)
    page.wait_for_function("() => window.app?.graph && window.LiteGraph?.registered_node_types?.XDiTLoadModel")
    page.wait_for_function("() => app.graph.nodes.length > 0")     # its own first graph would replace ours
    yield page
    page.close()


def template_paths():
    return sorted((ROOT / "workflows").glob("*.json"))


def template_files():
    """[(folder of models, names)]: the files that the templates' own notes tell people to get."""
    return [row for path in template_paths() for row in files_of_note(path.stem)[0]]


def files_of_note(name):
    """([(folder of models, names)], text) of a template's note."""
    [text] = [node["widgets_values"][0] for node in template(name)["nodes"] if node["type"] == "MarkdownNote"]
    rows = re.findall(r"(?m)^\| (`.+?`) \| `models/(\w+)`", text)
    return [(folder, re.findall("`(.+?)`", names)) for names, folder in rows], text


def template(name):
    return json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))


def post(host, path, body):
    """(status, answer) of a POST to ComfyUI."""
    request = urllib.request.Request(host.url + path, data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.loads(answer.read() or "null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def validated(host, prompt):
    """(status, answer) of the server that is given a graph to run, which is taken back."""
    status, answer = post(host, "/prompt", json.dumps({"prompt": prompt}).encode())
    post(host, "/queue", b'{"clear": true}')
    post(host, "/interrupt", b"{}")
    return status, answer
