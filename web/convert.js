/**
 * Conversion of a workflow to run on all GPUs, and back: pure functions of workflow files. The property `xdit_was` of a converted node stores
 * its original, which is all that converting back needs.
 */

import { placeNextTo, shrink } from "./placing.js";

export const WAS = "xdit_was";
const PACK = "xdit-comfyui";
const INPUT_NODE = -10;                    // ids of a subgraph's input and output nodes in its links
const OUTPUT_NODE = -20;
const [MUTED, BYPASSED] = [2, 4];
const FIELDS = ["id", "origin_id", "origin_slot", "target_id", "target_slot", "type"];        // of a link stored as a list

// Loaders whose files Load xDiT Model can load: the file widget, and the values of weight_dtype that both support.
export const LOADERS = {
  UNETLoader: { file: "unet_name", dtypes: ["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"] },
  UnetLoaderGGUF: { file: "unet_name", dtypes: ["default"] },
  CheckpointLoaderSimple: { file: "ckpt_name", dtypes: ["default"] },
  ImageOnlyCheckpointLoader: { file: "ckpt_name", dtypes: ["default"], stays: true },          // stays for its CLIP vision model and VAE
};
export const SAME_INPUTS = { KSampler: "XDiTParallelSampler", VAEDecode: "XDiTVAEDecode", VAEEncode: "XDiTVAEEncode" };
const VAE_FILES = { VAELoader: "vae_name", CheckpointLoaderSimple: "ckpt_name", ImageOnlyCheckpointLoader: "ckpt_name" };
// Nodes that are not converted when their model is, with the reason shown.
const STAY = {
  KSamplerAdvanced: "as_it_is", SamplerCustom: "as_it_is", SamplerCustomAdvanced: "as_it_is",
  VAEDecodeTiled: "tiled", VAEEncodeTiled: "tiled", VAEEncodeForInpaint: "on_one_device",
};

/**
 * Convert a workflow to run on all GPUs. refusals: the server's answer of check.js: {models, vaes}, each {file: why the workers cannot load it},
 * and nodes, {key of a loader: {by, text}}: why the workers would reject its model's run, because of the node `by`.
 * Returns {workflow, changed, left, stay, already}. changed: number of converted nodes. left: [{id, type, title, inside, reason, ...}] of nodes that
 * have a counterpart in the pack but were not converted; `reason` is a key of texts.js, the other fields are its values. stay: the same for nodes
 * without a counterpart. already: nothing was converted and the workflow already has a Load xDiT Model.
 */
export function toAllGpus(source, refusals = {}) {
  const workflow = structuredClone(source);
  const book = read(workflow);
  const left = [];
  const leave = (place, reason, more) => left.push({ ...called(book, place), reason, ...more });
  const converted = new Set([...everyNode(book)].map(({ node }) => node).filter((node) => node.type === "XDiTLoadModel"));
  const loaders = [];
  for (const place of everyNode(book)) {
    const { node } = place;
    const reason = whyNotLoader(book, place, refusals);
    if (reason) leave(place, ...reason);
    else if (node.type in LOADERS && hasLinks(node.outputs[0])) {
      loaders.push(place);
      converted.add(node);
    }
  }
  const others = [];
  for (const place of everyNode(book)) {
    const { node } = place;
    if (!(node.type in SAME_INPUTS)) continue;
    const reason = node.type === "KSampler" ? whyNotSampler(book, place, converted) : whyNotVae(book, place, converted, refusals.vaes ?? {});
    if (reason) leave(place, ...reason);
    else others.push(place);
  }
  const stay = [...everyNode(book)].filter(({ graph, node }) => whyItStays(book, graph, node, converted))
    .map((place) => ({ ...called(book, place), reason: STAY[place.node.type] }));
  for (const { node } of others) become(node, SAME_INPUTS[node.type]);
  const before = counters(workflow);
  const made = loaders.map((place) => convertLoader(book, place)).filter(Boolean);
  for (const node of made) node.properties[WAS].before = before;
  return { workflow, changed: loaders.length + others.length, left, stay, already: !made.length && !loaders.length && converted.size > 0 };
}

