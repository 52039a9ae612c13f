"""The panel in ComfyUI's own page, with two CPU workers: during a run, after it, after a crash;
in both themes and both languages."""

import json
import re
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from tests.integration.page.conftest import PANEL_BUTTON, template
from tests.support.worker_processes import workers_below

STEPS = 100
CHINESE = re.compile(r"[\u4e00-\u9fff]")
CONTRAST = """(selector) => {
    const panel = document.querySelector(".xdit-panel");
    const light = colour => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map(Number)
            .map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const [a, b] = [light(getComputedStyle(panel.querySelector(selector)).color),
                    light(getComputedStyle(panel).backgroundColor)];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), b];
}"""


@pytest.fixture(scope="module")
def page(chromium, host):
    """ComfyUI's page with the demo on two CPU workers; page.states: what its socket was told of the panel;
    page.errors: of our files."""
    page = chromium.new_page(viewport={"width": 1600, "height": 1000})
    page.problems, page.errors, page.states = [], [], []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda line: page.errors.append(line.text) if line.type == "error" and (
        "xdit" in line.text or "xdit" in line.location.get("url", "")) else None)
    page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: page.states.append(frame)
                                                  if isinstance(frame, str) and "xdit.state" in frame else None))
    page.goto(host.url)
    page.wait_for_function("() => window.app?.graph && window.LiteGraph?.registered_node_types?.XDiTLoadModel",
                           timeout=120_000)
    page.wait_for_function("() => app.graph.nodes.length > 0", timeout=120_000)
    page.evaluate("graph => app.loadGraphData(graph)", template("Demo"))
    page.evaluate("""steps => {
        const node = type => app.graph.nodes.find(node => node.type === type);
        const set = (node, name, value) => { node.widgets.find(widget => widget.name === name).value = value };
        set(node("XDiTParallelConfig"), "devices", "cpu,cpu");
        set(node("XDiTParallelSampler"), "steps", steps);
    }""", STEPS)
    yield page
    page.close()


def toggle(page):
    page.locator(PANEL_BUTTON).click()


def open_panel(page):
    if not page.locator(".xdit-panel").is_visible():
        toggle(page)


@pytest.fixture
def after_a_run(page):
    """The panel is open, and shows a run that is done, and workers that wait; the nodes say what they did in it, which
    those of a graph that was loaded after it do not."""
    open_panel(page)
    page.wait_for_selector(".xdit-device")
    wait_for_an_empty_queue(page)
    are_told = page.evaluate("""() => ["XDiTParallelSampler", "XDiTVAEDecode"].every(type => app.graph.nodes
        .find(node => node.type === type).widgets?.some(widget => widget.name === "$$node-text-preview"))""")
    if (not are_told or not page.query_selector(".xdit-panel dl[data-state=done]")
            or not page.query_selector(".xdit-group[data-state=idle]")):
        ended = """async () => {
            const { api } = await import("/scripts/api.js");
            window.promptEnded = new Promise(end => api.addEventListener("execution_success", end, { once: true }));
        }"""
        page.evaluate(ended)
        queue(page, 12)
        page.evaluate("() => window.promptEnded.then(() => true)")      # until then, the run before is shown as done
        wait_for_an_empty_queue(page)
    wait_for_run(page, "done")
    page.wait_for_selector(".xdit-group[data-state=idle]", timeout=120_000)
    page.wait_for_selector(".xdit-time rect[data-kind=decode]", state="attached", timeout=120_000)


def wait_for_an_empty_queue(page):
    """No run of another test is to come, nor under way."""
    page.wait_for_function("""async () => {
        const queue = await (await fetch("/queue")).json();
        return !queue.queue_running.length && !queue.queue_pending.length;
    }""", timeout=120_000)


def queue(page, seed):
    page.evaluate("""seed => {
        app.graph.nodes.find(node => node.type === "XDiTParallelSampler")
            .widgets.find(widget => widget.name === "seed").value = seed;
        return app.queuePrompt(0);
    }""", seed)


def bars(page):
    """{device: {owner: bytes}} as the bars show them."""
    return page.evaluate("""() => Object.fromEntries([...document.querySelectorAll(".xdit-device")].map(device => [
        device.dataset.device,
        Object.fromEntries([...device.querySelectorAll(".xdit-bar span")]
            .map(one => [one.dataset.owner, Number(one.dataset.bytes)]))]))""")


def wait_for_run(page, state):
    page.wait_for_selector(f".xdit-panel dl[data-state={state}]", timeout=120_000)


def workers(host):
    return workers_below(host.process.pid)


