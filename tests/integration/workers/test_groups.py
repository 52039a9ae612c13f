"""Groups of workers live side by side: two MODELs on different devices in one workflow,
and what becomes of groups and models."""

import gc
import importlib
import sys
import time

import pytest
import torch

from tests.integration.sampling.test_proxy_model import TOLERANCE
from tests.support.tolerances import close, relative_error
from xdit_backend.planner.cost_model import Device, Links
from xdit_backend.planner.layout_search import Machine


def pids(comfyui, *names):
    """Worker pids of the group on these devices."""
    return sorted(numbers["pid"] for numbers in comfyui.groups.client(names).report_memory().values())


def sample_dual(comfyui, model, negative_model, steps=3):
    """Latents of ComfyUI's guider of two models: one for the prompt, one for the negative prompt."""
    from comfy_extras.nodes_custom_sampler import Guider_DualModel
    guider = Guider_DualModel(model, negative_model)
    guider.set_conds(comfyui.conditioning("sd3", 1), comfyui.conditioning("sd3", 2))
    guider.set_cfg(4.0)
    noise = torch.randn(comfyui.latent("sd3")["samples"].shape, generator=torch.Generator().manual_seed(7))
    sampler = comfyui.samplers.sampler_object("euler")
    sigmas = comfyui.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)
    with torch.inference_mode():
        return guider.sample(noise, torch.zeros_like(noise), sampler, sigmas, seed=7)


@pytest.mark.slow
def test_two_models_on_different_devices_run_in_one_guider_on_the_same_workers(comfyui):
    """Equal to the native guider; no group is ended or started in between, once both are there."""
    one, two = comfyui.ours("sd3", comfyui.config("cpu")), comfyui.ours("sd35", comfyui.config("cpu,cpu", ulysses=2))
    sample_dual(comfyui, one, two, steps=1)
    before = pids(comfyui, "cpu"), pids(comfyui, "cpu", "cpu")

    result = sample_dual(comfyui, one, two)

    assert (pids(comfyui, "cpu"), pids(comfyui, "cpu", "cpu")) == before
    reference = sample_dual(comfyui, comfyui.native("sd3"), comfyui.native("sd35"))
    close(result, reference, TOLERANCE)
    assert relative_error(result, comfyui.sample(one, "sd3")) > 1e-3           # the second model had a say


@pytest.fixture
def groups(comfyui):
    """Groups of their own, ended afterwards."""
    groups = type(comfyui.groups)()
    yield groups
    groups.close()


def test_a_third_group_on_a_device_ends_the_one_not_used_for_longest(groups, monkeypatch):
    """Their workers are not started here: clients start them when they are needed."""
    monkeypatch.setattr(sys.modules[type(groups).__module__], "MAX_SHARING", 2)
    one, two = groups.client(("cpu",)), groups.client(("cpu", "cpu"))
    elsewhere = groups.client(("cuda:7",))
    assert groups.client(("cpu",)) is one                      # used again, after two

    three = groups.client(("cpu", "cpu", "cpu"))

    assert groups.client_if(("cpu", "cpu")) is None and two is not None
    assert groups.client_if(("cpu",)) is one and groups.client_if(("cpu", "cpu", "cpu")) is three
    assert groups.client_if(("cuda:7",)) is elsewhere


def test_a_model_nothing_refers_to_is_dropped_by_the_workers(comfyui):
    """As soon as ComfyUI lets go of it, without another prompt."""
    model = comfyui.ours("pixart", comfyui.config("cpu,cpu"))
    comfyui.sample(model, "pixart", steps=1)
    client = comfyui.groups.client(("cpu", "cpu"))
    name = model.model.remote.spec.name
    held = client.report_memory()[0]["weight_bytes"]

    del model
    gc.collect()
    deadline_s = time.monotonic() + 120
    while client.holds(name) and time.monotonic() < deadline_s:
        time.sleep(0.05)

    assert not client.holds(name)
    assert client.report_memory()[0]["weight_bytes"] < held


def test_devices_of_other_machines_need_an_address_that_a_person_has_set(comfyui, groups, monkeypatch):
    module = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.workers.worker_groups")
    config = module.ParallelConfig(devices="cpu,other-pc/cpu")

    with pytest.raises(module.ConfigError, match="^Leave out other-pc, or set the address of this machine"):
        module.devices_of(config)

    monkeypatch.setattr(module, "chosen_address", lambda: "127.0.0.1:0")
    assert module.devices_of(config) == ("cpu", "other-pc/cpu")


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_model_on_two_machines(comfyui, monkeypatch, is_measured):
    """Stages where measuring fails; over a slow link they share branches. What the other machine has it says when it
    joins, and links are measured; here that is answered in its place, and nothing is started."""
    module = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.workers.worker_groups")
    monkeypatch.setattr(module, "chosen_address", lambda: "127.0.0.1:0")
    monkeypatch.setattr(module.Groups, "listener", lambda self: None)
    monkeypatch.setattr(module.Groups, "gpu_of", lambda self, device: ("a processor", 1e10))
    links = Links({("hop", 2): 1.0, ("all_to_all", 2): 1.0}, per_machine=1)

    def measure(groups, devices, dtype):
        if not is_measured:
            raise module.WorkerFailedError("out of order")
        return Machine((Device(1e6, 1e6, 1e6, memory_bytes=1e10),) * 2, links)
    monkeypatch.setattr(module.Groups, "_measure", measure)
    monkeypatch.setattr(comfyui.groups, "_machines", {})

    model = comfyui.ours("sd3", comfyui.config("cpu,other-pc/cpu"))

    stages = model.model.remote.spec.stages
    assert (stages and (stages.pipefusion_degree, stages.sequence_degree)) == (None if is_measured else (2, 1))
    assert model.load_device.type == "cpu" and model.model.remote.devices == ("cpu", "other-pc/cpu")
