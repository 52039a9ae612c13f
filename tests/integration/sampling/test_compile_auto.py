"""compile auto: a decision for each run, which the node shows, and no compiling in the middle of a run. torch.compile's
backend "eager" stands for inductor: the graphs are the same, and are not turned into kernels."""

import importlib
import sys

import pytest

from tests.support.tolerances import close

EXACT = 1e-5


@pytest.fixture
def compiling(comfyui, monkeypatch, tmp_path):
    """Times that say that compiling pays after one uncompiled run; what the workers are asked for in each call."""
    times = importlib.import_module(f"{comfyui.pack.__name__}.xdit_backend.host.compile_times")
    monkeypatch.setattr(times, "SAVING_ON_CPU", 0.5)
    monkeypatch.setattr(times, "COMPILE_S", 1e-9)
    monkeypatch.setattr(comfyui.groups, "compile_times", times.CompileTimes(lambda: tmp_path))
    for module in ("compile_choice", "sampler_wrappers"):
        monkeypatch.setattr(sys.modules[f"{comfyui.pack.__name__}.nodes.bridge.sampling.{module}"], "BACKEND", "eager")
    asked = []

    def watch(devices):
        client = comfyui.groups.client(devices)
        submit = client.submit

        def submitted(spec, layout, channels, calls, *arguments, **options):
            asked.append([call.options.compile_backend for call in calls])
            return submit(spec, layout, channels, calls, *arguments, **options)
        monkeypatch.setattr(client, "submit", submitted)
        return asked
    return watch


@pytest.mark.parametrize("devices, degrees", [(("cpu",), {}), (("cpu", "cpu"), {"ulysses": 2})], ids=["one", "ulysses"])
def test_a_run_is_compiled_once_it_pays_and_gives_the_same(comfyui, compiling, said, devices, degrees):
    asked = compiling(devices)
    model = comfyui.ours("sd3", comfyui.config(",".join(devices), compile="auto", **degrees))

    first = comfyui.sample(model, "sd3", steps=5)
    assert {backend for calls in asked for backend in calls} == {""} and "compiled" not in said[-1]
    asked.clear()
    second = comfyui.sample(model, "sd3", steps=5)

    assert {backend for calls in asked for backend in calls} == {"eager"}
    assert any("compiled blocks (estimated to save" in text and "in 10 steps; compiling takes" in text for text in said)
    reference = comfyui.reference("sd3", steps=5)
    close(first, reference, EXACT)
    close(second, reference, EXACT)
    stored, = comfyui.groups.compile_times._known().values()
    assert stored.eager_s and stored.compiled_s and stored.compile_s >= 0


def test_a_call_of_another_shape_is_not_compiled_in_the_middle_of_a_run(comfyui, compiling):
    choice = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.sampling.compile_choice")
    calls = importlib.import_module(f"{comfyui.pack.__name__}.xdit_backend.host.calls")
    import torch

    def call(size, tokens=5, **more):
        return calls.Call(torch.zeros(1, 4, size, size), torch.zeros(1), {"context": torch.zeros(1, tokens, 8)}, **more)
    one = choice.CompileChoice()
    one.decision = choice.Decision(True)

    def is_compiled(*of, layout="a layout"):
        return [each.options.compile_backend for each in one.applied(list(of), layout)] == ["eager"] * len(of)
    assert is_compiled(call(8)) and is_compiled(call(8, name="another text"))
    assert not is_compiled(call(6)) and not is_compiled(call(8, tokens=6)) and not is_compiled(call(8), call(8))
    assert not is_compiled(call(8), layout="another") and not is_compiled(call(8, operations={"a": "values"}))
    assert is_compiled(call(8))
    one.end()
    assert not is_compiled(call(8))


def test_a_model_that_cannot_be_compiled_runs_uncompiled(comfyui, compiling, said, monkeypatch):
    asked = compiling(("cpu",))
    model = comfyui.ours("sd3", comfyui.config("cpu", compile="auto"))
    comfyui.sample(model, "sd3", steps=4)
    client = comfyui.groups.client(("cpu",))
    predict = client.predict

    def refusing(spec, layout, channels, calls, **options):
        if calls[0].options.compile_backend:
            raise comfyui.errors.UnsupportedError("Set compile to off in xDiT Parallel Config, or remove "
                                                  "TorchCompileModel: PyTorch cannot compile this model here (none).")
        return predict(spec, layout, channels, calls, **options)
    monkeypatch.setattr(client, "predict", refusing)
    asked.clear()

    for _ in range(2):
        close(comfyui.sample(model, "sd3", steps=4), comfyui.reference("sd3", steps=4), EXACT)

    assert {backend for calls in asked for backend in calls} == {""} and "compiled" not in said[-1]
    stored, = comfyui.groups.compile_times._known().values()
    assert "cannot compile" in stored.why_not


@pytest.mark.parametrize("settings", [{"compile": "off"}, {"compile": "auto", "pipefusion": 2},
                                      {"compile": "auto", "displaced": 2}], ids=str)
def test_other_runs_are_not_compiled(comfyui, compiling, settings):
    degrees = {name: value for name, value in settings.items() if name != "compile"}
    devices = ("cpu", "cpu") if degrees else ("cpu",)
    asked = compiling(devices)
    model = comfyui.ours("sd3", comfyui.config(",".join(devices), **settings))

    for _ in range(2):
        comfyui.sample(model, "sd3", steps=4)

    assert {backend for calls in asked for backend in calls} == {""}
