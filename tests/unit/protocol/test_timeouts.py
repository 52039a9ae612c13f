"""Seconds in the environment: what a person sets holds, and what is no such number is refused before anything
starts."""

import pytest

from tests.conftest import left_behind
from xdit_backend.host.launcher import WorkerGroup
from xdit_backend.multi_node.listener import Listener
from xdit_backend.protocol import timeouts
from xdit_backend.protocol.errors import ConfigError


@pytest.mark.parametrize("text, value", [("2.5", 2.5), (" 90 ", 90), ("1e3", 1000), ("", 60)])
def test_what_is_set_holds(monkeypatch, text, value):
    monkeypatch.setenv("XDIT_SILENCE_TIMEOUT_S", text)

    assert timeouts.seconds("XDIT_SILENCE_TIMEOUT_S") == value


@pytest.mark.parametrize("name", timeouts.TIMEOUTS)
@pytest.mark.parametrize("text", ["soon", "60s", "nan", "inf", "-1", "0", "1e300"])
def test_what_is_no_number_of_seconds_is_refused_by_name(monkeypatch, tmp_path, name, text):
    monkeypatch.setenv(name, text)
    before = set(left_behind())

    if (name, text) == ("XDIT_JOIN_TIMEOUT_S", "0"):           # a prompt that waits for no machine
        assert timeouts.seconds(name) == 0
        return
    for start in (timeouts.check, lambda: WorkerGroup(("cpu",)), lambda: Listener("127.0.0.1:0", tmp_path / "key")):
        with pytest.raises(ConfigError, match=f"^Set the environment variable {name} to a number .* to 1000000, or "
                                              f"remove it .*: it is \"{text}\""):
            start()
    assert set(left_behind()) <= before
