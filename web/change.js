/**
 * Change of a node into its counterpart, in place, and back. Its property `xdit_was` stores its original; nodes that were added for it have `of`, its id.
 * A change: {type, slots: {old input: new one, or null}, first: inputs before the others, named: {widget: value} of the new node (absent: the widgets
 * stay), from: {new widget: the original's}, names: of the original's widgets, outputs: indices of the original's outputs (undefined: a new one; absent:
 * all), titles: their new names, types: {old type of slots: new one}, adds: nodes to add, see addNode(), dropped: settings without effect}.
 */

import { idleWidgets } from "./config.js";
import { addLink, copyLink, linkOf, linksOf, nextId, pick, recordLink, removeLink, renameOutside, renamed, renumber, sameLinks } from "./graph.js";
import { sizeOf, valuesOf, widgetsOf } from "./loaders.js";
import { DTYPES } from "./packs.js";
import { placeNextTo, settle } from "./placing.js";

export const WAS = "xdit_was";
const PACK = "xdit-comfyui", CORE = "comfy-core";
const SOURCE = ["cnr_id", "ver", "aux_id"];                     // properties that say which pack a node is from
export const [LOAD, CONFIG] = ["XDiTLoadModel", "XDiTParallelConfig"];
export const PARALLEL = { name: "parallel", type: "XDIT_PARALLEL", shape: 7, link: null };
// Outputs of the nodes that a conversion adds.
export const OUTPUTS = {
  XDiTLoadModel: ["MODEL"], XDiTLoadClipVae: ["CLIP", "VAE"], CLIPLoader: ["CLIP"], DualCLIPLoader: ["CLIP"], TripleCLIPLoader: ["CLIP"],
  QuadrupleCLIPLoader: ["CLIP"], VAELoader: ["VAE"], CLIPVisionLoader: ["CLIP_VISION"], StyleModelLoader: ["STYLE_MODEL"], RandomNoise: ["NOISE"],
  XDiTParallelConfig: ["XDIT_PARALLEL"],
};

/** Return the entries of an outcome for settings that have no effect on all GPUs. */
export const droppedSettings = (settings) => (settings?.length ? { reason: "settings", text: settings.join(", ") } : {});

/** Return what restore() needs of a node: its slots, size, properties and widgets. */
export function snapshot(node) {
  const { inputs, outputs, size, pos } = structuredClone({ inputs: node.inputs, outputs: node.outputs, size: node.size, pos: node.pos });
  const { properties } = node;
  return { type: node.type, inputs, outputs, size, pos, keys: properties && Object.keys(properties), ...pick(properties ?? {}, ...SOURCE), links: [] };
}

/** Change a node in place and add the nodes that the change needs. Returns these. change.was: its snapshot, if it was taken before. */
export function apply(book, { graph, node }, change) {
  const { definitions } = book, was = change.was ?? snapshot(node);
  const { type, slots = {}, types = {}, titles = [] } = change;
  node.type = type;
  node.properties = { ...node.properties, [WAS]: was };
  if (type !== was.type) {
    if (was.cnr_id !== undefined) node.properties.cnr_id = type.startsWith("XDiT") ? PACK : CORE;
    delete node.properties.ver;
    delete node.properties.aux_id;
  }
  if (change.named) {
    const order = widgetsOf(definitions, type, change.named);
    Object.assign(was, { values: structuredClone(node.widgets_values), ...mapped(change, order) });
    was.now = valuesOf(definitions, type, change.named);
    node.widgets_values = [...was.now];
    const widgets = new Set(order);
    for (const slot of node.inputs ?? [])
      if (slot.widget && slot.link != null && !widgets.has(slots[slot.name] ?? slot.name)) {
        recordLink(book, graph, slot.link, was.links, true);
        removeLink(book, graph, slot.link);
      }
    node.inputs = (node.inputs ?? []).filter((slot) => !slot.widget || widgets.has(slots[slot.name] ?? slot.name));
  }
  const turned = (slot, name = slot.name) => ({ ...renamed(slot, name), ...(types[slot.type] ? { type: types[slot.type] } : {}) });
  if (node.inputs || change.first) {
    const kept = (node.inputs ?? []).filter((slot) => slots[slot.name] !== null);
    node.inputs = [...structuredClone(change.first ?? []), ...kept.map((slot) => turned(slot, slots[slot.name] ?? slot.name))];
  }
  const outputs = (node.outputs ?? []).map((slot) => ({ ...slot, links: slot.links && [...slot.links] }));
  const taken = (change.adds ?? []).flatMap(({ takes = {} }) => Object.values(takes));
  const added = (name) => ({ ...turned(outputs[0], name), links: null });
  if (change.outputs) node.outputs = change.outputs.map((index, at) => (index === undefined ? added(titles[at]) : turned(outputs[index], titles[at])));
  else if (node.outputs) node.outputs = outputs.map((slot, index) => (taken.includes(index) ? { ...slot, links: [] } : turned(slot)));
  if (change.outputs) was.kept = change.outputs.map((index) => index ?? null);
  if (Object.keys(slots).length) was.slots = slots;
  for (const [from, to] of Object.entries(slots)) if (to !== null) renameOutside(book, graph, node, from, to);
  renumber(book, graph, node);
  fit(book, graph, node);
  const titled = node.title && titleOf(node.title, "Load xDiT Model");
  if (titled && type === "XDiTLoadClipVae") [was.title, node.title] = [node.title, titleOf(node.title, "Load CLIP and VAE")];
  const made = (change.adds ?? []).flatMap((add) => addNode(book, graph, node, { ...add, names: change.names }, outputs, titled));
  if (made.length) was.adds = made.length;
  if (!was.links.length) delete was.links;
  if (isSame(node.pos, was.pos)) delete was.pos;
  else was.pos = [was.pos, node.pos];
  return made;
}

