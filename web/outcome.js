/**
 * What became of the last prompt where that is not what the workers say: it was refused, failed before they sampled, or was cancelled. Told on the
 * nodes, in the place of what they said of the prompt before, and in the panel (panel.js). Used by errors.js.
 */

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { headOf } from "./messages.js";
import { say } from "./texts.js";
import { translated } from "./translate.js";

const PREVIEW = "$$node-text-preview";     // ComfyUI's widget for what a node says while it runs
const SAMPLERS = ["KSampler", "KSamplerAdvanced", "SamplerCustom", "SamplerCustomAdvanced"];
const OURS = "xDiT.";                      // what the classes of our errors are called after
const CHANGED = "xdit.outcome";
const language = () => app.extensionManager.setting.get("Comfy.Locale");
const text = (key, values) => say(language(), key, values);

let outcome = null;
let reached = new Set();                   // ids of nodes that said something in this prompt, or whose result is kept

/** {state: "refused", "failed" or "cancelled", error, prompt} of the last prompt, or null. prompt: ComfyUI's id, undefined of one that was refused. */
export const lastOutcome = () => outcome;

/** Call a function when the outcome changes. Returns how to end that. */
export function onOutcome(listener) {
  api.addEventListener(CHANGED, listener);
  return () => api.removeEventListener(CHANGED, listener);
}

/** Called as an error comes in, before the page has ended the prompt: a node that runs still takes a text then. */
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
    retell(text("node_cancelled"), detail.executed);
  });
}

/** Nothing of the prompt ran. */
export function refused(message) {
  set({ state: "refused", error: message });
  retell(text("node_refused"), [], true);
}

function failed({ node_id, prompt_id, executed, exception_message }) {
  const [words] = headOf(exception_message ?? "");
  if (isOurs(nodeOf(node_id))) api.dispatchCustomEvent("progress_text", { nodeId: node_id, text: text("node_failed", { text: words }) });
  set({ state: "failed", error: exception_message, prompt: prompt_id });
  retell(text("node_not_run"), executed);
}

function set(value) {
  outcome = value;
  api.dispatchCustomEvent(CHANGED, value);
}

/** What nodes of ours still say of an earlier prompt is of that one. executed: ids of nodes that have run in this one. */
function retell(words, executed = [], all = false) {
  const kept = new Set(all ? [] : [...reached, ...executed.map(String)]);
  for (const [id, node] of everyNode(app.rootGraph)) {
    const shown = isOurs(node) && !kept.has(id) ? node.widgets?.find((widget) => widget.name === PREVIEW) : null;
    if (shown?.value) {
      shown.value = words;
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

/** The node of an execution id: "12", or "65:12" inside a subgraph's node. */
export function nodeOf(id) {
  let graph = app.rootGraph, node = null;
  for (const part of String(id).split(":")) {
    node = graph?.getNodeById(part) ?? graph?.getNodeById(Number(part));
    graph = node?.subgraph;
  }
  return node;
}
