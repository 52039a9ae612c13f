"""Runs the page's modules that need no page, in Node. Used by test_convert_in_node.py and test_translations.py."""

import json
import re
import subprocess

import pytest

from tests.support.comfyui_server import ROOT

NAMES = ("change", "check", "config", "convert", "dom", "graph", "loaders", "measure", "messages", "packs", "placing",
         "report", "stock", "takeover", "templates", "texts", "timeline", "translate", "zh", "zh_notes")


def node_program():
    """Path of Node, as playwright brings it."""
    pytest.importorskip("playwright")
    from playwright._impl._driver import compute_driver_executable
    return compute_driver_executable()[0]


def write_modules(folder):
    """Write the modules under names that say to Node what they are. Returns the folder."""
    for name in NAMES:
        text = (ROOT / "web" / f"{name}.js").read_text(encoding="utf-8")
        (folder / f"{name}.mjs").write_text(re.sub(r'from "\./(\w+)\.js"', r'from "./\1.mjs"', text), encoding="utf-8")
    return folder


def evaluate(node, module, name, expression):
    """What an expression of JavaScript is, or a promise of it comes to, with this name of the module."""
    script = f"import {{ {name} }} from {json.dumps(str(module))}; console.log(JSON.stringify(await {expression}));"
    return json.loads(subprocess.run([node, "--input-type=module", "-e", script], stdout=subprocess.PIPE,
                                     check=True).stdout)
