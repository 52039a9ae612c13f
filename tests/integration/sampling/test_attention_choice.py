"""attention auto: which runs take the measured fastest operators, with a double for the measured devices."""

import dataclasses
import importlib
from types import SimpleNamespace

import pytest

MODULE = "nodes.bridge.sampling.layout_selection"


@pytest.fixture
def estimates(comfyui, monkeypatch):
    """estimates(settings, devices, measured): Estimates of a MODEL that counts as running on these devices."""
    module = importlib.import_module(f"{comfyui.pack.__name__}.{MODULE}")
    cost_model = importlib.import_module(f"{comfyui.pack.__name__}.xdit_backend.planner.cost_model")
    device = cost_model.Device(1e12, 1e12, 1e11, operators={
        f"{name} {head} {keys}": seconds for name, seconds in (("sdpa", 2.0), ("torch_cudnn", 1.0))
        for head in (64, 128) for keys in (1024, 4096, 16384)})
    asked = []

    def make(devices=("cuda:0", "cuda:1"), measured=True, **settings):
        setup = comfyui.ours("sd3", comfyui.config("cpu", **settings)).model.remote.setup
        machine = SimpleNamespace(devices=(device,) * len(devices)) if measured else None

        def find(*arguments):
            asked.append(arguments)
            return machine
        monkeypatch.setattr(comfyui.groups, "machine", find)
        made = module.Estimates(dataclasses.replace(setup, devices=devices), None)
        made.asked = asked
        return made
    return make


def choice(comfyui, made, of_node=None):
    """BackendChoice.fastest of a call."""
    specs = importlib.import_module(f"{comfyui.pack.__name__}.xdit_backend.protocol.specs")
    override = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.compatibility.attention_override")
    calls = importlib.import_module(f"{comfyui.pack.__name__}.xdit_backend.host.calls")
    backend = override.backend_of(made._setup.config, of_node)
    call = calls.Call(None, None, {}, options=specs.ForwardOptions(backend=backend))
    [call] = made.with_measurements([call])
    return call.options.backend.fastest


def test_auto_is_the_default_and_takes_the_fastest_operator_once_a_run(comfyui, estimates):
    made = estimates()

    assert made._setup.config.attention == "auto"
    for _ in range(3):
        assert set(choice(comfyui, made).values()) == {"torch_cudnn"}
    assert len(made.asked) == 1
    made.end()
    choice(comfyui, made)
    assert len(made.asked) == 2


@pytest.mark.parametrize("case", [
    {"attention": "as ComfyUI"}, {"attention": "sdpa"}, {"attention": "xformers"}, {"measured": False},
    {"devices": ("cpu", "cpu")}, {"devices": ("cuda:0", "cpu")}, {"of_node": "sdpa"}, {"started": "attention_sage"},
    {"started": "attention_comfy_kitchen_int8"}], ids=str)
def test_other_selections_and_unmeasured_devices_are_as_before(comfyui, estimates, monkeypatch, case):
    """Sage, with which ComfyUI was started, is the user's choice."""
    settings = {name: value for name, value in case.items() if name not in ("of_node", "started")}
    if "started" in case:
        attention = importlib.import_module("comfy.ldm.modules.attention")
        monkeypatch.setattr(attention, "optimized_attention", SimpleNamespace(__name__=case["started"]))

    assert choice(comfyui, estimates(**settings), case.get("of_node")) == {}


@pytest.mark.parametrize("started", ["attention_flash", "attention_xformers", "attention_split"])
def test_an_exact_backend_that_comfyui_was_started_with_is_replaced_by_a_faster_one(comfyui, estimates, monkeypatch,
                                                                                  started):
    attention = importlib.import_module("comfy.ldm.modules.attention")
    monkeypatch.setattr(attention, "optimized_attention", SimpleNamespace(__name__=started))

    assert set(choice(comfyui, estimates()).values()) == {"torch_cudnn"}


@pytest.mark.parametrize("is_long, devices, expected", [(True, ("cuda:0",), True), (False, ("cuda:0",), False),
                                                        (True, ("cuda:0", "cuda:1"), False)])
def test_one_gpu_is_measured_before_its_first_long_run(comfyui, estimates, monkeypatch, is_long, devices, expected):
    """Several are measured for their layout."""
    module = importlib.import_module(f"{comfyui.pack.__name__}.{MODULE}")
    monkeypatch.setattr(module, "is_long", lambda *arguments: is_long)
    made = estimates(devices)

    made._fastest_attention(object())

    assert [may_measure for _, _, may_measure in made.asked] == [expected]