/** Undo toAllGpus and keep later edits. Returns {workflow, changed, left}. Nodes of the pack that toAllGpus did not make are left to stock.js. */
export function toOneGpu(source) {
  const workflow = structuredClone(source);
  const book = read(workflow);
  const left = [];
  let changed = 0;
  const undone = [];
  for (const place of [...everyNode(book)]) {
    const { graph, node } = place;
    const was = node.properties?.[WAS];
    if (!was || was.of !== undefined) continue;
    const partner = was.split ? graph.nodes.find((other) => other.properties?.[WAS]?.of === node.id) : null;
    const reason = whyNotBack(node, was, partner);
    if (reason) {
      left.push({ ...called(book, place), ...reason });
      continue;
    }
    restore(book, place, was, partner);
    if (partner) undone.push([graph, partner.properties[WAS]]);
    changed++;
  }
  for (const [graph, { groups }] of [...undone].reverse()) shrink(graph, groups);
  if (undone.length) resetCounters(book, undone[0][1].before);
  return { workflow, changed, left };
}

// ---- convertible nodes

function whyNotLoader(book, place, refusals) {
  const { graph, node } = place;
  const isLoader = node.outputs?.some((slot) => slot.type === "MODEL" && hasLinks(slot)) && !book.subgraphs.has(node.type)
    && node.type !== "XDiTLoadModel" && !node.inputs?.some((slot) => carries(slot, null, "MODEL"));
  if (!isLoader) return null;
  if (!(node.type in LOADERS)) return ["no_counterpart"];
  const { dtypes } = LOADERS[node.type];
  if (!Array.isArray(node.widgets_values)) return ["no_counterpart"];
  const [file, dtype = "default"] = node.widgets_values;
  if (!dtypes.includes(dtype)) return ["dtype", { dtype }];
  if (refusals.models?.[file]) return ["file", { text: refusals.models[file] }];
  const splits = node.outputs.slice(1).some(hasLinks);
  if (splits && linkOf(node, LOADERS[node.type].file) == null && isProxied(book, graph, node, LOADERS[node.type].file)) return ["promoted"];
  const refusal = refusals.nodes?.[keyOf(graph === book.root ? undefined : graph.id, node.id)];
  return refusal ? ["patch", refusal] : null;
}

function whyNotSampler(book, { graph, node }, converted) {
  const link = linkOf(node, "model");
  if (link == null) return ["no_model"];
  const other = sources(book, graph, link, "MODEL").find((source) => !converted.has(source));
  return other ? ["model_stays", { by: other.title || other.type }] : null;
}

function whyNotVae(book, { graph, node }, converted, refusals) {
  if (!converted.size) return ["no_model_here"];
  const link = linkOf(node, "vae");
  for (const source of link == null ? [] : sources(book, graph, link, "VAE")) {
    const text = source.type in VAE_FILES && refusals[source.widgets_values?.[0]];
    if (text) return ["file", { text }];
  }
  return null;
}

/** Return whether a node is one of STAY and uses a converted model. */
function whyItStays(book, graph, node, converted) {
  if (!(node.type in STAY) || !isActive(node) || !converted.size) return false;
  if (STAY[node.type] !== "as_it_is") return true;
  const guiders = linkOf(node, "guider") == null ? [node] : sources(book, graph, linkOf(node, "guider"), "GUIDER");
  const links = guiders.map((one) => [book.graphs.find((inner) => inner.nodes.includes(one)), linkOf(one, "model")]).filter(([, link]) => link != null);
  return links.some(([inner, link]) => sources(book, inner, link, "MODEL").some((source) => converted.has(source)));
}

function whyNotBack(node, was, partner) {
  if (was.split && !partner) return { reason: "partner" };
  if (was.split && partner.widgets_values[0] !== node.widgets_values[0]) return { reason: "files_differ", text: partner.widgets_values[0] };
  const loader = partner ?? (node.type === "XDiTLoadModel" ? node : null);
  const dtype = loader?.widgets_values[1] ?? "default";
  return loader && !LOADERS[was.type].dtypes.includes(dtype) ? { reason: "dtype", dtype } : null;
}

// ---- conversion

/** Change a node's type. names: {old slot: new slot}. first: additional slots before the others. */
function become(node, type, names = {}, first = []) {
  const { cnr_id, ver } = node.properties ?? {};
  const was = { type: node.type, inputs: node.inputs ?? [], outputs: node.outputs ?? [], size: node.size, keys: Object.keys(node.properties ?? {}) };
  if (cnr_id !== undefined) Object.assign(was, { cnr_id, ver });
  node.type = type;
  node.inputs = [...first, ...was.inputs.map((slot) => renamed(slot, names[slot.name] ?? slot.name))];
  node.outputs = was.outputs.map((slot) => ({ ...slot }));
  node.properties = { ...node.properties, [WAS]: was };
  if (type === was.type) return was;
  if (cnr_id !== undefined) node.properties.cnr_id = PACK;
  delete node.properties.ver;
  if (cnr_id === undefined && ver !== undefined) was.ver = ver;
  return was;
}