@contextmanager
def stopped(process):
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def send(host, path, body=None, **headers):
    request = urllib.request.Request(host.url + path, data=body,
                                     headers={"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.loads(answer.read() or "null")
    except urllib.error.HTTPError as error:
        raw = error.read()
        return error.code, json.loads(raw) if raw.startswith(b"{") else raw


@pytest.mark.slow
@pytest.mark.parametrize("path, body", [
    *[("/xdit/watch", body) for body in (b"no json", b"[]", b"{}", b'{"client": 1, "open": true}',
                                         b'{"client": "", "open": true}',
                                         b'{"client": "nobody", "open": true}', b'{"client": "a", "open": 1}',
                                         b'{"client": "a", "open": false, "more": 1}')],
    *[("/xdit/do", body) for body in (b"no json", b"[]", b"{}", b'{"action": "rm"}', b'{"action": ["stop"]}',
                                      b'{"action": "stop", "more": 1}')],
    *[("/xdit/fit", body) for body in (b"no json", b"[]", b"{}", b'{"settings": []}', b'{"settings": {"path": "/"}}',
                                       b'{"settings": {"cfg_degree": "2"}}', b'{"settings": {"cfg_degree": true}}')]])
def test_what_is_asked_in_another_form_is_refused(host, path, body):
    status, answer = send(host, path, body)

    assert status == 400 and answer["error"]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/xdit/state", "/xdit/timeline", "/xdit/trace", "/xdit/watch", "/xdit/do",
                                  "/xdit/fit", "/xdit/check"])
def test_other_sites_are_refused(host, path):
    body = None if path in ("/xdit/state", "/xdit/timeline", "/xdit/trace") else b'{"action": "stop"}'
    assert send(host, path, body, Origin="http://elsewhere.example")[0] == 403
    assert send(host, path, body, **{"Sec-Fetch-Site": "cross-site"})[0] == 403


def test_it_is_live_during_a_run_and_silent_when_closed(page, host):
    total = host.get("/xdit/state")["devices"][0]["total"]
    open_panel(page)
    page.wait_for_selector(".xdit-device")
    queue(page, 11)

    while ((host.get("/xdit/state")["run"] or {}).get("step") or 0) < 3:
        time.sleep(0.01)
    # the run goes on when the page, which may be slow, has shown it
    with stopped(workers(host)[0]):
        wait_for_run(page, "running")
        busy = send(host, "/xdit/do", b'{"action": "stop"}')
        page.wait_for_function("() => document.querySelector('.xdit-panel progress')?.value > 1", timeout=120_000)
        during, phases = bars(page), page.locator(".xdit-phase").count()
    wait_for_run(page, "done")
    page.wait_for_function("steps => new Set([...document.querySelectorAll('.xdit-time rect[data-kind=whole]')]"
                           ".map(one => one.dataset.step)).size === steps", arg=STEPS, timeout=120_000)

    assert sum(during["cpu"].values()) == total and during["cpu"]["weights"] > 0
    assert phases == 0                                         # loading is over
    assert busy == (409, {"error": "Cancel the running prompt, or wait until it has finished."})
    ranks = page.evaluate("""() => [...document.querySelectorAll(".xdit-time g[data-rank]")].map(row =>
        [row.querySelector("title").textContent,
         [...row.querySelectorAll("rect[data-kind=whole]")].map(one => Number(one.dataset.step))])""")
    assert [name for name, _ in ranks] == ["0: cpu", "1: cpu"]
    assert [steps for _, steps in ranks] == [list(range(1, STEPS + 1))] * 2
    told = page.evaluate("() => [...document.querySelectorAll('.xdit-panel dd')].map(one => [one.dataset.fact, "
                         "one.textContent])")
    assert dict(told)["run_steps"] == f"{STEPS} of {STEPS}" and dict(told)["run_how"] == "CFG 2"
    page.wait_for_function("() => document.querySelector('.xdit-time rect[data-kind=decode]')", timeout=120_000)
    assert sum(bars(page)["cpu"].values()) == total
    toggle(page)
    page.wait_for_timeout(1500)
    page.states.clear()
    host._request("/xdit/do", {"action": "give_back"})         # something changes, and nobody is told
    page.wait_for_timeout(2500)
    assert page.states == []
    toggle(page)
    page.wait_for_function("() => document.querySelector('.xdit-bar [data-owner=parked]')")
    assert "weights" not in bars(page)["cpu"] and sum(bars(page)["cpu"].values()) == total and page.states


