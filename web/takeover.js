/** Conversion of graphs of raylight, whose nodes exchange types of its own: all nodes that do, or none. The rows of packs.js say what they become. */

import { everyNode, field, hasLinks, linkOf, linksOf, nodeOf, recordLink, removeLink, write } from "./graph.js";
import { LOAD, OUTPUTS, apply, droppedSettings, snapshot } from "./change.js";
import { namesOf } from "./loaders.js";
import { RAYLIGHT, RAY_TYPES } from "./packs.js";

const hasOwnTypes = (node) => [...(node.inputs ?? []), ...(node.outputs ?? [])].some(({ type }) => type in RAY_TYPES);

/** Convert all nodes that exchange raylight's types, or leave all of them if one has no counterpart. Returns the added nodes. */
export function takeOver(book, refusals, report, leave) {
  const places = [...everyNode(book)].filter(({ node }) => hasOwnTypes(node));
  const reasons = new Map(places.map((place) => [place, whyNotTaken(book, place, refusals)]));
  const first = places.find((place) => reasons.get(place));
  if (first) {
    for (const place of places) leave(place, reasons.get(place) ?? ["with", { by: first.node.title || first.node.type }]);
    return [];
  }
  const changes = places.map((place) => [place, rowChange(book, place)]);
  for (const [place, change] of changes) report(place, "converted", { to: change.type, ...droppedSettings(change.dropped) });
  for (const [{ node }, change] of changes) change.was = snapshot(node);
  for (const [{ graph, node }, { was }] of changes) {
    was.taken = true;
    for (const slot of node.outputs ?? []) if (slot.type in RAY_TYPES) for (const id of slot.links ?? []) retype(book, graph, id, was.links);
  }
  for (const [place, { was }] of changes) passThrough(book, place, was.links);
  for (const [place, { was }] of changes) putBehind(book, place, was.links);
  for (const [{ graph, node }, { was, slots }] of changes)
    for (const slot of node.inputs ?? [])
      if (slots[slot.name] === null && slot.link != null) {
        recordLink(book, graph, slot.link, was.links, true);
        removeLink(book, graph, slot.link);
        slot.link = null;
      }
  return changes.flatMap(([place, change]) => apply(book, place, change));
}

function whyNotTaken(book, { graph, node }, refusals) {
  const row = RAYLIGHT[node.type];
  if (!row) return ["no_counterpart"];
  const values = valuesByName(node, book.definitions);
  const name = Object.keys(row.only ?? {}).find((one) => values[one] !== undefined && !row.only[one].includes(values[one]));
  if (name) return ["setting", { name, value: String(values[name]) }];
  if (row.to === LOAD && refusals[values.unet_name]) return ["file", { text: refusals[values.unet_name] }];
  if (row.after && !chainOf(graph, book, node, row.after)) return ["shared_patch"];
  const linked = row.widgets && node.inputs?.find(({ link, widget }) => link != null && widget && !Object.values(row.same ?? {}).includes(widget.name));
  if (linked) return ["input", { name: linked.name }];
  const isLost = Object.entries(row.through ?? {}).some(([index, path]) => hasLinks(node.outputs[index]) && !originOf(book, graph, node, path));
  return isLost ? ["input", { name: row.through[Object.keys(row.through)[0]].at(-1) }] : null;
}

function rowChange(book, { node }) {
  const row = RAYLIGHT[node.type];
  if (row.settings && !book.definitions[row.to]) throw new Error(`the definition of ${row.to} is missing`);
  const values = valuesByName(node, book.definitions), names = rowNames(node, book.definitions);
  const feeds = Object.entries(row.feeds ?? {}).filter(([name]) => !node.inputs?.some((slot) => slot.name === name));
  const inputs = feeds.map(([name, { type }]) => ({ name, type: OUTPUTS[type][0], link: null }));
  const same = row.same && Object.fromEntries(Object.entries(row.same).filter(([, from]) => names.includes(from)));
  const valuesFor = (from) => Object.fromEntries(Object.entries(from).map(([to, old]) => [to, row.as?.[old]?.[values[old]] ?? values[old]]));
  return { type: row.to, names, named: row.settings?.(values) ?? (same && valuesFor(same)), from: same, slots: row.slots ?? {}, first: inputs, types: RAY_TYPES,
    outputs: row.outputs?.map(([, index]) => index), titles: row.outputs?.map(([name]) => name),
    adds: feeds.map(([name, { type, same: from }]) => ({ type, feeds: name, named: valuesFor(from), from })),
    dropped: (row.dropped ?? []).filter((name) => values[name]) };
}

