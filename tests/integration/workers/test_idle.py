"""What ComfyUI's settings say of workers that have nothing to do, and that they are parked or ended so,
and come back."""

import importlib
import json
import math
import re
import time

import pytest
import torch

from tests.support.comfyui_server import ROOT


@pytest.fixture
def idle(comfyui):
    return importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.workers.idle_timeout")


@pytest.fixture
def cached(comfyui):
    return importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.workers.settings")


@pytest.fixture
def choose(cached, tmp_path, monkeypatch):
    """Save settings as ComfyUI does."""
    monkeypatch.setattr(cached.folder_paths, "get_user_directory", lambda: str(tmp_path))
    (tmp_path / "default").mkdir()

    def save(**settings):
        (tmp_path / "default" / "comfy.settings.json").write_text(
            json.dumps({f"xdit.{name}": value for name, value in settings.items()}))
    return save


@pytest.mark.parametrize("settings, how, minutes", [
    (None, "keep", 10), ({}, "keep", 10), ({"Residency": "park"}, "park", 10),
    ({"Residency": "release", "IdleMinutes": 3}, "release", 3)])
def test_settings_are_read_as_comfyui_keeps_them(cached, choose, settings, how, minutes):
    if settings is not None:
        choose(**settings)

    assert cached.chosen_idle() == cached.Idle(how, minutes)


@pytest.mark.parametrize("settings, words", [
    ({"Residency": "parked"}, "Choose one of keep, park, release in .* 'parked'"),
    ({"IdleMinutes": 0}, "above 0 .*IdleMinutes is 0"),
    ({"IdleMinutes": "5"}, "IdleMinutes is '5'"), ({"IdleMinutes": True}, "IdleMinutes is True")])
def test_other_settings_are_refused_by_name(cached, choose, settings, words):
    choose(**settings)

    with pytest.raises(cached.ConfigError, match=words):
        cached.chosen_idle()


def test_no_address_for_other_machines_is_chosen_by_itself(cached, choose):
    assert cached.chosen_address() == ""
    choose(Address=" 192.168.1.10 ")
    assert cached.chosen_address() == "192.168.1.10"
    choose(Address=7)
    with pytest.raises(cached.ConfigError, match="xdit.Address is 7"):
        cached.chosen_address()


def test_the_page_has_these_settings_in_both_languages(cached):
    page, chinese = (ROOT / "web/xdit.js").read_text(), json.loads(
        (ROOT / "locales/zh/settings.json").read_text(encoding="utf-8"))

    for name in (cached.HOW, cached.MINUTES, cached.ADDRESS):
        assert f'id: "{name}"' in page and chinese[name.replace(".", "_")]["name"]
    options = re.findall(r'\{ text: "([^"]+)", value: "(\w+)" \}', page)
    assert tuple(value for _, value in options) == cached.IDLE_WAYS
    assert list(chinese["xdit_Residency"]["options"]) == [text for text, _ in options]


@pytest.mark.slow
def test_workers_with_nothing_to_do_are_parked_or_ended_and_come_back(comfyui, idle, cached):
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", cfg=2))
    groups = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.workers.worker_groups").GROUPS
    want = comfyui.sample(model, "sd3", steps=2)
    client = groups.client(("cpu", "cpu"))
    parked = lambda: sum(client.models.memory(model.model.remote.spec.name).parked_bytes)     # noqa: E731

    for residency, since_s in ((cached.Idle("keep", 1), -math.inf), (cached.Idle("park", 60), time.monotonic()),
                               (cached.Idle("release", 60), time.monotonic())):
        client.group._used_s = since_s
        idle.apply_idle_setting(groups, residency)
        assert client.running and parked() == 0, residency
    client.group._used_s = -math.inf
    idle.apply_idle_setting(groups, cached.Idle("park", 1))
    assert client.running and parked() > 0 and client.workers.idle_s < math.inf
    client.report_if_idle()                                    # a panel that looks gives no work
    client.group._used_s = -math.inf
    client.report_if_idle()
    assert client.workers.idle_s == math.inf
    assert (torch.equal(comfyui.sample(model, "sd3", steps=2), want) and parked() == 0
            and client.workers.idle_s < math.inf)
    client.group._used_s = -math.inf
    idle.apply_idle_setting(groups, cached.Idle("release", 1))
    assert client.workers.state == "stopped"
    assert torch.equal(comfyui.sample(model, "sd3", steps=2), want)


@pytest.mark.slow
def test_groups_are_watched_from_their_first_client_on(comfyui, idle, choose, monkeypatch):
    groups = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.workers.worker_groups").Groups()
    monkeypatch.setattr(idle, "TICK_S", 0.05)
    choose(Residency="release", IdleMinutes=1e-3)
    client = groups.client(("cpu",))
    client.report_memory()

    deadline_s = time.monotonic() + 120
    while client.workers.state != "stopped" and time.monotonic() < deadline_s:
        time.sleep(0.05)

    assert client.workers.state == "stopped"