@pytest.mark.slow
def test_it_is_used_by_keys_and_saves_a_trace(page, after_a_run):
    def press(key):
        """The seconds at the left end and at the last tick, after a key."""
        page.keyboard.press(key)
        ticks = page.evaluate("() => [...document.querySelectorAll('.xdit-time .xdit-tick')].map(one => "
                              "parseFloat(one.textContent))")
        return ticks[0], ticks[-1]

    # its letters are not squeezed
    assert page.evaluate("() => document.querySelector('.xdit-time').getScreenCTM().a") == 1
    page.locator(".xdit-time").focus()
    whole, nearer, moved, again = [press(key) for key in ("Home", "+", "ArrowRight", "Home")]
    with page.expect_download() as download:
        page.locator("[data-action=trace]").press("Enter")
    with open(download.value.path(), encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]

    assert whole[0] == 0 < nearer[0] < moved[0] and again == whole
    assert 0.45 < (nearer[1] - nearer[0]) / whole[1] < 0.55
    assert download.value.suggested_filename == "xdit-trace.json"
    assert {event["tid"] for event in events} == {0, 1}
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} >= set(range(1, STEPS + 1))
    assert "saved" in page.locator(".xdit-status").inner_text()
    for unnamed in page.locator(".xdit-panel [role=img], .xdit-panel svg, .xdit-panel button").all():
        assert unnamed.get_attribute("aria-label") or unnamed.inner_text()


@pytest.mark.slow
def test_both_themes_and_both_languages(page, after_a_run):
    backgrounds = []
    for theme in ("light", "dark"):
        page.evaluate("theme => app.extensionManager.setting.set('Comfy.ColorPalette', theme)", theme)
        page.wait_for_timeout(500)
        for selector in ("h2", "dd", "button"):
            ratio, background = page.evaluate(CONTRAST, selector)
            assert ratio >= 4.5, (theme, selector)
        backgrounds.append(background)
    assert backgrounds[0] > 0.5 > 0.1 > backgrounds[1]
    words = {}
    for language in ("zh", "en"):
        page.evaluate("language => app.extensionManager.setting.set('Comfy.Locale', language)", language)
        page.wait_for_timeout(500)
        toggle(page)
        toggle(page)
        page.wait_for_selector(".xdit-panel dl")
        words[language] = page.locator(".xdit-panel").inner_text()
    assert not CHINESE.search(words["en"]) and "Memory" in words["en"]
    lines = [line for line in words["zh"].splitlines() if re.search("[a-z]{4,}", line) and not CHINESE.search(line)]
    assert not lines or all(re.fullmatch(r"xdit_demo\S*", line) for line in lines), lines


@pytest.mark.slow
def test_after_a_crash_it_says_so_and_the_next_run_works(page, host, after_a_run):
    workers(host)[0].kill()
    page.wait_for_selector(".xdit-group[data-state=ended]", timeout=120_000)
    assert sum(bars(page)["cpu"].values()) == host.get("/xdit/state")["devices"][0]["total"]
    page.locator("[data-action=stop]").click()
    page.wait_for_selector(".xdit-group[data-state=stopped]", timeout=120_000)
    number = page.locator(".xdit-panel dl").get_attribute("data-run")
    queue(page, 13)
    page.wait_for_function("number => document.querySelector('.xdit-panel dl')?.dataset.run !== number", arg=number,
                           timeout=120_000)
    wait_for_run(page, "done")

    assert page.problems == [] and page.errors == []


@pytest.mark.slow
def test_a_prompt_that_fails_before_it_samples_is_told_on_the_node_in_a_note_and_in_the_panel(page, after_a_run):
    """What to do comes first; the picture of the run before goes."""
    values = """([mode, degree, cfg]) => {
        const node = type => app.graph.nodes.find(node => node.type === type);
        const set = (node, name, value) => { node.widgets.find(widget => widget.name === name).value = value };
        set(node("XDiTParallelConfig"), "mode", mode);
        set(node("XDiTParallelConfig"), "cfg_degree", degree);
        set(node("XDiTParallelSampler"), "cfg", cfg);
    }"""
    page.evaluate(values, ["manual", 2, 1])
    queue(page, 14)
    page.wait_for_selector(".xdit-panel dl[data-state=failed]", timeout=120_000)
    page.wait_for_function("""() => app.graph.nodes.find(node => node.type === "XDiTVAEDecode").widgets?.some(
        widget => widget.name === "$$node-text-preview" && widget.value.startsWith("not run"))""", timeout=30_000)
    shown = page.evaluate("""() => app.graph.nodes.flatMap(node => (node.widgets ?? [])
        .filter(widget => widget.name === "$$node-text-preview").map(widget => [node.type, widget.value]))""")
    told = page.locator("[data-fact=run_error]").inner_text()
    note = page.locator(".p-toast-message-error").first.inner_text()
    timeline = page.locator(".xdit-time").is_visible()
    page.evaluate(values, ["auto", 1, 3])
    queue(page, 15)
    page.wait_for_function("() => !document.querySelector('.p-toast-message-error')", timeout=10_000)
    wait_for_run(page, "done")

    for text in (told, note, dict(shown)["XDiTParallelSampler"].removeprefix("failed: ")):
        assert "Set cfg above 1, or mode to auto: cfg_degree=2 needs two branches" in text
    assert dict(shown)["XDiTVAEDecode"] == "not run: the prompt failed before this node" and not timeline