/** Convert a loader. Returns the new Load xDiT Model if the node itself stays for its text encoders and VAE, else undefined. */
function convertLoader(book, { graph, node }) {
  const { file, stays } = LOADERS[node.type];
  const [name, dtype = "default"] = node.widgets_values;
  const parallel = { name: "parallel", type: "XDIT_PARALLEL", shape: 7, link: null };
  if (!node.outputs.slice(1).some(hasLinks)) {
    const was = become(node, "XDiTLoadModel", { [file]: "model_name" }, [parallel]);
    was.widgets = node.widgets_values.length;
    node.outputs = node.outputs.slice(0, 1);
    node.widgets_values = [name, dtype];
    renumber(book, graph, node);
    renameOutside(book, graph, node, file, "model_name");
    return undefined;
  }
  const was = become(node, stays ? node.type : "XDiTLoadClipVae");
  was.split = true;
  const [model, ...rest] = node.outputs;
  node.outputs = stays ? [{ ...model, links: [] }, ...rest] : rest;
  const link = linkOf(node, file);
  const title = node.title && titleOf(node.title, "Load xDiT Model");
  if (title && !stays) [was.title, node.title] = [node.title, titleOf(node.title, "Load CLIP and VAE")];
  const { pos, groups, size, loaderHeight } = placeNextTo(graph, node, [Math.max(270, node.size[0]), 110]);
  node.size = [node.size[0], loaderHeight];
  for (const [index, , after] of groups) graph.groups[index].bounding = after;
  const made = {
    id: nextId(book), type: "XDiTLoadModel", ...(title ? { title } : {}), pos, size, flags: {},
    order: node.order, mode: node.mode,
    inputs: [parallel, { name: "model_name", type: "COMBO", widget: { name: "model_name" }, link: link == null ? null : copyLink(book, graph, link) }],
    outputs: [{ name: "MODEL", type: "MODEL", links: model.links }],
    properties: { "Node name for S&R": "XDiTLoadModel", cnr_id: PACK, [WAS]: { of: node.id, ...(groups.length ? { groups } : {}) } }, widgets_values: [name, "default"],
    ...(node.color === undefined ? {} : { color: node.color }), ...(node.bgcolor === undefined ? {} : { bgcolor: node.bgcolor }),
  };
  graph.nodes.push(made);
  for (const one of [node, made]) renumber(book, graph, one);
  return made;
}

/** Carry a user's addition to a title over to a new name: "Load Checkpoint - REFINER" becomes "Load xDiT Model - REFINER". */
function titleOf(title, name) {
  const suffix = title.replace(/^Load Checkpoint\W*/, "");
  return suffix && `${name} - ${suffix}`;
}

function restore(book, { graph, node }, was, partner) {
  const loader = LOADERS[was.type];
  const names = loader && node.type === "XDiTLoadModel" ? { [loader.file]: "model_name" } : {};
  const restored = was.inputs.map((slot) => ({ ...slot, link: linkOf(node, names[slot.name] ?? slot.name) ?? null }));
  const known = new Set(was.inputs.map((slot) => names[slot.name] ?? slot.name));
  const back = Object.fromEntries(Object.entries(names).map(([from, to]) => [to, from]));
  const gained = node.inputs.filter((slot) => !known.has(slot.name) && slot.link != null);
  for (const slot of gained) if (slot.name === "parallel") removeLink(book, graph, slot.link);
  const outputs = partner ? [partner.outputs[0], ...(loader.stays ? node.outputs.slice(1) : node.outputs)] : node.outputs;
  if (names[loader?.file]) renameOutside(book, graph, node, "model_name", loader.file);
  node.type = was.type;
  if (was.title && node.title === titleOf(was.title, "Load CLIP and VAE")) node.title = was.title;
  node.size = was.size;                    // the page enlarges nodes of the pack for their extra slots
  node.inputs = [...restored, ...gained.filter((slot) => slot.name !== "parallel").map((slot) => renamed(slot, back[slot.name] ?? slot.name))];
  node.outputs = was.outputs.map((slot, index) => ({ ...slot, links: sameLinks(slot.links, outputs[index]?.links) }));
  if (was.widgets) node.widgets_values = node.widgets_values.slice(0, was.widgets);
  const { [WAS]: _, ...properties } = node.properties;
  const all = { ...properties, ...pick(was, "cnr_id", "ver") };
  node.properties = pick(all, ...(was.keys ?? []), ...Object.keys(all));                      // in their original order
  if (partner) {
    for (const slot of partner.inputs) if (slot.link != null) removeLink(book, graph, slot.link);
    graph.nodes.splice(graph.nodes.indexOf(partner), 1);
  }
  renumber(book, graph, node);
}

