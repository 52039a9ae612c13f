"""The report's process: progress, the end that a cancel asks for, and processes that fail or do not end."""

import json
import sys
import time

import pytest

from tests.conftest import ROOT
from xdit_backend.host import report_process
from xdit_backend.host.report_process import LINE, ReportProcess, Step, Written
from xdit_backend.protocol.errors import ConfigError
from xdit_backend.tools.report.for_panel import make_for_panel

NAME = "xdit-report-2-cpu-2026-11-29"
STEP = {"kind": "step", "text": "check 1 of 2: a", "left_s": 100.0}
WRITTEN = {"kind": "written", "files": [f"{NAME}.json", f"{NAME}.md"], "verdict": ["Right.", "Fast.", "Estimated."],
           "is_complete": True, "num_failed": 0}


@pytest.fixture
def process(tmp_path, monkeypatch):
    """process(lines, ending): a ReportProcess of a double that prints these lines. ending: what it does then."""
    started = []

    def make(lines, ending=""):
        module = tmp_path / "report_double.py"
        printed = [f"print({line!r}, flush=True)" for line in lines]
        module.write_text("\n".join(["import os, sys, time, signal", *printed, ending]))
        monkeypatch.setattr(report_process, "ROOT", tmp_path)
        started.append(ReportProcess(lambda: tmp_path / "files", ("report_double",)))
        started[-1].start()
        return started[-1]
    yield make
    for each in started:
        each.end("cancelled")


def wait(report, state, timeout_s=60):
    deadline_s = time.monotonic() + timeout_s
    while report.describe()["state"] != state:
        assert time.monotonic() < deadline_s, report.describe()
        time.sleep(0.02)
    return report.describe()


def lines(*values):
    return [json.dumps(value) for value in values]


def test_a_report_that_ends_has_files_and_a_verdict(process, tmp_path):
    report = process(["a library's line", *lines(STEP, WRITTEN)])

    found = wait(report, "done")
    assert found["files"] == WRITTEN["files"] and found["verdict"] == WRITTEN["verdict"] and not found["error"]
    assert report.path_of(f"{NAME}.md") == tmp_path / "files" / f"{NAME}.md"
    assert report.path_of("../report_double.py") is report.path_of("xdit-report-other.json") is None
    report.start()                                             # again
    assert report.describe()["files"] == [] and wait(report, "done")["files"]


def test_progress_is_shown_with_the_time_left_and_one_report_runs_at_a_time(process):
    report = process(lines(STEP), "sys.stdin.read()")

    deadline_s = time.monotonic() + 60
    while not report.describe()["text"] and time.monotonic() < deadline_s:
        time.sleep(0.02)
    found = report.describe()
    assert found["state"] == "running" and found["text"] == STEP["text"] and 0 < found["left_s"] <= 100
    with pytest.raises(ConfigError, match="still running"):
        report.start()


@pytest.mark.parametrize("reason", ["cancelled", "prompt"])
def test_a_cancel_closes_the_input_and_what_was_measured_is_kept(process, reason):
    partial = json.dumps(WRITTEN | {"is_complete": False})
    report = process(lines(STEP), f"sys.stdin.read(); print({partial!r})")

    report.cancel(reason)
    report.cancel("another")                                   # the first reason counts
    assert report.describe()["state"] == "ending"
    report.end("another")
    found = report.describe()
    assert found["state"] == reason and found["files"] == WRITTEN["files"] and not report.is_running


def test_a_process_that_does_not_end_is_killed(process, monkeypatch):
    monkeypatch.setattr(report_process, "ENDING_S", 0.5)
    report = process(lines(STEP), "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(1000)")

    report.cancel()

    assert wait(report, "cancelled")["files"] == []


def test_a_report_that_fails_says_why_without_folders(process, tmp_path):
    found = wait(process([], f"sys.exit('Use other devices: {tmp_path}/a.txt is missing')"), "failed")

    assert "Use other devices" in found["error"] and str(tmp_path) not in found["error"]


@pytest.mark.parametrize("change", [{"files": ["../secret.json"]}, {"files": ["a.json"]}, {"kind": "other"},
                                    {"verdict": ["a"] * 4}, {"more": 1}], ids=str)
def test_other_lines_are_not_believed(process, change):
    report = process(lines(WRITTEN | change))

    assert wait(report, "failed")["files"] == []


class Progress:
    left_s = 12.0


def test_the_program_writes_lines_that_the_panel_reads(tmp_path, capsys, monkeypatch):
    """Its input stays open."""
    from tests.unit.tools.report.test_report import report as fixture
    report = fixture.__wrapped__() if hasattr(fixture, "__wrapped__") else fixture.__pytest_wrapped__.obj()
    monkeypatch.setattr("xdit_backend.tools.report.for_panel._interrupt_at_end_of_input", lambda: None)
    progress = Progress()

    def make():
        progress.show("measuring")
        return report
    make_for_panel(make, progress, tmp_path)

    step, written = [LINE.validate_json(line) for line in capsys.readouterr().out.splitlines()]
    assert step == Step("step", "measuring", 12.0) and isinstance(written, Written)
    assert [(tmp_path / name).is_file() for name in written.files] == [True] * 3 and len(written.verdict) == 3


def test_an_input_that_ends_interrupts_the_program(tmp_path):
    """As a cancel does, and the end of ComfyUI: the program waits in a system call."""
    import subprocess
    program = ("import time; from xdit_backend.tools.report import for_panel\n"
               "class Progress: left_s = 1.0\n"
               "def make():\n"
               "    try: print('began', flush=True); time.sleep(600)\n"
               "    except KeyboardInterrupt: print('interrupted'); raise SystemExit(7)\n"
               "for_panel.make_for_panel(make, Progress(), '.')")
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as started:
        assert started.stdout.readline() == "began\n"
        output, _ = started.communicate(timeout=120)
    assert output == "interrupted\n" and started.returncode == 7
