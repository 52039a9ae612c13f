/**
 * Outcome of the last prompt if the workers do not report it: rejected, failed before sampling, or cancelled. Shown on the nodes, in place of their
 * texts from the previous prompt, and in the panel.
 */

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { headOf } from "./messages.js";
import { say } from "./texts.js";
import { translated } from "./translate.js";

const PREVIEW = "$$node-text-preview";     // ComfyUI's widget for a node's progress text
const SAMPLERS = ["KSampler", "KSamplerAdvanced", "SamplerCustom", "SamplerCustomAdvanced"];
const OURS = "xDiT.";                      // prefix of the pack's exception types
const CHANGED = "xdit.outcome";
const language = () => app.extensionManager.setting.get("Comfy.Locale");
const text = (key, values) => say(language(), key, values);

let outcome = null;
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
    if (type === "progress_text" && isOurs(nodeOf(detail.nodeId))) detail.text = translated(language(), detail.text);
    if (type === "execution_error") {
      if (detail.exception_type?.startsWith(OURS)) detail.exception_message = translated(language(), detail.exception_message);
      failed(detail);
    }
    return dispatch.call(this, type, detail);
  };
  api.addEventListener("execution_start", () => {
    reached = new Set();
    set(null);
  });
  api.addEventListener("execution_cached", ({ detail }) => detail.nodes.forEach((id) => reached.add(String(id))));
  api.addEventListener("progress_text", ({ detail }) => reached.add(String(detail.nodeId)));
  api.addEventListener("execution_interrupted", ({ detail }) => {
    set({ state: "cancelled", error: "", prompt: detail.prompt_id });
    replaceTexts(text("node_cancelled"), detail.executed);
  });
}

/** Record that the prompt was rejected and nothing ran. */
export function refused(message) {
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