export function renamed(slot, name) {
  if (slot.name === name) return { ...slot };
  const { localized_name, ...rest } = slot;
  return { ...rest, name, ...(slot.widget ? { widget: { ...slot.widget, name } } : {}) };
}

/** Update the slot numbers in a node's links. */
export function renumber(book, graph, node) {
  node.inputs?.forEach((slot, index) => {
    write(linksOf(book, graph).get(slot.link), { target_id: node.id, target_slot: index });
  });
  node.outputs?.forEach((slot, index) => {
    for (const id of slot.links ?? []) write(linksOf(book, graph).get(id), { origin_id: node.id, origin_slot: index });
  });
}

/** Rename a widget where a subgraph node or the app mode shows it. */
export function renameOutside(book, graph, node, from, to) {
  if (graph === book.root) {
    const inputs = graph.extra?.linearData?.inputs;
    for (const entry of inputs ?? []) {
      if (String(entry[0]) === String(node.id) && entry[1] === from) entry[1] = to;
      if (entry[0] === `${graph.id}:${node.id}:${from}`) [entry[0], entry[1]] = [`${graph.id}:${node.id}:${to}`, to];
    }
    return;
  }
  for (const { node: instance } of book.instances.get(graph.id) ?? [])
    for (const entry of instance.properties?.proxyWidgets ?? [])
      if (String(entry[0]) === String(node.id) && entry[1] === from) entry[1] = to;
}

function isProxied(book, graph, node, name) {
  return (book.instances.get(graph.id) ?? []).some(({ node: instance }) =>
    instance.properties?.proxyWidgets?.some((entry) => String(entry[0]) === String(node.id) && entry[1] === name));
}

/** Add a second link from the same origin; returns its id. renumber sets its target. */
function copyLink(book, graph, id) {
  const links = linksOf(book, graph);
  const copy = structuredClone(links.get(id));
  const own = counter(graph).link + 1;
  write(copy, { id: own });
  setCounter(graph, { link: own });
  graph.links.push(copy);
  links.set(own, copy);
  for (const list of linkLists(graph, copy)) list.push(own);
  return own;
}

export function removeLink(book, graph, id) {
  const links = linksOf(book, graph);
  const link = links.get(id);
  for (const list of linkLists(graph, link)) list.splice(list.indexOf(id), 1);
  graph.links.splice(graph.links.indexOf(link), 1);
  links.delete(id);
}

/** Return the list of link ids at a link's origin, wrapped in an array; empty if there is none. */
function linkLists(graph, link) {
  const slot = field(link, "origin_slot");
  const list = field(link, "origin_id") === INPUT_NODE ? graph.inputs[slot].linkIds
    : nodeOf(graph, field(link, "origin_id")).outputs[slot].links;
  return list ? [list] : [];
}

function sameLinks(was, links) {
  return was?.length || links?.length ? links ?? [] : was;
}

// ---- reading a workflow

export function read(workflow) {
  const graphs = [workflow, ...(workflow.definitions?.subgraphs ?? [])];
  const subgraphs = new Map(graphs.slice(1).map((graph) => [graph.id, graph]));
  const instances = new Map();
  for (const graph of graphs)
    for (const node of graph.nodes)
      if (subgraphs.has(node.type)) instances.set(node.type, [...(instances.get(node.type) ?? []), { graph, node }]);
  return { root: workflow, graphs, subgraphs, instances, links: new Map() };
}

/** Identify a node among those of all graphs of a workflow. subgraph: id of its definition; undefined in the root graph. */
export const keyOf = (subgraph, id) => `${subgraph ?? ""}:${id}`;

