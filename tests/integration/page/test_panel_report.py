"""The button "Check and time my GPUs" in ComfyUI's own page, with two CPU workers: progress, cancel, a prompt that
begins, and the files."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.integration.page.test_panel import open_panel, page, queue, send, wait_for_an_empty_queue, wait_for_run
from xdit_backend.tools.report.results import read_report

__all__ = ["page"]
pytestmark = pytest.mark.slow
START, CANCEL = b'{"action": "start"}', b'{"action": "cancel"}'


def report(host):
    return host.get("/xdit/state")["report"]


def wait_for(host, *states, timeout_s=300):
    deadline_s = time.monotonic() + timeout_s
    while report(host)["state"] not in states:
        assert time.monotonic() < deadline_s, report(host)
        time.sleep(0.2)
    return report(host)


def snap(page, name):
    """A picture of the panel, for whoever looks at it: in the folder XDIT_SCREENSHOTS."""
    if os.environ.get("XDIT_SCREENSHOTS"):
        page.locator(".xdit-panel").screenshot(path=Path(os.environ["XDIT_SCREENSHOTS"]) / f"{name}.png")


def test_the_button_starts_a_report_that_shows_progress_and_is_cancelled(page, host):
    open_panel(page)
    page.wait_for_selector(".xdit-device")
    page.locator("[data-action=report]").click()
    page.wait_for_function("() => /check [2-9]/.test(document.querySelector('[data-report=text]')?.textContent ?? '')",
                           timeout=300_000)
    shown = page.text_content("[data-report=text]")
    snap(page, "report-running")
    again = send(host, "/xdit/report", START)
    measure = send(host, "/xdit/do", b'{"action": "measure"}')
    page.locator("[data-action=cancel_report]").click()
    page.wait_for_selector("[data-report=cancelled]", timeout=120_000)
    snap(page, "report-cancelled")

    assert re.fullmatch(r"check \d+ of \d+: .+, at most [0-6]:\d\d left", shown)
    assert again[0] == measure[0] == 409 and "still running" in again[1]["error"]
    links = {name: page.get_attribute(f".xdit-report a:has-text('{name}')", "href") for name in ("JSON", "Page")}
    name = links["JSON"].rpartition("/")[2]
    made = host.get(links["JSON"].partition("/api")[2])
    assert made["checks"] and not made["is_complete"] and all(check["passed"] for check in made["checks"])
    assert b"# xDiT for ComfyUI" in host.get(links["Page"].partition("/api")[2])
    stored = host.log.parent / "user" / "xdit" / "reports" / name
    assert read_report(stored).is_complete is False
    assert page.locator("[data-report=verdict]").count() == 3
    with page.expect_popup() as popup:                         # a page of the browser, not a download
        page.locator(".xdit-report a:has-text('Page')").click()
    assert "checks passed" in popup.value.text_content("body")
    popup.value.close()
    assert page.problems == [] and page.errors == []


def test_a_prompt_that_begins_ends_the_report_and_runs(page, host):
    open_panel(page)
    wait_for_an_empty_queue(page)
    assert send(host, "/xdit/report", START)[0] == 200
    wait_for(host, "running")
    queue(page, 31)
    page.wait_for_selector("[data-report=prompt]", timeout=120_000)
    wait_for_run(page, "done")
    wait_for_an_empty_queue(page)

    assert host.get("/xdit/state")["run"]["state"] == "done"
    snap(page, "report-ended-by-a-prompt")


def test_it_is_refused_while_a_prompt_runs_and_other_requests_are_rejected(page, host):
    wait_for_an_empty_queue(page)
    queue(page, 32)
    deadline_s = time.monotonic() + 60
    while not host.get("/queue")["queue_running"] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    page.locator("[data-action=report]").click()
    page.wait_for_function("() => document.querySelector('.xdit-status').textContent.includes('Cancel the running')")
    snap(page, "report-refused")
    wait_for_an_empty_queue(page)

    assert report(host)["state"] != "running"
    for body in (b"", b"[]", b"{}", b'{"action": "rm"}', b'{"action": ["start"]}', b'{"action": "start", "more": 1}'):
        assert send(host, "/xdit/report", body)[0] == 400
    for headers in ({"Origin": "http://elsewhere.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert send(host, "/xdit/report", START, **headers)[0] == 403
        assert send(host, "/xdit/report/a.json", **headers)[0] == 403
    assert send(host, "/xdit/report", START, **{"Content-Type": "text/plain"})[0] == 415
    for name in ("measured.json", "..%2Fmeasured.json", "xdit-report-a-2026-01-01.json"):
        assert send(host, f"/xdit/report/{name}")[0] == 404
    assert report(host)["state"] != "running"


def test_a_complete_report_shows_its_chart_and_verdict_in_both_languages(page, host):
    """With a double for the state that a complete report has."""
    open_panel(page)
    state = host.get("/xdit/state")
    complete = {"state": "done", "text": "", "left_s": 0, "error": "", "failed": 0, "verdict": [
        "All 37 checks passed: every method gives one device's result on this machine.",
        "The fastest method is CFG 2 for Wan 2.1 14B, 1.90 times as fast as one device.",
        "3 of 9 estimates are within 10% (median error 12%), and auto mode would choose the fastest of the timed "
        "layouts for 2 of 3 models."], "files": ["xdit-report-a-2026-11-29.json", "xdit-report-a-2026-11-29.md",
                                         "xdit-report-a-2026-11-29.png"]}
    script = """async ([state, language]) => {
        const { api } = await import("/scripts/api.js");
        await app.extensionManager.setting.set("Comfy.Locale", language);
        const before = { ...state.report, state: "none", verdict: [], files: [] };
        api.dispatchCustomEvent("xdit.state", { ...state, report: before });
        api.dispatchCustomEvent("xdit.state", state);
        const section = document.querySelector(".xdit-report");
        return [section.innerText, section.querySelectorAll("img").length];
    }"""
    page.route("**/xdit/report/*.png", lambda route: route.fulfill(path=ROOT / "web" / "panel.png"))
    texts, images = {}, set()
    for language in ("zh", "en"):
        texts[language], count = page.evaluate(script, [state | {"report": complete}, language])
        images.add(count)
        snap(page, f"report-complete-{language}")

    assert "1.90 times as fast" in texts["en"] and images == {1}
    lines = [line for line in texts["zh"].splitlines() if re.search("[a-z]{4,}", line)
             and not re.search(r"[\u4e00-\u9fff]", line)]
    assert not lines, lines
    assert json.dumps(complete["verdict"][0])[1:-1] in texts["en"]
