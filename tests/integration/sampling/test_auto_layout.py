"""auto on devices that have been measured: the forecast chooses, the node says what and why,
and the picture is ComfyUI's."""

import importlib
import logging
import re

import pytest

from tests.integration.sampling.test_pipefusion import EXACT
from tests.support.tolerances import close
from xdit_backend.host import machine_profiles
from xdit_backend.planner.cost_model import Device, Links
from xdit_backend.planner.layout_search import Machine

SLOW = Device(1e6, 1e6, 1e6, name="a slow card", memory_bytes=1e12)
FAST_LINKS, SLOW_LINKS = (Links({("all_to_all", 2): rate, ("hop", 2): rate, ("gather", 2): rate,
                                 ("all_reduce", 2): rate})
                          for rate in (1e9, 1.0))
TWO = ("cpu", "cpu")


@pytest.fixture
def user(comfyui, monkeypatch, tmp_path):
    """ComfyUI's user folder: an empty one, and nothing remembered."""
    monkeypatch.setattr(comfyui.folder_paths, "get_user_directory", lambda: str(tmp_path))
    monkeypatch.setattr(comfyui.groups, "_machines", {})
    monkeypatch.setattr(comfyui.groups, "_calibrations", None)
    monkeypatch.setattr(comfyui.groups, "measured", type(comfyui.groups.measured)(lambda: tmp_path))
    yield tmp_path / "xdit"
    comfyui.groups.client(TWO).workers.divide_by(())
    comfyui.groups._speeds.clear()


@pytest.mark.slow
@pytest.mark.parametrize("devices, links, cfg, expected", [
    ((SLOW, SLOW), FAST_LINKS, 4.0, "CFG 2"), ((SLOW, SLOW), SLOW_LINKS, 1.0, "one device"),
    ((SLOW, SLOW), FAST_LINKS, 1.0, "Ulysses 2|Ring 2"),
    ((SLOW, SLOW.slower(1.2)), FAST_LINKS, 1.0, "Ulysses 2|Ring 2"),
    ((SLOW, SLOW.slower(90)), FAST_LINKS, 4.0, "one device")],
                         ids=["cfg", "slow-links", "fast-links", "unlike", "far-slower"])
def test_the_forecast_chooses_and_the_node_says_it(comfyui, said, user, caplog, devices, links, cfg, expected):
    machine_profiles.store_machine(user, TWO, "float32", Machine(devices, links))

    with caplog.at_level(logging.DEBUG):
        result = comfyui.sample(comfyui.ours("sd3", comfyui.config("cpu,cpu", mode="auto", warmup="auto")), "sd3",
                                cfg=cfg)

    close(result, comfyui.reference("sd3", cfg=cfg), EXACT)
    words = expected.split("|")
    assert any(said[0].startswith(f"running on cpu, cpu: {word}. Plan: {word}, about ") for word in words), said
    assert ("one device is as fast" in said[0]) == (expected == "one device")
    assert re.search(r"\(estimate: [\d.]+ s a step\)$", said[-1]) and "), measured " in caplog.text
    assert "the workers were busy" in caplog.text
    assert " a step, " in said[-1] and "measured" not in said[-1]
    taught = machine_profiles.calibrations(user)
    assert set(taught) == ({("SD3", "a slow card")} if expected in ("CFG 2", "one device") else set())


@pytest.mark.slow
def test_what_was_measured_is_said_of_the_next_such_run(comfyui, said, user):
    machine_profiles.store_machine(user, TWO, "float32", Machine((SLOW, SLOW), FAST_LINKS))
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", mode="auto", warmup="auto"))

    for _ in range(2):
        comfyui.sample(model, "sd3")

    assert "Plan: CFG 2, about " in said[0] and " s the last time" in said[2]
    assert machine_profiles.calibrations(user)["SD3", "a slow card"].count == 2


def test_a_short_run_on_unmeasured_devices_is_not_held_up(comfyui, said, user):
    comfyui.sample(comfyui.ours("sd3", comfyui.config("cpu,cpu", mode="auto", warmup="auto")), "sd3")

    assert said[0] == "running on cpu, cpu: CFG 2" and not list(user.glob("devices-*.json"))


@pytest.mark.slow
def test_a_long_run_measures_once(comfyui, said, user, monkeypatch):
    planner = importlib.import_module(f"{comfyui.pack.__name__}.xdit_backend.planner.planner")
    monkeypatch.setattr(planner, "LONG_S", 0.0)
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", mode="auto", warmup="auto"))
    client = comfyui.groups.client(TWO)
    probe, probed = client.probe, []
    monkeypatch.setattr(client, "probe", lambda dtype: probed.append(dtype) or probe(dtype))

    for _ in range(2):
        comfyui.sample(model, "sd3")
        monkeypatch.setattr(comfyui.groups, "_machines", {})

    cached = list(user.glob("devices-*.json"))
    assert probed == ["float32"] and len(cached) == 1 and "Plan: " in said[0] and "Plan: " in said[2]
    assert len(machine_profiles.stored_machine(user, TWO, "float32").devices) == 2
    cached[0].write_text("{}")
    comfyui.sample(model, "sd3")
    assert len(probed) == 2


@pytest.mark.slow
@pytest.mark.parametrize("is_staged", [True, False], ids=["slow-links", "fast-links"])
def test_for_speed_a_model_that_fits_is_spread_and_nodes_say_what_it_gains_and_costs(comfyui, said, user, monkeypatch,
                                                                                   is_staged):
    placement, told = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.model.weight_placement"), []
    monkeypatch.setattr(placement, "show_text", told.append)
    gpu = Device(1e9, 1e9, 1e12, name="a card", memory_bytes=1e12)
    links = Links({**(SLOW_LINKS if is_staged else FAST_LINKS).rates, ("hop", 2): 1e5 if is_staged else 1e9})
    machine_profiles.store_machine(user, TWO, "float32", Machine((gpu, gpu), links))
    model = comfyui.ours("flux", comfyui.config("cpu,cpu", mode="auto", warmup="auto", approximate="for speed"))

    comfyui.sample(model, "flux", steps=4)

    costs = ", for speed: close to a single-GPU run (43 dB in the demo model with 4 patches)"
    assert said[0].endswith(f"PipeFusion 2, 4 patches{costs}") == is_staged
    assert [text.split(":")[0] for text in told] == ["PipeFusion 2, 4 patches for speed"] * is_staged
