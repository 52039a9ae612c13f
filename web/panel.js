/** The sidebar panel: memory by owner, workers, the last run and its timeline. */

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { element } from "./dom.js";
import { onOneDevice } from "./measure.js";
import { headOf } from "./messages.js";
import { lastOutcome, onOutcome } from "./outcome.js";
import { say } from "./texts.js";
import { Timeline } from "./timeline.js";
import { translated } from "./translate.js";

const OWNERS = ["weights", "keys_values", "activations", "vae", "workers", "parked", "comfyui", "other", "free"];
const EVENT = "xdit.state";

const language = () => app.extensionManager.setting.get("Comfy.Locale");
const text = (key, values) => say(language(), key, values);

let open = null;                           // the Panel in the sidebar while the tab is open

export function registerPanel() {
  const style = element("link", { rel: "stylesheet", href: new URL("panel.css", import.meta.url).href });
  document.head.append(style);
  app.extensionManager.registerSidebarTab({
    id: "xdit", icon: "pi pi-server", title: "xDiT", tooltip: text("panel"), type: "custom",
    render(root) {
      if (open?.root === root) return;     // called whenever the page renders
      close();
      open = new Panel(root);
    },
    destroy: close,
  });
  api.addEventListener("reconnected", () => open?.watch(true));
}

function close() {
  open?.close();
  open = null;
}

class Panel {
  constructor(root) {
    this.root = root;
    this.devices = element("section", { "aria-label": text("memory") });
    this.workers = element("section", { "aria-label": text("workers_title") });
    this.run = element("section", { "aria-label": text("run") });
    this.report = element("section", { "aria-label": text("report_title"), class: "xdit-report" });
    this.status = element("p", { role: "status", class: "xdit-status" });
    this.timeline = new Timeline(text);
    this.time = element("section", { "aria-label": text("time") }, element("h3", {}, text("time")), this.timeline.root);
    this.time.hidden = true;
    const button = (key, action) => element("button", { type: "button", title: text(`${key}_hint`), "data-action": key, onclick: action }, text(key));
    root.replaceChildren(element("div", { class: "xdit-panel", role: "region", "aria-label": text("panel") },
      element("h2", {}, text("panel")), this.devices, this.workers, this.run,
      this.time,
      element("section", { "aria-label": text("actions"), class: "xdit-actions" },
        button("give_back", () => this.act("give_back")), button("stop", () => this.act("stop")),
        button("measure", () => this.act("measure")), button("trace", () => this.saveTrace()),
        button("report", () => this.runReport("start"))),
      this.status, this.report));
    this.listener = ({ detail }) => this.show(detail);
    api.addEventListener(EVENT, this.listener);
    this.forgetOutcome = onOutcome(() => this.state && this.show(this.state));
    this.watch(true);
  }

  close() {
    api.removeEventListener(EVENT, this.listener);
    this.forgetOutcome();
    this.watch(false);
    this.timeline.close();
  }

  /** Subscribe to the server's state, or unsubscribe. */
  async watch(isOpen) {
    const answer = await post("/xdit/watch", { client: api.clientId, open: isOpen });
    if (!answer.ok && isOpen) this.status.textContent = text("unknown_state", { text: answer.status });
  }

  async show(state) {
    if (!this.root.isConnected) return close();                // replaced by another tab
    this.state = state;
    this.devices.replaceChildren(element("h3", {}, text("memory")), ...state.devices.map(deviceView));
    this.workers.replaceChildren(element("h3", {}, text("workers_title")), ...(state.groups.length ? state.groups.map(groupView)
      : [element("p", {}, text("no_workers"))]), ...phaseView(state.phase),
      element("p", { "data-residency": state.residency.how }, text(`residency_${state.residency.how}`, state.residency)));
    showReport(this.report, state.report, () => this.runReport("cancel"));
    const outcome = newerOutcome(state.run);
    this.run.replaceChildren(element("h3", {}, text("run")), ...(outcome ? outcomeView(outcome) : runView(state.run)));
    const isOver = () => state.run && state.run.state !== "running" && !newerOutcome(state.run);
    const answer = isOver() ? await api.fetchApi("/xdit/timeline") : null;
    if (this.state !== state) return;                           // a later state was shown while this one was waiting for its timeline
    if (answer?.ok && open === this) this.timeline.show(await answer.json());
    this.time.hidden = !isOver() || !this.timeline.isOf(state.run.number);
  }

  async act(action) {
    this.status.textContent = text("doing");
    const answer = await post("/xdit/do", { action });
    this.status.textContent = answer.ok ? text(`${action}_done`) : text("refused", { text: translated(language(), (await answer.json()).error) });
  }

  /** Start or cancel the report of this machine's devices. */
  async runReport(action) {
    this.status.textContent = action === "start" ? text("doing") : "";
    const answer = await post("/xdit/report", { action });
    this.status.textContent = answer.ok ? "" : text("refused", { text: translated(language(), (await answer.json()).error) });
  }

