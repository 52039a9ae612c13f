/**
 * Conversion of the pack's nodes to ComfyUI's in workflows that convert.js did not make, such as the pack's templates: a pure function of
 * workflow files.
 */

import { WAS } from "./change.js";
import { SAME_INPUTS } from "./convert.js";
import { called, everyNode, hasLinks, linkOf, read, removeLink, renameOutside, renamed, renumber } from "./graph.js";
import { DTYPES, LOADERS } from "./packs.js";

const STOCK = Object.fromEntries(Object.entries(SAME_INPUTS).map(([type, ours]) => [ours, type]));
const SETTINGS = "XDiTParallelConfig";
const [UNET, GGUF, CHECKPOINT] = ["UNETLoader", "UnetLoaderGGUF", "CheckpointLoaderSimple"];

/**
 * Replace the pack's nodes with ComfyUI's own. files: {checkpoints, models}, the names that ComfyUI's two loaders list.
 * Returns {workflow, changed, left} as convert.js's functions do. xDiT Parallel Config has no equivalent and is removed if nothing uses it.
 */
export function toStock(given, files = {}) {
  const workflow = structuredClone(given);
  const book = read(workflow);
  const left = [];
  let changed = 0;
  const ours = [...everyNode(book)].filter(({ node }) => node.type.startsWith("XDiT") && !node.properties?.[WAS]);
  for (const place of ours.sort(({ node }, { node: other }) => (other.type === "XDiTLoadClipVae") - (node.type === "XDiTLoadClipVae"))) {
    const { graph, node } = place;
    if (node.type === SETTINGS || !graph.nodes.includes(node)) continue;
    const reason = whyNot(node);
    if (reason) {
      left.push({ ...called(book, place), ...reason });
      continue;
    }
    if (node.type in STOCK) turn(book, place, STOCK[node.type]);
    else if (node.type === "XDiTLoadClipVae") changed += turnPair(book, place);
    else turnLoader(book, place, files);
    changed++;
  }
  for (const { graph, node } of ours) {
    if (node.type !== SETTINGS || node.outputs.some(hasLinks)) continue;
    for (const slot of node.inputs ?? []) if (slot.link != null) removeLink(book, graph, slot.link);
    graph.nodes.splice(graph.nodes.indexOf(node), 1);
    changed++;
  }
  return { workflow, changed, left };
}

function whyNot(node) {
  if (node.type in STOCK || node.type === "XDiTLoadClipVae") return null;
  if (node.type !== "XDiTLoadModel") return { reason: "no_stock" };
  const [file, dtype = "default"] = node.widgets_values;
  if (!/\.[a-z]+$/i.test(file)) return { reason: "folder", text: file };
  return DTYPES.includes(dtype) ? null : { reason: "dtype", dtype };
}

/** Change a node's type. names: {slot of the pack's node: ComfyUI's slot}. gone: slots that the new type does not have. */
function turn(book, { graph, node }, type, names = {}, gone = ["parallel"]) {
  for (const slot of node.inputs) if (gone.includes(slot.name) && slot.link != null) removeLink(book, graph, slot.link);
  for (const [from, to] of Object.entries(names)) renameOutside(book, graph, node, from, to);
  const { cnr_id, ver, ...properties } = node.properties ?? {};
  node.inputs = node.inputs.filter((slot) => !gone.includes(slot.name)).map((slot) => renamed(slot, names[slot.name] ?? slot.name));
  node.type = type;
  node.properties = { ...properties, "Node name for S&R": type };
  renumber(book, graph, node);
}

function turnLoader(book, place, { checkpoints = [], models = [] }) {
  const { node } = place;
  const [file, dtype = "default"] = node.widgets_values;
  const listed = node.properties?.models?.find(({ name }) => name === file)?.directory === "checkpoints";
  const isCheckpoint = listed || (checkpoints.includes(file) && !models.includes(file));
  const loader = isCheckpoint && dtype === "default" ? CHECKPOINT : /\.gguf$/i.test(file) ? GGUF : UNET;
  turn(book, place, loader, { model_name: LOADERS[loader][0] }, loader === UNET ? undefined : ["parallel", "weight_dtype"]);
  node.widgets_values = loader === UNET ? [file, dtype] : [file];
  if (loader === CHECKPOINT) node.outputs = [...node.outputs, ...["CLIP", "VAE"].map((name) => ({ name, type: name, links: null }))];
}

/** Merge Load CLIP and VAE and the Load xDiT Model of the same file, if any, into one checkpoint loader. Returns the number of nodes removed. */
function turnPair(book, { graph, node }) {
  const [file] = node.widgets_values;
  const partner = graph.nodes.find((other) => other.type === "XDiTLoadModel" && !other.properties?.[WAS] && other.widgets_values[0] === file
    && (other.widgets_values[1] ?? "default") === "default" && linkOf(other, "model_name") == null);
  const links = partner?.outputs[0].links ?? null;
  if (partner) {
    for (const slot of partner.inputs) if (slot.link != null) removeLink(book, graph, slot.link);
    graph.nodes.splice(graph.nodes.indexOf(partner), 1);
  }
  node.outputs = [{ name: "MODEL", type: "MODEL", links }, ...node.outputs];
  turn(book, { graph, node }, CHECKPOINT);
  return partner ? 1 : 0;
}
