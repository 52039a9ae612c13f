"""How weights come from host memory in a run from the node: by what the devices were measured to do."""

import dataclasses
import importlib
import re

import pytest

from tests.integration.failures.test_memory_checks import apart
from tests.integration.sampling.test_pipefusion import EXACT
from tests.support.tolerances import close


@pytest.fixture
def sent(comfyui, monkeypatch):
    """[(is_pageable, is_shared) of each command for the workers]"""
    found, module = [], importlib.import_module(f"{comfyui.pack.__name__}.xdit_backend.host.client").messages
    predict = module.Predict

    def made(*given, **settings):
        command = predict(*given, **settings)
        found.append((command.options.copies.is_pageable, command.options.copies.is_shared))
        return command
    monkeypatch.setattr(module, "Predict", made)
    return found


@pytest.mark.parametrize("gather_bytes_s, pageable, given", [
    (1e12, 0.0, {"mode": "auto"}), pytest.param(1e6, 1.0, {"mode": "auto"}, marks=pytest.mark.slow),
    (1e12, 1.0, {"ulysses": 2}), pytest.param(1e6, 0.0, {"cfg": 2}, marks=pytest.mark.slow)],
    ids=["fast links", "by the driver", "fast links and by the driver, degrees by hand", "degrees by hand"])
def test_devices_share_what_comes_over_fast_links_and_copy_as_the_probe_found_faster(
        comfyui, said, monkeypatch, sent, gather_bytes_s, pageable, given):
    """The picture is one device's, and the node says so. Two cards have room for nine tenths of the weights each."""
    apart(comfyui, monkeypatch)
    wanted = comfyui.sample(comfyui.ours("sd3", comfyui.config("cpu"), size="demo"), "sd3", steps=4)
    weights = comfyui.ours("sd3", comfyui.config("cpu"), size="demo").model.remote.memory.model_bytes
    choice, cost, planner, remote = (importlib.import_module(f"{comfyui.pack.__name__}.{name}") for name in (
        "xdit_backend.planner.layout_search", "xdit_backend.planner.cost_model", "xdit_backend.planner.planner",
        "nodes.bridge.sampling.remote_model"))
    for module in (planner, remote):                           # a usual picture has no room beside so few weights
        monkeypatch.setattr(module, "USUAL_JOB", cost.Job(64, 20, 20))
    gpu = cost.Device(1e10, 1e10, 1e12, memory_bytes=0.9 * weights, host_bytes_s=1e6, host_pageable=pageable)
    rates = dict.fromkeys([("hop", 2), ("all_to_all", 2)], 1e5) | {("gather", 2): gather_bytes_s}
    machine = choice.Machine((gpu, dataclasses.replace(gpu)), cost.Links(rates))
    monkeypatch.setattr(comfyui.groups, "machine", lambda *given, **more: machine)
    monkeypatch.setattr(comfyui.proxy, "memory_of", lambda device: 0.9 * weights)
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", weights_memory=f"{0.6 * weights / 1e9}", **given),
                         size="demo")
    sent.clear()
    said.clear()

    result = comfyui.sample(model, "sd3", steps=4)

    shared = gather_bytes_s > 1e6
    assert re.search(r"streamed at every step.*(, hidden behind |transfer-bound)", said[0])
    assert ("one shard by each device" in said[0]) == shared
    assert sent == [(bool(pageable), shared)] * 4
    close(result, wanted, EXACT)
