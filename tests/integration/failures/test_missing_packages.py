"""Where a package is missing that the workers need, ComfyUI lists all nodes,
and who runs one is told what to install."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.comfyui_server import ROOT, comfyui_folder
from tests.support.tiny_checkpoints import save_gguf

INSTALL = (r"python -m pip install -r requirements.txt \(in the folder of the xDiT nodes, with ComfyUI's Python\), "
           r"and restart ComfyUI")


@pytest.fixture(scope="module")
def base(comfyui, tmp_path_factory):
    base = tmp_path_factory.mktemp("without")
    (base / "diffusion_models").mkdir()
    source = comfyui.base / "diffusion_models" / comfyui.file("sd3")
    (base / "diffusion_models" / "plain.safetensors").symlink_to(source)
    save_gguf(base / "diffusion_models" / "quantised.gguf", source)
    return base


@pytest.mark.parametrize("package, says", [
    ("greenlet", ("plain.safetensors", "quantised.gguf", "decode")),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("diffusers", ("plain.safetensors", "quantised.gguf", "decode")), ("gguf", ("quantised.gguf",))))])
def test_all_nodes_load_and_say_what_is_missing(comfyui, base, package, says):
    """says: what cannot be done without it. The rest can."""
    command = [sys.executable, "-m", "tests.support.without_packages", str(base), package]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200,
                             env=os.environ | {"XDIT_COMFYUI": str(comfyui_folder())})
    assert process.returncode == 0, process.stderr[-2000:]
    answers = json.loads(process.stdout.splitlines()[-1])

    assert answers["missing"] == [package] and answers["loaded"], process.stderr[-2000:]
    assert answers["nodes"] == sorted(name for name in comfyui.nodes.NODE_CLASS_MAPPINGS if name.startswith("XDiT"))
    # a warning in the log as soon as the pack is loaded
    assert re.search(rf'xDiT: {package} is missing in ComfyUI\'s Python\. Install with: "\S+" -m pip install -r '
                     r'"\S+requirements\.txt"', process.stderr), process.stderr[-2000:]
    needs = (rf"(Install {package}, which this Python does not have: |Install the package {package}, which GGUF files "
             rf"need: ){INSTALL}")
    for what in ("plain.safetensors", "quantised.gguf", "decode", "prompt"):
        assert re.search(needs, answers[what]) if what in says else answers[what] == "ran", answers