  /** Queue a prompt of ComfyUI's history on one device. */
  async measureOne(id, device) {
    const past = (await (await api.fetchApi(`/history/${id}`)).json())[id];
    if (!past) return void (this.status.textContent = text("one_gone"));
    const [, , prompt, extra] = past.prompt;
    const { required, optional } = LiteGraph.registered_node_types.XDiTParallelConfig.nodeData.input;
    const defaults = Object.fromEntries(Object.entries({ ...required, ...optional }).map(([name, [, options]]) => [name, options.default]));
    const answer = await post("/prompt", { client_id: api.clientId, prompt: onOneDevice(prompt, device, defaults),
      extra_data: { extra_pnginfo: extra?.extra_pnginfo } });
    this.status.textContent = answer.ok ? text("one_queued", { device }) : text("refused", { text: (await answer.json()).error?.message });
  }

  async saveTrace() {
    const answer = await api.fetchApi("/xdit/trace");
    const link = element("a", { download: "xdit-trace.json", href: URL.createObjectURL(await answer.blob()) });
    link.click();
    URL.revokeObjectURL(link.href);
    this.status.textContent = text("trace_done");
  }
}

// ---- views of the state

function deviceView({ name, title, total, known, owners }) {
  const shown = OWNERS.filter((owner) => owners[owner] > 0);
  const labels = shown.map((owner) => `${text(`owner_${owner}`)} ${size(owners[owner])}`);
  return element("div", { class: "xdit-device", "data-device": name },
    element("div", { class: "xdit-line" }, element("strong", {}, name === "cpu" ? text("host_memory") : `${name} ${title}`), element("span", {}, size(total))),
    known ? element("div", { class: "xdit-bar", role: "img", "aria-label": labels.join(", ") }, ...shown.map((owner, index) =>
      element("span", { "data-owner": owner, "data-bytes": owners[owner], title: labels[index], style: `width: ${100 * owners[owner] / total}%` })))
      : element("p", {}, text("memory_unknown")),
    ...(known ? [element("ul", { class: "xdit-legend" }, ...shown.map((owner) => element("li", {},
      element("i", { "data-owner": owner }), `${text(`owner_${owner}`)} `, element("span", {}, size(owners[owner])))))] : []));
}

function groupView({ devices, state, models, vaes }) {
  const lines = models.map(({ name, weights, parked, offloaded }) => {
    const resident = sum(weights) - sum(parked);
    return element("li", {}, `${name.replace(/-[0-9a-f]+$/, "")}: ${text("model_held", { size: size(resident) })}`
      + (sum(parked) ? `, ${text("model_parked", { size: size(sum(parked)) })}` : "")
      + (sum(offloaded) ? `, ${text("model_offloaded", { size: size(Math.max(...offloaded)) })}` : ""));
  });
  if (vaes) lines.push(element("li", {}, text("vaes_held", { count: vaes })));
  return element("div", { class: "xdit-group", "data-state": state },
    element("div", { class: "xdit-line" }, element("strong", {}, devices.join(", ")), element("span", {}, text(`state_${state}`))),
    element("ul", {}, ...lines));
}

function phaseView({ text: name, done, total, counts_bytes, rate }) {
  if (!name) return [];
  const amounts = counts_bytes ? `${size(done)} / ${size(total)}${rate ? `, ${size(rate)}/s` : ""}` : total ? `${done} / ${total}` : "";
  return [element("p", { class: "xdit-phase" }, `${translated(language(), name)} ${amounts}`)];
}

/** Return the outcome of the last prompt if it is newer than the workers' last run, else null. */
function newerOutcome(run) {
  const outcome = lastOutcome();
  return outcome && run?.state !== "running" && (outcome.prompt === undefined || outcome.prompt !== run?.prompt) ? outcome : null;
}

function outcomeView({ state, error }) {
  return [element("dl", { "data-state": state }, element("dt", {}, text("run_state")), element("dd", { "data-fact": "run_state" }, text(`run_${state}`)),
    ...(error ? [element("dt", {}, text("run_error")), element("dd", { "data-fact": "run_error" }, errorView(error))] : []))];
}