SIZES = """([steps, size]) => {
    const set = (type, name, value) => {
        app.graph.nodes.find(node => node.type === type).widgets.find(widget => widget.name === name).value = value };
    set("XDiTParallelSampler", "steps", steps);
    set("EmptySD3LatentImage", "width", size);
    set("EmptySD3LatentImage", "height", size);
}"""


@pytest.mark.slow
def test_a_cancel_while_devices_are_measured_is_told_at_once(page, after_a_run):
    """The workers go on measuring; the next run needs what they measure."""
    page.evaluate(SIZES, [2000, 512])
    queue(page, 16)
    page.wait_for_function("() => /measuring/.test(document.querySelector('.xdit-phase')?.textContent ?? '')",
                           timeout=120_000)
    page.evaluate("async () => (await import('/scripts/api.js')).api.interrupt(null)")
    wait_for_run(page, "cancelled")
    group = page.locator(".xdit-group").get_attribute("data-state")
    said = page.evaluate("""() => app.graph.nodes.find(node => node.type === "XDiTParallelSampler").widgets
        .find(widget => widget.name === "$$node-text-preview").value""")
    table = page.locator(".xdit-panel table").is_visible()
    reason = page.locator("[data-fact=run_why]").count()
    page.evaluate(SIZES, [STEPS, 128])
    queue(page, 17)
    page.wait_for_selector(".xdit-panel dl[data-state=done]", timeout=120_000)

    assert group == "working" and said == "cancelled after 0 of 2000 steps"
    assert not table and reason == 0                           # of no steps, and of no choice


@pytest.mark.slow
def test_times_that_come_late_are_not_shown_beside_a_later_state(page, host, after_a_run):
    """The panel asks for the times of a run that is over; before they are there, the next run has begun."""
    hidden = page.evaluate("""async state => {
        const { api } = await import("/scripts/api.js");
        const fetch = api.fetchApi, section = document.querySelector(".xdit-time").closest("section");
        let answer;
        api.fetchApi = (...args) => args[0] === "/xdit/timeline"
            ? new Promise(resolve => { answer = () => fetch.apply(api, args).then(resolve) }) : fetch.apply(api, args);
        try {
            api.dispatchCustomEvent("xdit.state", state);
            api.dispatchCustomEvent("xdit.state", { ...state, run: { ...state.run, state: "running" } });
            const before = section.hidden;
            await answer();
            await new Promise(resolve => setTimeout(resolve, 100));
            return [before, section.hidden];
        } finally {
            api.fetchApi = fetch;
            api.dispatchCustomEvent("xdit.state", state);
        }
    }""", host.get("/xdit/state"))

    assert hidden == [True, True]


@pytest.mark.slow
def test_the_legend_lists_what_the_image_has(page):
    """Measuring the devices has a colour of its own; nothing is drawn of a run that did nothing."""
    of, kinds = page.evaluate("""async () => {
        const { Timeline } = await import("/extensions/xdit-comfyui/timeline.js");
        const timeline = new Timeline(key => key);
        const show = (run, spans) => timeline.show({ run, seconds: 2, steps: 1, ranks: [{ name: "0: cpu", spans }] });
        show(1, []);
        const empty = timeline.isOf(1);
        show(2, [["measure", 0, 1, 0, 0], ["whole", 1, 2, 1, 0], ["weights", 1, 1.5, 1, 0]]);
        return [[empty, timeline.isOf(1), timeline.isOf(2)],
            [...timeline.legend.querySelectorAll("i")].map(one => one.dataset.kind)];
    }""")

    assert of == [False, False, True] and kinds == ["whole", "measure", "weights", "idle"]


