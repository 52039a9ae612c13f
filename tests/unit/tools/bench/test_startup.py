"""bench start times the three ways that workers start in, and leaves nothing behind."""

import argparse
import re

import pytest

from tests.conftest import left_behind, still_there
from xdit_backend.host import launcher
from xdit_backend.tools.bench import startup


@pytest.mark.slow
def test_each_way_is_timed_and_forked_workers_hold_less(capsys, monkeypatch):
    monkeypatch.setenv("XDIT_FORK", "1")
    before, why_not = set(left_behind()), []

    class Noted(launcher.WorkerGroup):
        def close(self):
            why_not.append(self.why_not_forked)
            super().close()
    monkeypatch.setattr(startup, "WorkerGroup", Noted)
    parser = argparse.ArgumentParser()
    startup.add_arguments(parser)

    startup.main(parser.parse_args(["--workers", "1", "--rounds", "1", "--device", "cpu"]))

    rows = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()[1:]]
    held = {way: int(of_worker) for _, way, *_, of_worker in rows}
    assert list(held) == list(startup.WAYS) and why_not == ["", "", "XDIT_FORK is 0"]
    assert 2 * held["next"] < held["programs of their own"]
    assert startup.os.environ["XDIT_FORK"] == "1" and not still_there(before)
