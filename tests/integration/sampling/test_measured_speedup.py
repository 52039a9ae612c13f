"""Measured speedup of a run over the same run on one device: when the node shows it, and when it does not."""

import importlib
import re

import pytest

from xdit_backend.host.measured_runs import MeasuredRuns


@pytest.fixture
def measured(comfyui, monkeypatch, tmp_path):
    """The stored measurements, none at first."""
    runs = importlib.import_module(f"{comfyui.pack.__name__}.xdit_backend.host.measured_runs").MeasuredRuns(
        lambda: tmp_path)
    monkeypatch.setattr(comfyui.groups, "measured", runs)
    return runs


def shown(said):
    """What the node shows at the end, and the speedup in it."""
    found = re.search(r"; ([\d.]+)x one device, measured here on \d{4}-\d\d-\d\d", said[-1])
    return found and float(found[1])


def run(comfyui, layout, said, **arguments):
    config = comfyui.config("cpu") if layout == "one" else comfyui.config("cpu,cpu", **{layout: 2})
    comfyui.sample(comfyui.ours("sd3", config), "sd3", **arguments)
    return shown(said)


def test_a_run_is_compared_with_a_measured_run_on_one_device(comfyui, measured, said, tmp_path):
    assert run(comfyui, "cfg", said) is None and " s a step, CFG 2" in said[-1]
    assert run(comfyui, "one", said) is None                   # not with itself
    [stored] = MeasuredRuns(lambda: tmp_path)._known().values()

    assert run(comfyui, "cfg", said, seed=8) is not None
    last, panel = comfyui.groups.runs.last, importlib.import_module(
        f"{comfyui.pack.__name__}.nodes.bridge.server.panel")
    assert shown(said) == pytest.approx(stored.step_s / last.seconds_per_step, abs=0.051)
    of_page = panel.state()["run"]
    assert of_page["on_one"] == {"a_step": round(stored.step_s, 4), "date": stored.date} and of_page["working"] == 2
    for layout in ("ulysses", "ring"):
        assert run(comfyui, layout, said) is not None
    assert len(MeasuredRuns(lambda: tmp_path)._known()) == 1   # only one device is compared with


@pytest.mark.parametrize("change", [{"steps": 4}, {"sampler": "heun"}, {"cfg": 1.0}, {"batch": 2}, {"size": (16, 20)},
                                    {"tokens": 30}, {"dtype": "bf16"},
                                    {"weights_memory": "all on the device"}, {"file": True}], ids=str)
def test_a_run_that_takes_another_time_is_not_compared(comfyui, measured, said, change):
    """The run on one device differs by one thing."""
    def arguments(steps=3, sampler="euler", cfg=4.0, batch=1, size=None, tokens=20, **other):
        return {"steps": steps, "sampler": sampler, "cfg": cfg, "latent": comfyui.latent("sd3", batch, size),
                "positive": comfyui.conditioning("sd3", 1, tokens)}

    def model(devices, dtype="fp32", weights_memory="auto", **other):
        degrees = {"ulysses": 2} if devices == "cpu,cpu" else {}
        return comfyui.ours("sd3", comfyui.config(devices, weights_memory=weights_memory, **degrees), dtype)

    comfyui.sample(model("cpu", **change), "sd3", **arguments(**change))
    if "file" in change:
        path = comfyui.base / "diffusion_models" / comfyui.file("sd3")
        path.touch()
    comfyui.sample(model("cpu,cpu"), "sd3", **arguments())
    assert shown(said) is None

    comfyui.sample(model("cpu"), "sd3", **arguments())
    comfyui.sample(model("cpu,cpu"), "sd3", **arguments(), seed=9)
    assert shown(said) is not None


def test_a_cancelled_run_is_not_stored(comfyui, measured, said, tmp_path):
    model = comfyui.ours("sd3", comfyui.config("cpu"))
    steps = []

    def callback(step, *rest):
        steps.append(step)
        if step == 2:
            raise comfyui.management.InterruptProcessingException
    with pytest.raises(comfyui.management.InterruptProcessingException):
        importlib.import_module("comfy.sample").sample(
            model, comfyui.latent("sd3")["samples"], 5, 1.0, "euler", "simple", comfyui.conditioning("sd3", 1),
            comfyui.conditioning("sd3", 2), comfyui.latent("sd3")["samples"], callback=callback)

    assert len(steps) == 3 and not list(tmp_path.iterdir()) and said[-1].startswith("cancelled after")