function runView(run) {
  if (!run) return [element("p", {}, text("no_run"))];
  const left = run.state === "running" && run.a_step ? text("time_left", { seconds: seconds((run.steps - run.step) * run.a_step) }) : "";
  const facts = [
    ["run_state", text(`run_${run.state}`) + (left && `, ${left}`)], ["run_file", run.file], ["run_devices", run.devices.join(", ")],
    ["run_how", translated(language(), run.how)], ["run_kernels", translated(language(), run.kernels)],
    ["run_steps", run.steps ? text("steps_of", { step: run.step, steps: run.steps }) : ""],
    ["run_a_step", run.a_step ? aStep(run) : ""], ["run_took", run.steps ? seconds(run.seconds) : ""],
    ["run_link", run.streamed && run.a_step ? text("link_use", { size: size(run.streamed), rate: size(run.streamed / run.a_step) }) : ""],
    ...planFacts(run), ["run_on_one", oneDevice(run)], ["run_error", run.error && errorView(run.error)],
  ].filter(([, value]) => value);
  const progress = run.state === "running" && run.steps
    ? [element("progress", { max: run.steps, value: run.step, "aria-label": text("run_steps") })] : [];
  return [...progress, element("dl", { "data-run": run.number, "data-state": run.state },
    ...facts.flatMap(([key, value]) => [element("dt", {}, text(key)), element("dd", { "data-fact": key }, value)]))];
}

function errorView(message) {
  const [summary, details] = headOf(translated(language(), message));
  return details ? element("div", {}, summary, element("details", {}, element("summary", {}, text("more_details")), element("pre", {}, details))) : summary;
}

/** Return the measured time of such a run on one device, or a button that measures it. */
function oneDevice(run) {
  if (run.working < 2) return "";
  if (run.on_one) {
    const one = text("one_measured", { seconds: run.on_one.a_step.toFixed(2), date: run.on_one.date });
    return run.state === "done" && run.a_step ? text("one_faster", { one, faster: (run.on_one.a_step / run.a_step).toFixed(1) }) : one;
  }
  if (run.plan && !run.plan.one_fits) return text("does_not_fit");
  if (run.state !== "done" || !run.prompt || !run.a_step) return "";
  const [device] = run.devices;
  return element("button", { type: "button", "data-action": "one_device", title: text("one_measure_hint", { device }),
    onclick: () => open?.measureOne(run.prompt, device) }, text("one_measure"));
}

function planFacts({ plan, how, why_no_plan: why }) {
  if (!plan) return [["run_why", how && why && text(`why_${why}`)]];
  const { chosen, second } = plan;
  return [["run_plan", layout(chosen)], ["run_why", chosen.limited_by && text(`limited_${chosen.limited_by.replace("-", "")}`)],
    ["run_second", second ? layout(second) : ""]];
}

/** Return the measured time per step, as the node shows it, and its estimate. */
function aStep({ a_step: measured, plan }) {
  const estimate = plan?.chosen.a_step;
  return `${measured.toFixed(2)} s` + (estimate ? ` (${text("estimated", { seconds: estimate.toFixed(2) })})` : "");
}

const REPORT_S = 360;                      // the longest that a report takes

/** Show the state of the report. Its elements are replaced only if it changes, so that the cancel button keeps the focus. */
function showReport(section, report, cancel) {
  const isRunning = report.state === "running";
  const left = text("report_left", { time: `${Math.floor(report.left_s / 60)}:${String(report.left_s % 60).padStart(2, "0")}` });
  if (section.dataset.state !== report.state) {
    section.dataset.state = report.state;
    const links = report.files.map((name) => element("a", { href: api.apiURL(`/xdit/report/${name}`), target: "_blank",
      ...(name.endsWith(".json") ? { download: name } : {}) }, text(`report_${name.split(".").at(-1)}`)));
    const chart = report.files.filter((name) => name.endsWith(".png")).map((name) => element("img", { src: api.apiURL(`/xdit/report/${name}`), alt: text("report_chart") }));
    section.replaceChildren(...(report.state === "none" ? [] : [element("h3", {}, text("report_title")), ...(isRunning
      ? [element("progress", { max: REPORT_S, "aria-label": text("report_title") }), element("p", { "data-report": "text" }),
        element("button", { type: "button", "data-action": "cancel_report", onclick: cancel }, text("report_cancel"))]
      : [element("p", { "data-report": report.state }, text(`report_${report.state}`, { text: report.error })),
        ...report.verdict.map((sentence) => element("p", { "data-report": "verdict" }, translated(language(), sentence))), ...chart,
        ...(links.length ? [element("p", { class: "xdit-actions" }, ...links), element("p", {}, text("report_send"))] : [])])]));
  }
  if (!isRunning) return;
  section.querySelector("progress").value = report.text ? REPORT_S - report.left_s : 0;
  section.querySelector("[data-report=text]").textContent = report.text ? `${translated(language(), report.text)}, ${left}` : text("report_begins");
}

const layout = ({ methods }) => methods.join(" x ") || text("one_device");

const sum = (numbers) => numbers.reduce((all, number) => all + number, 0);
const seconds = (value) => `${value >= 100 ? Math.round(value) : Number(value.toPrecision(2))} s`;

function size(bytes) {
  return bytes >= 1e8 ? `${(bytes / 1e9).toFixed(1)} GB` : `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`;
}

function post(path, body) {
  return api.fetchApi(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}
