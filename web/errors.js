/** Which widget an error of ours is about: marked on its node; and for settings that cannot work here, a button that sets what can. Used by xdit.js. */

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { headOf } from "./messages.js";
import { say } from "./texts.js";

const CONFIG = "XDiTParallelConfig";
const OURS = "xDiT.";                      // what the classes of our errors are called after
const SHOWN_MS = 20000;
const text = (key, values) => say(app.extensionManager.setting.get("Comfy.Locale"), key, values);

/** Of some names, the one that a message is about: the first that it gives a value of ("devices="), else the first that it mentions; or null. */
export function namedIn(message, names) {
  const place = (name, pattern) => message.search(new RegExp(`(?<![\\w])${name}${pattern}`));
  for (const pattern of ["=", "(?![\\w])"]) {
    const found = names.map((name) => [place(name, pattern), name]).filter(([at]) => at >= 0).sort(([one], [other]) => one - other);
    if (found.length) return found[0][1];
  }
  return null;
}

/** Errors of queueing get the name of the widget, by which the page marks it; errors of a run mark theirs until the next run. */
export function markErrors() {
  const queue = api.queuePrompt;
  api.queuePrompt = async function (...given) {
    try {
      const answer = await queue.apply(this, given);
      name(answer?.node_errors);
      return answer;
    } catch (error) {
      name(error?.response?.node_errors);
      throw error;
    }
  };
  api.addEventListener("execution_error", ({ detail }) => {
    tell(detail);
    markRun(detail);
  });
  api.addEventListener("execution_start", () => {
    unmark();
    for (const node of app.rootGraph?.nodes ?? []) withdraw(node);
  });
}

function name(reports) {
  for (const [id, report] of Object.entries(reports ?? {})) {
    const node = nodeOf(id);
    if (!node || !report.class_type?.startsWith("XDiT")) continue;
    for (const error of report.errors) {
      const given = error.extra_info?.input_name;              // where a check fails, that of the node it is connected to
      const found = namesOf(node).includes(given) ? given : namedIn(error.details ?? "", namesOf(node));
      if (found) error.extra_info = { ...error.extra_info, input_name: found };
    }
    if (node.type === CONFIG && valueOf(node, "mode") === "manual") offerWhatFits(node);
  }
}

/** The page says only that a node failed: what to do stands in the message, and in a note that stays for a while. */
function tell({ node_id, node_type, exception_type, exception_message }) {
  if (!exception_type?.startsWith(OURS)) return;
  const [words] = headOf(exception_message ?? "");
  app.extensionManager.toast.add({ severity: "error", summary: nodeOf(node_id)?.title || node_type, detail: words, life: SHOWN_MS });
}

let marked = [];

function markRun({ node_id, node_type, exception_message }) {
  const node = node_type?.startsWith("XDiT") ? nodeOf(node_id) : null;
  if (!node) return;
  const nodes = [node, ...configsOf(node)];
  const found = namedIn(exception_message ?? "", nodes.flatMap(namesOf));
  const owner = nodes.find((one) => namesOf(one).includes(found));
  const slot = owner?.inputs.find((input) => input.name === found);
  if (!slot) return;
  slot.hasErrors = owner.has_errors = true;
  marked.push([owner, slot]);
  owner.setDirtyCanvas(true, true);
}

function unmark() {
  for (const [node, slot] of marked) slot.hasErrors = node.has_errors = false;
  marked = [];
}

/** A button on xDiT Parallel Config, until it is pressed or a run begins. It is no setting, and not saved. */
function offerWhatFits(node) {
  if (node.widgets.some((widget) => widget.name === "xdit_fit")) return;
  const button = node.addWidget("button", "xdit_fit", null, async () => {
    const given = node.widgets.filter((widget) => widget !== button && !widget.name.startsWith("control_"));
    const answer = await api.fetchApi("/xdit/fit", {
      method: "POST", headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ settings: Object.fromEntries(given.map((widget) => [widget.name, widget.value])) }),
    });
    const said = await answer.json();
    if (!answer.ok) return app.extensionManager.toast.add({ severity: "error", summary: text("failed"), detail: said.error, life: 12000 });
    for (const [key, value] of Object.entries(said.settings)) {
      const widget = node.widgets.find((one) => one.name === key);
      widget.value = value;
      widget.callback?.(value);
    }
    withdraw(node);
    const list = Object.entries(said.settings).map(([key, value]) => `${key} = ${value}`).join(", ");
    app.extensionManager.toast.add({ severity: "success", summary: text("fit_done"), detail: list, life: 12000 });
  });
  button.label = text("fit");
  button.serialize = false;
  node.setSize([node.size[0], node.computeSize()[1]]);
  node.setDirtyCanvas(true, true);
}

function withdraw(node) {
  const place = node.widgets?.findIndex((widget) => widget.name === "xdit_fit") ?? -1;
  if (place < 0) return;
  node.widgets.splice(place, 1);
  node.setSize([node.size[0], node.computeSize()[1]]);
  node.setDirtyCanvas(true, true);
}

// ---- nodes

const namesOf = (node) => (node.inputs ?? []).filter((slot) => slot.widget).map((slot) => slot.name);
const valueOf = (node, key) => node.widgets.find((widget) => widget.name === key)?.value;

/** The node of an execution id: "12", or "65:12" inside a subgraph's node. */
function nodeOf(id) {
  let graph = app.rootGraph, node = null;
  for (const part of String(id).split(":")) {
    node = graph?.getNodeById(part) ?? graph?.getNodeById(Number(part));
    graph = node?.subgraph;
  }
  return node;
}

/** Nodes of settings that this one's inputs come from, directly or through a model. */
function configsOf(node, seen = new Set()) {
  const before = (node.inputs ?? []).map((slot, index) => (["XDIT_PARALLEL", "MODEL"].includes(slot.type) ? node.getInputNode(index) : null));
  return before.filter((one) => one && !seen.has(one) && seen.add(one)).flatMap((one) => (one.type === CONFIG ? [one] : configsOf(one, seen)));
}
