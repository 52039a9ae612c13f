/** Which widget an error of ours is about: marked on its node; and for settings that cannot work here, a button that sets what can. Used by xdit.js. */

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { headOf } from "./messages.js";
import { nodeOf, refused, watchOutcomes } from "./outcome.js";
import { say } from "./texts.js";
import { translated } from "./translate.js";

const CONFIG = "XDiTParallelConfig";
const OURS = "xDiT.";                      // what the classes of our errors are called after
const SHOWN_MS = 20000;
const language = () => app.extensionManager.setting.get("Comfy.Locale");
const text = (key, values) => say(language(), key, values);

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
  watchOutcomes();
  const queue = api.queuePrompt;
  api.queuePrompt = async function (...given) {
    try {
      const answer = await queue.apply(this, given);
      name(answer?.node_errors);
      return answer;
    } catch (error) {
      report(error?.response);
      throw error;
    }
  };
  api.addEventListener("execution_error", ({ detail }) => {
    tell(detail);
    markRun(detail);
  });
  api.addEventListener("execution_start", () => {
    withdrawNotes();
    unmark();
    for (const node of app.rootGraph?.nodes ?? []) withdraw(node);
  });
}

/** Of a prompt that was refused as a whole. */
function report(answer) {
  name(answer?.node_errors);
  const [first = answer?.error] = Object.values(answer?.node_errors ?? {}).flatMap(({ errors }) => errors);
  if (first) refused(first.details || first.message || String(first));
}

function name(reports) {
  for (const [id, report] of Object.entries(reports ?? {})) {
    const node = nodeOf(id);
    if (!node || !report.class_type?.startsWith("XDiT")) continue;
    for (const error of report.errors) {
      const given = error.extra_info?.input_name;              // where a check fails, that of the node it is connected to
      const found = namesOf(node).includes(given) ? given : namedIn(error.details ?? "", namesOf(node));
      if (found) error.extra_info = { ...error.extra_info, input_name: found };
      error.details = translated(language(), error.details);
    }
    if (node.type === CONFIG) refusedIds.set(node, id);
    if (node.type === CONFIG && valueOf(node, "mode") === "manual") offerWhatFits(node);
  }
}

/** The page says only that a node failed: what to do stands in the message, and in a note that stays for a while. */
function tell({ node_id, node_type, exception_type, exception_message }) {
  if (!exception_type?.startsWith(OURS)) return;
  const [words] = headOf(exception_message ?? "");
  note({ severity: "error", summary: nodeOf(node_id)?.title || node_type, detail: words, life: SHOWN_MS });
}

let notes = [];                            // of errors, until a run begins

function note(message) {
  notes.push(message);
  app.extensionManager.toast.add(message);
}

function withdrawNotes() {
  notes.forEach((message) => app.extensionManager.toast.remove(message));
  notes = [];
}

let marked = [];
const refusedIds = new WeakMap();          // node of settings -> the id by which it was refused

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

function unmark(wanted = () => true) {
  for (const [node, slot] of marked.filter(([one]) => wanted(one))) {
    slot.hasErrors = node.has_errors = false;
    node.setDirtyCanvas(true, true);
  }
  marked = marked.filter(([one]) => !wanted(one));
}

/** A widget of xDiT Parallel Config was set: its mark goes, and the button as soon as the settings fit. Called by xdit.js. */
export async function recheck(node) {
  unmark((one) => one === node);
  if (!buttonOf(node)) return forget(refusedIds.get(node));     // such as names of devices in the mode auto
  if (valueOf(node, "mode") === "manual") {
    const { settings } = await whatFits(node).then(({ answer, said }) => (answer.ok ? said : { settings: { unknown: true } }));
    if (Object.keys(settings).length) return;
  }
  withdraw(node);
  forget(refusedIds.get(node));
}

/** The page's own mark of a node that was refused, which it keeps until the next prompt; it has no call of its own for this. */
function forget(id) {
  const store = document.querySelector("#vue-app")?.__vue_app__?.config.globalProperties.$pinia?._s.get("executionError");
  if (!store?.lastNodeErrors?.[id]) return;
  const { [id]: _, ...rest } = store.lastNodeErrors;
  store.lastNodeErrors = Object.keys(rest).length ? rest : null;
}

/** A button on xDiT Parallel Config, until it is pressed or a run begins. It is no setting, and not saved. */
function offerWhatFits(node) {
  if (buttonOf(node)) return;
  const button = node.addWidget("button", "xdit_fit", null, async () => {
    const { answer, said } = await whatFits(node);
    if (!answer.ok) return app.extensionManager.toast.add({ severity: "error", summary: text("failed"), detail: translated(language(), said.error), life: SHOWN_MS });
    for (const [key, value] of Object.entries(said.settings)) {
      const widget = node.widgets.find((one) => one.name === key);
      widget.value = value;
      widget.callback?.(value);
    }
    withdraw(node);
    forget(refusedIds.get(node));
    const list = Object.entries(said.settings).map(([key, value]) => `${key} = ${value}`).join(", ");
    app.extensionManager.toast.add({ severity: "success", summary: text("fit_done"), detail: list, life: 12000 });
  });
  button.label = text("fit");
  button.serialize = false;
  node.setSize([node.size[0], node.computeSize()[1]]);
  node.setDirtyCanvas(true, true);
}

/** The server's answer, and what it says of the settings that would fit. */
async function whatFits(node) {
  const given = node.widgets.filter(({ name }) => namesOf(node).includes(name));
  const answer = await api.fetchApi("/xdit/fit", {
    method: "POST", headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ settings: Object.fromEntries(given.map((widget) => [widget.name, widget.value])) }),
  });
  return { answer, said: await answer.json() };
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
const buttonOf = (node) => node.widgets?.find((widget) => widget.name === "xdit_fit");
const valueOf = (node, key) => node.widgets.find((widget) => widget.name === key)?.value;

/** Nodes of settings that this one's inputs come from, directly or through a model. */
function configsOf(node, seen = new Set()) {
  const before = (node.inputs ?? []).map((slot, index) => (["XDIT_PARALLEL", "MODEL"].includes(slot.type) ? node.getInputNode(index) : null));
  return before.filter((one) => one && !seen.has(one) && seen.add(one)).flatMap((one) => (one.type === CONFIG ? [one] : configsOf(one, seen)));
}
