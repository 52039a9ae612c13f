"""The prompt of a run, changed to run on one device (web/measure.js); in Node, without a page."""

import json

from tests.support.page_modules import evaluate

DEFAULTS = {"devices": "auto", "mode": "auto", "cfg_degree": 1, "tensor_degree": 1, "num_patches": 0}


def changed(node, modules, prompt):
    return evaluate(node, modules / "measure.mjs", "onOneDevice",
                    f"""(() => {{
                        const prompt = {json.dumps(prompt)}, before = JSON.stringify(prompt);
                        const after = onOneDevice(prompt, "cuda:1", {json.dumps(DEFAULTS)});
                        return [after, JSON.stringify(prompt) === before];
                    }})()""")


def test_every_config_selects_one_device_and_keeps_other_settings(node, modules):
    prompt = {"1": {"class_type": "XDiTParallelConfig", "inputs": {
                  "devices": "cuda:1,cuda:2", "mode": "manual", "cfg_degree": 2, "tensor_degree": ["9", 0],
                  "num_patches": 4, "compile": "blocks"}},
              "2": {"class_type": "XDiTLoadModel", "inputs": {"model": "a.safetensors", "parallel": ["1", 0]}},
              "3": {"class_type": "KSampler", "inputs": {"model": ["2", 0], "seed": 5}}}

    after, is_untouched = changed(node, modules, prompt)

    assert is_untouched and {key: after[key] for key in "23"} == {key: prompt[key] for key in "23"}
    assert after["1"]["inputs"] == {"devices": "cuda:1", "mode": "auto", "cfg_degree": 1, "tensor_degree": 1,
                                    "num_patches": 4, "compile": "blocks"}


def test_a_loader_without_a_config_gets_one(node, modules):
    after, _ = changed(node, modules, {"2": {"class_type": "XDiTLoadModel", "inputs": {"model": "a.safetensors"}}})

    added, slot = after["2"]["inputs"]["parallel"]
    assert slot == 0 and after[added] == {"class_type": "XDiTParallelConfig", "inputs": DEFAULTS | {
        "devices": "cuda:1"}}