const isSame = (one, other) => JSON.stringify(one) === JSON.stringify(other);

/** Return {same: {index of a new widget: index of the original's}} for a change. */
function mapped({ from = {}, names = [] }, order) {
  const indices = Object.entries(from).map(([to, old]) => [order.indexOf(to), names.indexOf(old)]);
  return { same: Object.fromEntries(indices.filter((pair) => !pair.includes(-1))) };
}

/** Give a node the size that its type needs, at a position where it covers no other node. */
function fit({ definitions }, graph, node) {
  const [width, height] = leastSize(definitions, node);
  if (node.flags?.collapsed || (width <= node.size[0] && height <= node.size[1])) return;
  node.size = [Math.max(width, node.size[0]), Math.max(height, node.size[1])];
  node.pos = settle(graph, node);
}

function leastSize(definitions, node) {
  return sizeOf(definitions, node.type, node.outputs?.length ?? 0, node.type === CONFIG ? idleSettings(definitions, node.widgets_values) : []);
}

function idleSettings(definitions, values) {
  const named = (list) => Object.fromEntries(widgetsOf(definitions, CONFIG, {}).map((name, index) => [name, list[index]]));
  return idleWidgets(named(values), named(valuesOf(definitions, CONFIG, {})));
}

/**
 * Add a node next to another. Returns it, and the nodes that it needs. add: {type, named, from, names: as in a change, takes: {its output: output of the
 * other whose links it takes}, feeds: the input that it is linked to, file: the other's widget whose link it shares, adds}. outputs: the other's before.
 */
function addNode(book, graph, node, { type, named, from, names, takes = {}, feeds, file, adds = [] }, outputs, title) {
  const { definitions } = book, order = widgetsOf(definitions, type, named), values = valuesOf(definitions, type, named);
  const link = file && linkOf(node, file), load = type === LOAD;
  const hidden = type === CONFIG ? idleSettings(definitions, values) : [];
  const height = load ? 110 : sizeOf(definitions, type, OUTPUTS[type].length, hidden)[1] || 60 + 24 * values.length;
  const { pos, groups, size, loaderHeight } = placeNextTo(graph, node, [Math.max(270, node.size[0]), height], leastSize(definitions, node)[1] || undefined);
  node.size = [node.size[0], loaderHeight];
  for (const [index, , after] of groups) graph.groups[index].bounding = after;
  const made = {
    id: nextId(book), type, ...(title && load ? { title } : {}), pos, size, flags: {}, order: node.order, mode: node.mode,
    inputs: load ? [{ ...PARALLEL }, { name: "model_name", type: "COMBO", widget: { name: "model_name" }, link: link == null ? null : copyLink(book, graph, link) }]
      : [],
    outputs: OUTPUTS[type].map((kind, index) => ({ name: kind, type: kind, links: takes[index] === undefined ? null : outputs[takes[index]].links })),
    properties: { "Node name for S&R": type, cnr_id: type.startsWith("XDiT") ? PACK : CORE,
      [WAS]: { of: node.id, now: values, takes, ...mapped({ from, names }, order), ...(groups.length ? { groups } : {}) } },
    widgets_values: [...values], ...pick(node, "color", "bgcolor"),
  };
  graph.nodes.push(made);
  if (feeds) addLink(book, graph, made, 0, node, feeds);
  for (const one of [node, made]) renumber(book, graph, one);
  const more = adds.flatMap((add) => addNode(book, graph, made, add, outputs));
  for (const one of more) one.properties[WAS].of = node.id;
  return [made, ...more];
}

