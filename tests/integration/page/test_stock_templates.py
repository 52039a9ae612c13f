"""ComfyUI's own templates on all GPUs come to what they come to on one: tests/programs/stock_templates.py, of which
some are drawn here. docs/reference/templates.md has all."""

import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.page.prompts import prompts_of
from tests.programs.stock_templates import rows, templates
from tests.support.chromium import find_chromium
from tests.support.comfyui_server import ROOT, comfyui_folder

DRAWN, SEED = 10, 3
FEW = ("03_video_wan2_2_14B_i2v_subgraphed",)


@pytest.mark.slow
@pytest.mark.parametrize("names", [
    FEW, random.Random(SEED).sample([name for name, row in rows().items() if row[0] == "equal"], DRAWN)],
    ids=["few", "drawn"])
def test_templates_come_to_what_they_come_to_on_one_gpu(names):
    if comfyui_folder() is None or find_chromium() is None:
        pytest.skip("no ComfyUI, or no Chromium: run `python3 start.py test`")
    pytest.importorskip("playwright.sync_api")

    done = subprocess.run([sys.executable, "-m", "tests.programs.stock_templates", *names], cwd=ROOT,
                          capture_output=True,
                          text=True)

    outcomes = dict(re.findall(r"(?m)^(\S+) (\w[\w ]*): ", done.stdout))
    # one may be chaotic by what its nodes draw: then ComfyUI's own differs from itself as much
    assert done.returncode == 0 and outcomes.keys() == set(names), done.stdout + done.stderr[-2000:]
    assert {*outcomes.values()} <= {"equal", "chaotic"} and "equal" in outcomes.values(), done.stdout


def test_no_template_of_the_table_is_wrong():
    words = {word for word, _ in rows().values()}
    assert len(rows()) > 200 and words <= {"equal", "chaotic", "rejected", "left", "not run", "not compared"}


@pytest.mark.slow
def test_the_page_leaves_each_template_that_a_run_would_reject_and_no_other():
    """Without their files. docs/reference/templates.md has what each comes to in a run; those with nodes of ComfyUI's
    partners, which this ComfyUI does not have, are not in question."""
    if comfyui_folder() is None or find_chromium() is None:
        pytest.skip("no ComfyUI, or no Chromium: run `python3 start.py test`")
    pytest.importorskip("playwright.sync_api")
    wrong = []

    with ThreadPoolExecutor(1) as pool:                        # other tests' Playwright has this thread's event loop
        prompts = pool.submit(lambda: list(prompts_of(templates()))).result()
    for name, given, on_all in prompts:
        assert not isinstance(given, Exception), (name, given)
        word = rows().get(name, ("not compared",))[0]          # of another version of the templates than the table's
        is_converted = any(node["class_type"] == "XDiTLoadModel" for node in on_all.values())
        if is_converted != (word in ("equal", "chaotic")) and word != "not compared":
            wrong.append((name, word, is_converted))

    assert wrong == []