@pytest.mark.slow
def test_the_settings_for_idle_workers_reach_the_host_and_the_panel(page, host):
    open_panel(page)
    page.wait_for_selector("[data-residency=keep]")
    choose = ("async ([how, minutes]) => { const { setting } = app.extensionManager; await "
              "setting.set('xdit.IdleMinutes', minutes); " \
             "await setting.set('xdit.Residency', how); }")

    page.evaluate(choose, ["park", 7])
    page.wait_for_selector("[data-residency=park]")
    told, state = page.text_content("[data-residency]"), host.get("/xdit/state")["residency"]
    page.evaluate(choose, ["keep", 10])
    page.wait_for_selector("[data-residency=keep]")

    assert "7 minutes" in told and state == {"how": "park", "minutes": 7.0}


SET_WEIGHTS_MEMORY = """value => {
    app.graph.nodes.find(node => node.type === "XDiTParallelConfig").widgets
        .find(widget => widget.name === "weights_memory").value = value;
}"""
UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}


@pytest.mark.slow
def test_the_rate_of_weights_that_come_is_what_came_in_a_step(page, host, after_a_run):
    """Of a device; as many bytes as its worker has in host memory, in the time that a step took."""
    before = page.locator("[data-fact=run_link]").count()
    page.evaluate(SET_WEIGHTS_MEMORY, "0.03")
    try:
        queue(page, 19)
        page.wait_for_selector("[data-fact=run_link]", timeout=120_000)
        wait_for_run(page, "done")
        shown = page.text_content("[data-fact=run_link]")
        lines = page.locator(".xdit-group li").all_text_contents()
        step_s = float(page.text_content("[data-fact=run_a_step]").removesuffix(" s"))
    finally:
        page.evaluate(SET_WEIGHTS_MEMORY, "auto")
    models = [model for group in host.get("/xdit/state")["groups"] for model in group["models"]]

    come, rate = (float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+) (\w+)", shown))
    assert before == 0 and shown.endswith("/s")
    assert come == pytest.approx(max(max(model["offloaded"]) for model in models), rel=0.05) and come > 0
    stay = sum(sum(model["weights"]) - sum(model["parked"]) for model in models if any(model["offloaded"]))
    line, = (line for line in lines if "offloaded to system RAM" in line)
    held, streamed = (float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+) ([KMG]?B)\b", line))
    assert held == pytest.approx(stay, rel=0.05) and streamed == pytest.approx(come, rel=0.01)
    rounded = 0.05e9 if rate >= 1e8 else 0.5e6
    assert abs(rate - come / step_s) < rounded + 0.1 * rate


@pytest.mark.slow
def test_a_run_is_measured_on_one_device_and_compared(page, host, after_a_run):
    """The button queues the prompt of the run on one device; runs on both are then compared with it."""
    number = int(page.locator(".xdit-panel dl").get_attribute("data-run"))
    before = len(host.get("/history"))
    page.locator("[data-action=one_device]").click()
    page.wait_for_function("number => Number(document.querySelector('.xdit-panel dl')?.dataset.run) > number",
                           arg=number, timeout=120_000)
    wait_for_run(page, "done")
    wait_for_an_empty_queue(page)
    alone = host.get("/xdit/state")["run"]
    queue(page, 21)
    page.wait_for_selector("dl[data-state=done] [data-fact=run_on_one]:not(:has(button))", timeout=120_000)
    shown, run = page.text_content("[data-fact=run_on_one]"), host.get("/xdit/state")["run"]
    node = page.evaluate("""() => app.graph.nodes.find(node => node.type === "XDiTParallelSampler").widgets
        .find(widget => widget.name === "$$node-text-preview").value""")

    assert alone["devices"] == ["cpu"] and alone["steps"] == STEPS and alone["on_one"] is None
    assert len(host.get("/history")) == before + 2
    assert run["on_one"]["a_step"] == pytest.approx(alone["a_step"], abs=1e-4) and run["working"] == 2
    faster = run["on_one"]["a_step"] / run["a_step"]
    assert re.fullmatch(rf"[\d.]+ s a step, measured here on {run['on_one']['date']}; this run: ([\d.]+) times as fast",
                        shown)
    assert float(shown.split()[-4]) == pytest.approx(faster, abs=0.06)
    assert f"; {faster:.1f}x one device, measured here on {run['on_one']['date']}" in node
    stored = json.loads((host.log.parent / "user" / "xdit" / "measured.json").read_text())["runs"]
    assert [entry["layout"] for entry in stored if entry["gpus"] == [entry["gpus"][0]]] == ["one device"]
