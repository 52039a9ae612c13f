"""Devices that a workflow names and this machine lacks: an error, or a warning on the node that names them."""

import logging
import sys

import pytest


@pytest.fixture
def told(comfyui, monkeypatch):
    """Texts on xDiT Parallel Config, on a machine without a GPU."""
    texts, pack = [], comfyui.pack.__name__
    monkeypatch.setattr(sys.modules[f"{pack}.nodes.parallel_config"], "show_text", texts.append)
    monkeypatch.setattr(sys.modules[f"{pack}.nodes.bridge.workers.worker_groups"], "num_cuda_devices", lambda: 0)
    return texts


@pytest.mark.parametrize("devices, missing", [("cuda:1", "cuda:1"), ("cuda:0,cuda:1", "cuda:0, cuda:1"),
                                              ("cuda", "cuda:0")])
def test_a_shared_workflow_says_on_the_node_and_in_the_log_what_this_machine_lacks(comfyui, told, caplog, devices,
                                                                                 missing):
    """Also where as many devices are used as it names."""
    with caplog.at_level(logging.WARNING):
        comfyui.config(devices, mode="auto")

    assert told == [f"using cpu, cpu: this machine lacks {missing}"] and f"lacks {missing}" in caplog.text


@pytest.mark.parametrize("devices", ["auto", "cpu", "cpu,cpu"])
def test_devices_that_are_here_are_not_commented_on(comfyui, told, devices):
    comfyui.config(devices, mode="auto")

    assert told == []


def test_manual_degrees_on_a_missing_device_are_an_error(comfyui, told):
    with pytest.raises(comfyui.errors.ConfigError, match='devices="cuda:0,cuda:1" names cuda:0'):
        comfyui.config("cuda:0,cuda:1", cfg=2)


def test_manual_mode_uses_the_devices_that_auto_uses(comfyui, told):
    groups = sys.modules[f"{comfyui.pack.__name__}.nodes.bridge.workers.worker_groups"]

    assert groups.devices_of(comfyui.config("auto", cfg=2)) == groups.devices_of(comfyui.config("auto", mode="auto"))


def test_the_run_names_them_as_well(comfyui, told, said):
    """Where ComfyUI has cached the settings' node, which then says nothing."""
    model = comfyui.ours("sd3", comfyui.config("cuda:0,cuda:1", mode="auto"))

    comfyui.sample(model, "sd3", steps=1)

    assert said[0].startswith("running on cpu, cpu (this machine lacks cuda:0, cuda:1): CFG 2")