function rowNames(node, definitions) {
  const { widgets, kinds } = RAYLIGHT[node.type] ?? {};
  return namesOf(node, definitions[node.type], widgets, kinds) ?? [];
}

export function valuesByName(node, definitions) {
  return Object.fromEntries(rowNames(node, definitions).map((name, index) => [name, node.widgets_values[index]]));
}

function retype(book, graph, id, records) {
  const link = linksOf(book, graph).get(id);
  if (!link) return;
  recordLink(book, graph, id, records);
  write(link, { type: RAY_TYPES[field(link, "type")] ?? field(link, "type") });
}

/** Return the link that brings what a node passes on: along the path of inputs, from node to node. */
function originOf(book, graph, node, path) {
  let [at, link] = [node, null];
  for (const name of path) {
    link = linksOf(book, graph).get(at && linkOf(at, name));
    at = link && nodeOf(graph, field(link, "origin_id"));
  }
  return at ? link : null;
}

/** Link the users of an output that passes on an input to the input's origin instead. */
function passThrough(book, { graph, node }, records) {
  for (const [index, path] of Object.entries(RAYLIGHT[node.type].through ?? {})) {
    const slot = node.outputs[index];
    if (!hasLinks(slot)) continue;
    const origin = originOf(book, graph, node, path);
    moveLinks(book, graph, slot, field(origin, "origin_id"), field(origin, "origin_slot"), records);
  }
}

function moveLinks(book, graph, slot, id, index, records) {
  const to = nodeOf(graph, id).outputs[index];
  for (const link of slot.links) {
    recordLink(book, graph, link, records);
    write(linksOf(book, graph).get(link), { origin_id: id, origin_slot: index });
  }
  to.links = [...(to.links ?? []), ...slot.links];
  slot.links = [];
}

/** Return the nodes of a chain into an input, the last one first; null if one of them has other users, or is not of a row with `before`. */
function chainOf(graph, book, node, name) {
  const chain = [];
  for (let link = linksOf(book, graph).get(linkOf(node, name)); link; link = linksOf(book, graph).get(inputOf(chain.at(-1))?.link)) {
    const origin = nodeOf(graph, field(link, "origin_id"));
    if (!RAYLIGHT[origin?.type]?.before || origin.outputs[0].links.length !== 1 || chain.includes(origin)) return null;
    chain.push(origin);
  }
  return chain;
}

const inputOf = (node) => node.inputs?.find((slot) => RAYLIGHT[node.type].slots[slot.name] === RAYLIGHT[node.type].before);

/** Move the chain of nodes at a loader's input behind the loader: its first node takes the model, and its last one serves the model's users. */
function putBehind(book, { graph, node }, records) {
  const { after } = RAYLIGHT[node.type];
  const chain = after ? chainOf(graph, book, node, after) : [];
  if (!chain.length) return;
  const slot = node.inputs.find(({ name }) => name === after), [last, first] = [chain[0], chain.at(-1)];
  const id = slot.link, input = inputOf(first);
  last.outputs[0].links = [];
  if (hasLinks(node.outputs[0])) moveLinks(book, graph, node.outputs[0], last.id, 0, records);
  recordLink(book, graph, id, records);
  write(linksOf(book, graph).get(id), { origin_id: node.id, origin_slot: 0, target_id: first.id, target_slot: first.inputs.indexOf(input), type: "MODEL" });
  node.outputs[0].links = [id];
  [slot.link, input.link] = [null, id];
}

/** Return whether a node that was taken over has links of its pack's types that the conversion did not make. */
export function isRewired({ node, was }, taken) {
  const known = new Set(taken.flatMap((place) => (place.was.links ?? []).map(([, , link]) => field(link, "id"))));
  const types = new Set(Object.values(RAY_TYPES)), hasTyped = (was.outputs ?? []).some(({ type }) => type in RAY_TYPES);
  const inputs = (was.inputs ?? []).filter(({ type }) => type in RAY_TYPES).map(({ name }) => linkOf(node, was.slots?.[name] ?? name));
  const outputs = hasTyped ? (node.outputs ?? []).filter(({ type }) => types.has(type)).flatMap(({ links }) => links ?? []) : [];
  return [...inputs, ...outputs].some((id) => id != null && !known.has(id));
}

