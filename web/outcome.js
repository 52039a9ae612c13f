/**
 * Texts on nodes, and the outcome of the last prompt if the workers do not report it: rejected, failed before sampling, or cancelled. The outcome is
 * shown on the nodes, in place of their texts from the previous prompt, and in the panel.
 */

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { element } from "./dom.js";
import { headOf } from "./messages.js";
import { say } from "./texts.js";
import { translated } from "./translate.js";

const PREVIEW = "$$node-text-preview";     // ComfyUI's widget for a node's progress text
const SAMPLERS = ["KSampler", "KSamplerAdvanced", "SamplerCustom", "SamplerCustomAdvanced"];
const OURS = "xDiT.";                      // prefix of the pack's exception types
const CHANGED = "xdit.outcome";
const language = () => app.extensionManager.setting.get("Comfy.Locale");
const text = (key, values) => say(language(), key, values);

const SHOWING = ["XDiTParallelSampler", "XDiTVAEDecode", "XDiTVAEEncode", "XDiTUpscaleImage"];      // nodes that report progress in every run
const MIN_HEIGHT = 58;                     // of a text, in canvas pixels

let outcome = null;
let isRunning = false;                     // whether a prompt is running
let before = new Map();                    // node that waits for its turn -> its text from the previous prompt
let reached = new Set();                   // ids of nodes that reported progress in this prompt, or whose result is cached

/** Return {state, error, prompt} of the last prompt, or null. state: "refused", "failed" or "cancelled". prompt: ComfyUI's id, undefined if refused. */
export const lastOutcome = () => outcome;

/** Call a function when the outcome changes. Returns a function that unsubscribes. */
export function onOutcome(listener) {
  api.addEventListener(CHANGED, listener);
  return () => api.removeEventListener(CHANGED, listener);
}

/** Intercept events before the page handles them: while the prompt is still running, a node accepts a progress text. */
export function watchOutcomes() {
  const dispatch = api.dispatchCustomEvent;
  api.dispatchCustomEvent = function (type, detail) {
    if (type === "progress_text" && isOurs(nodeOf(detail.nodeId))) {
      detail.text = translated(language(), detail.text);
      before.delete(nodeOf(detail.nodeId));
      textOf(nodeOf(detail.nodeId));
    }
    if (type === "execution_error") {
      if (detail.exception_type?.startsWith(OURS)) detail.exception_message = translated(language(), detail.exception_message);
      failed(detail);
    }
    return dispatch.call(this, type, detail);
  };
  api.addEventListener("promptQueueing", wait);
  api.addEventListener("execution_start", () => {
    [reached, isRunning] = [new Set(), true];
    set(null);
  });
  api.addEventListener("execution_cached", ({ detail }) => detail.nodes.forEach((id) => {
    reached.add(String(id));
    restore(nodeOf(id));
  }));
  api.addEventListener("executing", ({ detail }) => {          // of a node's id, or of nothing once the prompt has ended
    const node = detail && nodeOf(detail);
    if (before.has(node)) textOf(node).value = text("node_starts");
    if (!detail) isRunning = false;
  });
  api.addEventListener("execution_success", () => endWaiting(true));
  for (const type of ["execution_error", "execution_interrupted"]) api.addEventListener(type, () => endWaiting(false));
  api.addEventListener("progress_text", ({ detail }) => reached.add(String(detail.nodeId)));
  api.addEventListener("execution_interrupted", ({ detail }) => {
    set({ state: "cancelled", error: "", prompt: detail.prompt_id });
    replaceTexts(text("node_cancelled"), detail.executed);
  });
}

/** Show at once, when Run is pressed, that nodes of the pack wait for their turn. A prompt that is running keeps its texts. */
function wait() {
  if (isRunning) return;
  for (const [, node] of everyNode(app.rootGraph)) {
    if (!SHOWING.includes(node.type) || [2, 4].includes(node.mode)) continue;     // muted or bypassed
    const widget = textOf(node);
    before.set(node, widget.value);
    widget.value = text("node_waits");
    node.setDirtyCanvas(true, true);
  }
}

/** End the prompt. isRestored: whether nodes that still wait get back their texts; otherwise they already have the outcome's. */
export function endWaiting(isRestored) {
  isRunning = false;
  if (isRestored) [...before.keys()].forEach(restore);
  before.clear();
}

/** Give a node that has not run in this prompt its text from the previous one. */
function restore(node) {
  if (!before.has(node)) return;
  textOf(node).value = before.get(node);
  before.delete(node);
  node.setDirtyCanvas(true, true);
}

/** Return the widget with a node's progress text. It is the page's own by name, and wraps lines at words, which the page's does not. */
function textOf(node) {
  const known = node.widgets?.find((widget) => widget.name === PREVIEW);
  if (known) return known;
  const box = element("div", { class: "xdit-text", role: "status" });
  const widget = node.addDOMWidget(PREVIEW, "progressText", box, {
    getValue: () => box.textContent, setValue: (value) => { box.textContent = value; }, getMinHeight: () => MIN_HEIGHT, serialize: false,
  });
  widget.serialize = false;
  node.setSize([node.size[0], Math.max(node.size[1], node.computeSize()[1])]);
  return widget;
}

/** Record that the prompt was rejected and nothing ran. */
export function refused(message) {
  endWaiting(false);
  set({ state: "refused", error: message });
  replaceTexts(text("node_refused"), [], true);
}

function failed({ node_id, prompt_id, executed, exception_message }) {
  const [summary] = headOf(exception_message ?? "");
  if (isOurs(nodeOf(node_id))) api.dispatchCustomEvent("progress_text", { nodeId: node_id, text: text("node_failed", { text: summary }) });
  set({ state: "failed", error: exception_message, prompt: prompt_id });
  replaceTexts(text("node_not_run"), executed);
}

function set(value) {
  outcome = value;
  api.dispatchCustomEvent(CHANGED, value);
}

/** Replace texts that nodes still show from an earlier prompt. executed: ids of the nodes that ran in this prompt. */
function replaceTexts(message, executed = [], all = false) {
  const current = new Set(all ? [] : [...reached, ...executed.map(String)]);
  for (const [id, node] of everyNode(app.rootGraph)) {
    const shown = isOurs(node) && !current.has(id) ? node.widgets?.find((widget) => widget.name === PREVIEW) : null;
    if (shown?.value) {
      shown.value = message;
      node.setDirtyCanvas(true, true);
    }
  }
}

const isOurs = (node) => Boolean(node?.type && (node.type.startsWith("XDiT") || SAMPLERS.includes(node.type)));

function* everyNode(graph, prefix = "") {
  for (const node of graph?.nodes ?? []) {
    yield [`${prefix}${node.id}`, node];
    if (node.subgraph) yield* everyNode(node.subgraph, `${prefix}${node.id}:`);
  }
}

/** Return the node of an execution id: "12", or "65:12" inside a subgraph node. */
export function nodeOf(id) {
  let graph = app.rootGraph, node = null;
  for (const part of String(id).split(":")) {
    node = graph?.getNodeById(part) ?? graph?.getNodeById(Number(part));
    graph = node?.subgraph;
  }
  return node;
}
