/** Check of the open workflow before its conversion, by the server's code that rejects a run. Pure functions except checkOf. */

import { called, everyNode, keyOf, read } from "./graph.js";

const OURS = "XDiTLoadModel";

/**
 * Request the check of a prompt, {id of a node: {class_type, inputs}}, and of model files that nodes outside of ComfyUI's types load. Returns {models, vaes, upscalers, absent, nodes} as POST /xdit/check does, or
 * {failed: the reason} if the server does not answer.
 */
export async function checkOf(api, prompt, models = []) {
  const bare = Object.fromEntries(Object.entries(prompt).map(([id, { class_type, inputs }]) => [id, { class_type: class_type ?? "", inputs }]));
  const answer = await api.fetchApi("/xdit/check", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ prompt: bare, models }),
  });
  return answer.ok ? answer.json() : { failed: answer.status };
}

/**
 * Turn a check into the refusals of toAllGpus, and name its other nodes. Returns {refusals: {models, vaes, upscalers, nodes}, others: {verdict: nodes}};
 * each of these nodes is {id, type, title, inside}; others.refused, also {reason, by, text}, are loaders of the pack. A node of a subgraph that is used several times is refused if one use is.
 */
export function verdictsOf(workflow, { models, vaes, upscalers = {}, nodes }) {
  const book = read(workflow), refused = {}, ours = [], others = {}, seen = new Set();
  for (const [id, { verdict, by, reason }] of Object.entries(nodes)) {
    const place = placeOf(book, id);
    if (!place) continue;
    const key = keyOf(place.subgraph, place.node.id);
    if (verdict === "refused") refused[key] = { by: named(placeOf(book, by)), text: reason };
    if (verdict === "refused" && place.node.type === OURS) ours.push({ ...named(place), reason: "patch", ...refused[key] });
    if (verdict !== "refused" && !seen.has(key)) (others[verdict] ??= []).push(named(place));
    seen.add(key);
  }
  for (const { graph, node } of everyNode(book)) {
    const text = node.type === OURS && models[node.widgets_values?.[0]];
    if (text) ours.push({ ...called(book, { graph, node }), reason: "file", text });
  }
  return { refusals: { models, vaes, upscalers, nodes: refused }, others: { ...others, refused: ours } };
}

/** Return the place of an execution id, "12", or "65:12" inside a subgraph node; null if it is not a node of the file. */
function placeOf(book, id) {
  let graph = book.root, subgraph, node = null;
  for (const part of String(id).split(":")) {
    [graph, subgraph] = node ? [book.subgraphs.get(node.type), node.type] : [graph, undefined];
    node = graph?.nodes.find((one) => String(one.id) === part);
    if (!node) return null;
  }
  return { node, subgraph, inside: subgraph === undefined ? undefined : graph.name };
}

const named = (place) => place && { id: place.node.id, type: place.node.type, title: place.node.title, inside: place.inside };

/** Return the names of the node types that this page does not know, which ComfyUI would refuse to run. */
export function unknownTypes(workflow, isKnown) {
  const book = read(workflow);
  return [...new Set([...everyNode(book)].map(({ node }) => node.type).filter((type) => !book.subgraphs.has(type) && !isKnown(type)))];
}