/** Carry a user's addition to a title over to a new name: "Load Checkpoint - REFINER" becomes "Load xDiT Model - REFINER". */
function titleOf(title, name) {
  const suffix = title.replace(/^Load Checkpoint\W*/, "");
  return suffix && `${name} - ${suffix}`;
}

// ---- conversion back

export function whyNotBack(place) {
  const { was, partners } = place;
  if ((was.adds ?? 0) !== partners.length) return { reason: "partner" };
  return valuesBack(place).reason ?? null;
}

/** Return {values} of the original's widgets with later edits of the nodes that replace it, or {reason} if they cannot be carried over. */
function valuesBack({ node, was, partners }) {
  const values = structuredClone(was.values), latest = new Map();
  for (const [one, { now = [], same = {} }] of [[node, was], ...partners.map((partner) => [partner, partner.properties[WAS]])])
    for (const [index, before] of now.entries()) {
      const value = one.widgets_values?.[index], original = same[index];
      const isDtype = one.type === LOAD && index === 1 && value !== before;
      if (isDtype && (original === undefined || !DTYPES.includes(value))) return { reason: { reason: "dtype", dtype: value } };
      if (original === undefined && value !== before && one.type !== CONFIG) return { reason: { reason: "edited" } };
      if (original === undefined) continue;
      if (latest.has(original) && latest.get(original) !== value) return { reason: { reason: "files_differ", text: value } };
      if (!was.now && node.widgets_values?.[original] !== value) return { reason: { reason: "files_differ", text: value } };
      latest.set(original, value);
      if (values && value !== before) values[original] = value;
    }
  return { values };
}

export function restore(book, { graph, node, was, partners }) {
  const slots = was.slots ?? {}, { values } = valuesBack({ node, was, partners });
  const linked = was.outputs?.map(() => null);
  node.outputs?.forEach(({ links }, index) => {
    const original = was.kept ? was.kept[index] : index;
    if (linked && original != null) linked[original] = links;
    else for (const id of [...(links ?? [])]) removeLink(book, graph, id);
  });
  for (const partner of partners) {
    const { takes = {} } = partner.properties[WAS];
    partner.outputs.forEach(({ links }, index) => {
      if (takes[index] !== undefined) linked[takes[index]] = [...(links ?? []), ...(linked[takes[index]] ?? [])];
      else for (const id of [...(links ?? [])]) removeLink(book, graph, id);
    });
    for (const slot of partner.inputs ?? []) if (slot.link != null) removeLink(book, graph, slot.link);
    graph.nodes.splice(graph.nodes.indexOf(partner), 1);
  }
  const known = new Set((was.inputs ?? []).map(({ name }) => slots[name] ?? name));
  const back = Object.fromEntries(Object.entries(slots).map(([from, to]) => [to, from]));
  const gained = (node.inputs ?? []).filter((slot) => !known.has(slot.name) && linksOf(book, graph).has(slot.link));
  for (const slot of gained) if (slot.name === "parallel") removeLink(book, graph, slot.link);
  for (const [from, to] of Object.entries(slots)) if (to !== null) renameOutside(book, graph, node, to, from);
  const linkNow = ({ name }) => (slots[name] === null ? null : linkOf(node, slots[name] ?? name) ?? null);
  const inputs = [...(was.inputs ?? []).map((slot) => relinked(slot, "link", linkNow(slot))),
    ...gained.filter((slot) => slot.name !== "parallel").map((slot) => renamed(slot, back[slot.name] ?? slot.name))];
  if (was.title && node.title === titleOf(was.title, "Load CLIP and VAE")) node.title = was.title;
  node.type = was.type;
  node.size = was.size;                    // the page enlarges nodes of the pack for their extra slots
  if (was.pos && isSame(node.pos, was.pos[1])) node.pos = was.pos[0];
  if (was.inputs || inputs.length) node.inputs = inputs;
  else delete node.inputs;
  if (was.outputs) node.outputs = was.outputs.map((slot, index) => relinked(slot, "links", sameLinks(slot.links, linked[index])));
  else delete node.outputs;
  if (was.now) node.widgets_values = values;
  const { [WAS]: _, ...properties } = node.properties, origin = pick(was, ...SOURCE);
  if (was.cnr_id === undefined) delete properties.cnr_id;
  const all = { ...properties, ...origin };
  node.properties = pick(all, ...(was.keys ?? []), ...Object.keys(all));                      // in their original order
  if (!was.keys && !Object.keys(all).length) delete node.properties;
  renumber(book, graph, node);
}

/** Return a slot with its links; without the key if the file had none and there is none now. */
const relinked = (slot, key, value) => (key in slot || value != null ? { ...slot, [key]: value } : slot);