/** Identify a node for a message; inside: the name of its subgraph, if any. */
export function called(book, { graph, node }) {
  return { id: node.id, type: node.type, title: node.title, inside: graph === book.root ? undefined : graph.name };
}

export function* everyNode(book) {
  for (const graph of book.graphs) for (const node of graph.nodes) yield { graph, node };
}

function linksOf(book, graph) {
  if (!book.links.has(graph)) book.links.set(graph, new Map(graph.links.map((link) => [field(link, "id"), link])));
  return book.links.get(graph);
}

const nodeOf = (graph, id) => graph.nodes.find((node) => String(node.id) === String(id));
export const linkOf = (node, name) => node.inputs?.find((slot) => slot.name === name)?.link;
export const hasLinks = (slot) => Boolean(slot?.links?.length);
const isActive = (node) => ![MUTED, BYPASSED].includes(node.mode);
const field = (link, name) => (Array.isArray(link) ? link[FIELDS.indexOf(name)] : link[name]);
const carries = (slot, link, type) => [type, "*"].includes(slot.type) || (link != null && field(link, "type") === type);
const pick = (object, ...names) => Object.fromEntries(names.filter((name) => object[name] !== undefined).map((name) => [name, object[name]]));

function write(link, values) {
  if (!link) return;                       // files from older frontends refer to missing links
  for (const [name, value] of Object.entries(values)) link[Array.isArray(link) ? FIELDS.indexOf(name) : name] = value;
}

/** Call visit(graph, node, isSource) for all nodes upstream of a link: through reroutes, nodes that pass on the type, and subgraphs. */
function walkUp(book, graph, id, type, visit, seen = new Set()) {
  const link = linksOf(book, graph).get(id);
  if (!link || seen.has(link)) return;
  seen.add(link);
  const slot = field(link, "origin_slot");
  if (field(link, "origin_id") === INPUT_NODE) {
    for (const { graph: outer, node } of book.instances.get(graph.id) ?? [])
      if (linkOf(node, graph.inputs[slot].name) != null) walkUp(book, outer, linkOf(node, graph.inputs[slot].name), type, visit, seen);
    return;
  }
  const node = nodeOf(graph, field(link, "origin_id"));
  const inner = node && book.subgraphs.get(node.type);
  if (inner) for (const inside of inner.outputs[slot]?.linkIds ?? []) walkUp(book, inner, inside, type, visit, seen);
  if (!node || inner) return;
  const before = (node.inputs ?? []).filter((input) => input.link != null && carries(input, linksOf(book, graph).get(input.link), type));
  visit(graph, node, before.length === 0);
  for (const input of before) walkUp(book, graph, input.link, type, visit, seen);
}

function sources(book, graph, id, type) {
  const found = [];
  walkUp(book, graph, id, type, (inner, node, isFirst) => isFirst && found.push(node));
  return found;
}

// ---- counters for new ids: last_... in the root graph, `state` in subgraphs

function counter(graph) {
  return graph.state ? { node: graph.state.lastNodeId, link: graph.state.lastLinkId } : { node: graph.last_node_id, link: graph.last_link_id };
}

function setCounter(graph, { node = counter(graph).node, link = counter(graph).link }) {
  if (graph.state) Object.assign(graph.state, { lastNodeId: node, lastLinkId: link });
  else Object.assign(graph, { last_node_id: node, last_link_id: link });
}

const counters = (workflow) => read(workflow).graphs.map(counter);

/** Restore the counters from before the conversion, unless ids have been assigned since. */
function resetCounters(book, before) {
  const isOlder = (ids, name) => Math.max(0, ...ids.map(Number).filter(Number.isFinite)) <= Math.max(...before.map((values) => values[name] ?? 0));
  const nodes = [...everyNode(book)].map(({ node }) => node.id);
  const links = book.graphs.flatMap((graph) => graph.links.map((link) => field(link, "id")));
  if (before.length === book.graphs.length && isOlder(nodes, "node") && isOlder(links, "link"))
    book.graphs.forEach((graph, index) => setCounter(graph, before[index]));
}

/** Return a node id that is new in all graphs of the workflow. */
function nextId(book) {
  const ids = [...everyNode(book)].map(({ node }) => Number(node.id)).filter(Number.isFinite);
  const id = Math.max(...ids, ...book.graphs.map((graph) => counter(graph).node ?? 0)) + 1;
  for (const graph of book.graphs) if (graph === book.root || graph.state) setCounter(graph, { node: id });
  return id;
}
