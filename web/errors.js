/** Display of the pack's errors: the widget concerned is marked, and a button sets settings that fit this machine. */

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { headOf } from "./messages.js";
import { endWaiting, nodeOf, refused, watchOutcomes } from "./outcome.js";
import { say } from "./texts.js";
import { translated } from "./translate.js";

const CONFIG = "XDiTParallelConfig";
const OURS = "xDiT.";                      // prefix of the pack's exception types
const SHOWN_MS = 20000;
const language = () => app.extensionManager.setting.get("Comfy.Locale");
const text = (key, values) => say(language(), key, values);

/** Return the name that a message is about: the first with a value ("devices="), else the first mentioned, else null. */
export function namedIn(message, names) {
  const place = (name, pattern) => message.search(new RegExp(`(?<![\\w])${name}${pattern}`));
  for (const pattern of ["=", "(?![\\w])"]) {
    const found = names.map((name) => [place(name, pattern), name]).filter(([at]) => at >= 0).sort(([one], [other]) => one - other);
    if (found.length) return found[0][1];
  }
  return null;
}

/** Add widget names to validation errors, which the page uses to mark the widget, and mark widgets for execution errors until the next run. */
export function markErrors() {
  watchOutcomes();
  const queue = api.queuePrompt;
  api.queuePrompt = async function (...args) {
    try {
      const answer = await queue.apply(this, args);
      name(answer?.node_errors);
      return answer;
    } catch (error) {
      report(error?.response);
      throw error;
    }
  };
  api.addEventListener("execution_error", ({ detail }) => {
    showError(detail);
    markRun(detail);
  });
  api.addEventListener("execution_start", () => {
    withdrawNotes();
    unmark();
    for (const node of app.rootGraph?.nodes ?? []) withdraw(node);
  });
}

/** Handle the response for a prompt that was rejected as a whole. */
function report(answer) {
  name(answer?.node_errors);
  const [first = answer?.error] = Object.values(answer?.node_errors ?? {}).flatMap(({ errors }) => errors);
  if (first) refused(first.details || first.message || String(first));
  else endWaiting(true);                   // ComfyUI could not be reached
}

function name(reports) {
  for (const [id, report] of Object.entries(reports ?? {})) {
    const node = nodeOf(id);
    if (!node || !report.class_type?.startsWith("XDiT")) continue;
    for (const error of report.errors) {
      const given = error.extra_info?.input_name;              // of the connected node, if a check of links failed
      const found = namesOf(node).includes(given) ? given : namedIn(error.details ?? "", namesOf(node));
      if (found) error.extra_info = { ...error.extra_info, input_name: found };
      error.details = translated(language(), error.details);
    }
    if (node.type === CONFIG) refusedIds.set(node, id);
    if (node.type === CONFIG && valueOf(node, "mode") === "manual") offerWhatFits(node);
  }
}

/** Show the error as a toast: the page itself only reports that a node failed. */
function showError({ node_id, node_type, exception_type, exception_message }) {
  if (!exception_type?.startsWith(OURS)) return;
  const [summary] = headOf(exception_message ?? "");
  note({ severity: "error", summary: nodeOf(node_id)?.title || node_type, detail: summary, life: SHOWN_MS });
}

let notes = [];                            // toasts of errors, until the next run starts

function note(message) {
  notes.push(message);
  app.extensionManager.toast.add(message);
}

function withdrawNotes() {
  notes.forEach((message) => app.extensionManager.toast.remove(message));
  notes = [];
}

let marked = [];
const refusedIds = new WeakMap();          // xDiT Parallel Config node -> execution id under which it was rejected

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

/** Update after a widget of xDiT Parallel Config has changed: remove its mark, and the button once the settings fit. */
export async function recheck(node) {
  unmark((one) => one === node);
  if (!buttonOf(node)) return forget(refusedIds.get(node));     // e.g. wrong device names in auto mode
  if (valueOf(node, "mode") === "manual") {
    const { settings } = await whatFits(node).then(({ answer, body }) => (answer.ok ? body : { settings: { unknown: true } }));
    if (Object.keys(settings).length) return;
  }
  withdraw(node);
  forget(refusedIds.get(node));
}

/** Remove the page's own mark of a rejected node, which otherwise remains until the next prompt; the page has no API for this. */
function forget(id) {
  const store = document.querySelector("#vue-app")?.__vue_app__?.config.globalProperties.$pinia?._s.get("executionError");
  if (!store?.lastNodeErrors?.[id]) return;
  const { [id]: _, ...rest } = store.lastNodeErrors;
  const left = Object.keys(rest).length ? rest : null;
  if (store.recordNodeErrors) store.recordNodeErrors(left);    // newer pages compute lastNodeErrors
  else store.lastNodeErrors = left;
}

/** Add a button to xDiT Parallel Config until it is pressed or a run starts. It is not a setting and not saved. */
function offerWhatFits(node) {
  if (buttonOf(node)) return;
  const button = node.addWidget("button", "xdit_fit", null, async () => {
    const { answer, body } = await whatFits(node);
    if (!answer.ok) return app.extensionManager.toast.add({ severity: "error", summary: text("failed"), detail: translated(language(), body.error), life: SHOWN_MS });
    for (const [key, value] of Object.entries(body.settings)) {
      const widget = node.widgets.find((one) => one.name === key);
      widget.value = value;
      widget.callback?.(value);
    }
    withdraw(node);
    forget(refusedIds.get(node));
    const list = Object.entries(body.settings).map(([key, value]) => `${key} = ${value}`).join(", ");
    app.extensionManager.toast.add({ severity: "success", summary: text("fit_done"), detail: list, life: 12000 });
  });
  button.label = text("fit");
  button.serialize = false;
  node.setSize([node.size[0], node.computeSize()[1]]);
  node.setDirtyCanvas(true, true);
}

/** Return the server's response and its body, {settings} that would fit or {error}. */
async function whatFits(node) {
  const settings = node.widgets.filter(({ name }) => namesOf(node).includes(name));
  const answer = await api.fetchApi("/xdit/fit", {
    method: "POST", headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ settings: Object.fromEntries(settings.map((widget) => [widget.name, widget.value])) }),
  });
  return { answer, body: await answer.json() };
}

function withdraw(node) {
  const index = node.widgets?.findIndex((widget) => widget.name === "xdit_fit") ?? -1;
  if (index < 0) return;
  node.widgets.splice(index, 1);
  node.setSize([node.size[0], node.computeSize()[1]]);
  node.setDirtyCanvas(true, true);
}

// ---- nodes

const namesOf = (node) => (node.inputs ?? []).filter((slot) => slot.widget).map((slot) => slot.name);
const buttonOf = (node) => node.widgets?.find((widget) => widget.name === "xdit_fit");
const valueOf = (node, key) => node.widgets.find((widget) => widget.name === key)?.value;

/** Return the xDiT Parallel Config nodes upstream of a node, directly or through models. */
function configsOf(node, seen = new Set()) {
  const before = (node.inputs ?? []).map((slot, index) => (["XDIT_PARALLEL", "MODEL"].includes(slot.type) ? node.getInputNode(index) : null));
  return before.filter((one) => one && !seen.has(one) && seen.add(one)).flatMap((one) => (one.type === CONFIG ? [one] : configsOf(one, seen)));
}
