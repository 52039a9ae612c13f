/**
 * Conversion of a workflow to run on all GPUs, and back: pure functions of workflow files. The property `xdit_was` of a converted node stores
 * its original, which is all that converting back needs.
 */

import { idleWidgets } from "./config.js";
import { addLink, attachLinks, called, carries, copyLink, counters, detachLinks, everyNode, field, hasLinks, isActive, isProxied, linkOf, linkPlaces, linksOf, nextId, nodeOf, pick, read,
  recordLink, removeLink, renameOutside, renamed, renumber, resetCounters, sameLinks, sources, walkDown, walkUp, write } from "./graph.js";
import { choicesOf, sizeOf, loaderOf, namesOf, valuesOf, widgetsOf } from "./loaders.js";
import { ATTENTIONS, DTYPES, LOADERS, OWN_MODELS, PIPELINES, RAYLIGHT, RAY_TYPES, effectOf, partOf } from "./packs.js";
import { placeNextTo, settle, shrink } from "./placing.js";

export const WAS = "xdit_was";
const PACK = "xdit-comfyui", CORE = "comfy-core";
const [LOAD, CONFIG] = ["XDiTLoadModel", "XDiTParallelConfig"];
export const SAME_INPUTS = { KSampler: "XDiTParallelSampler", VAEDecode: "XDiTVAEDecode", VAEEncode: "XDiTVAEEncode" };
const VAE_FILES = { VAELoader: "vae_name", CheckpointLoaderSimple: "ckpt_name", ImageOnlyCheckpointLoader: "ckpt_name" };
const PARALLEL = { name: "parallel", type: "XDIT_PARALLEL", shape: 7, link: null };
// Outputs of the nodes that a conversion adds.
const OUTPUTS = { XDiTLoadModel: ["MODEL"], XDiTLoadClipVae: ["CLIP", "VAE"], CLIPLoader: ["CLIP"], DualCLIPLoader: ["CLIP"], TripleCLIPLoader: ["CLIP"], QuadrupleCLIPLoader: ["CLIP"],
  VAELoader: ["VAE"], CLIPVisionLoader: ["CLIP_VISION"], StyleModelLoader: ["STYLE_MODEL"], RandomNoise: ["NOISE"], XDiTParallelConfig: ["XDIT_PARALLEL"] };
// Nodes whose model patches the workers reject (docs/reference/nodes.md); so are those of REFUSED_INPUTS.
export const REFUSED = [
  "RTDETR_detect", "SAM3_Detect", "SUPIRApply", "TomePatchModel", "TrainLoraNode",
];
const REFUSED_OF_PACKS = ["XfuserFluxLoraLoader"];             // calls methods of its own pack's model
// Nodes that are not converted when their model is, with the reason shown.
const STAY = {
  KSamplerAdvanced: "as_it_is", SamplerCustom: "as_it_is", SamplerCustomAdvanced: "as_it_is",
  VAEDecodeTiled: "tiled", VAEEncodeTiled: "tiled", VAEEncodeForInpaint: "on_one_device",
};
// Nodes that make conditioning for unsupported models, or that run such a model themselves: they identify a model whose file is missing.
export const FOR_OTHERS = {
  SAM3_VideoTrack: "SAM 3", SDPoseKeypointExtractor: "SDPose",
};
const REFUSED_INPUTS = ["GLIGEN", "PULIDFLUX"];

/**
 * Convert a workflow to run on all GPUs. refusals: {models, vaes}, each {file: why the workers cannot load it}, as far as known. definitions: {type:
 * definition} of the installed nodes, as /object_info returns them. Returns {workflow, outcomes, changed, left, stay, dropped, already}.
 * outcomes: one for each node that has or needs a counterpart: {id, type, title, inside, outcome, reason, ...}. outcome: "converted" (`to`: the new
 * type), "unchanged" (it works as it is, or on one device), or "named" (why it cannot be converted). `reason` is a key of texts.js, the other fields are
 * its values. changed: number of converted nodes. left, stay: the named and the unchanged ones. dropped: converted ones with settings that have no effect
 * on all GPUs. already: nothing was converted and the workflow already has a Load xDiT Model.
 */
export function toAllGpus(source, refusals = {}, definitions = {}) {
  const workflow = structuredClone(source);
  const book = { ...read(workflow), definitions, recorded: new Set() };
  book.places = linkPlaces(book);
  const outcomes = [], before = counters(workflow);
  const report = (place, outcome, more) => outcomes.push({ ...called(book, place), outcome, ...more });
  const leave = (place, [reason, more]) => report(place, "named", { reason, ...more });
  const hadModel = [...everyNode(book)].some(({ node }) => node.type === LOAD);
  const made = takeOver(book, refusals.models ?? {}, report, leave);
  const converted = new Set([...everyNode(book)].map(({ node }) => node).filter((node) => node.type === LOAD));
  const changes = [];
  for (const place of everyNode(book)) {
    const { reason, change } = loaderChange(book, place, refusals.models ?? {}) ?? {};
    if (reason) leave(place, reason);
    if (!change) continue;
    changes.push([place, change]);
    converted.add(place.node);
  }
  for (const place of everyNode(book)) {
    const { node } = place;
    if (!(node.type in SAME_INPUTS)) continue;
    const reason = node.type === "KSampler" ? whyNotSampler(book, place, converted) : whyNotVae(book, place, converted, refusals.vaes ?? {});
    if (reason) leave(place, reason);
    else changes.push([place, { type: SAME_INPUTS[node.type] }]);
  }
  for (const place of everyNode(book)) {
    const reason = place.node.properties?.[WAS] ? null : whyItStays(book, place.graph, place.node, converted);
    if (reason) report(place, "unchanged", { reason });
  }
  for (const [place, change] of changes) report(place, "converted", { to: change.type, ...dropped(change.dropped) });
  for (const [place, change] of changes) made.push(...apply(book, place, change));
  for (const node of made) node.properties[WAS].before = before;
  for (const graph of book.graphs) for (const node of graph.nodes) if (node.properties?.[WAS] && !made.includes(node)) fit(book, graph, node);
  const of = (outcome) => outcomes.filter((one) => one.outcome === outcome);
  return { workflow, outcomes, changed: of("converted").length, left: of("named"), stay: of("unchanged"), dropped: of("converted").filter(({ reason }) => reason),
    already: !of("converted").length && hadModel };
}

/** Undo toAllGpus and keep later edits. Returns {workflow, changed, left}. Nodes of the pack that toAllGpus did not make are left to stock.js. */
export function toOneGpu(source) {
  const workflow = structuredClone(source);
  const book = read(workflow);
  const left = [], undone = [];
  const places = [...everyNode(book)].filter(({ node }) => node.properties?.[WAS] && node.properties[WAS].of === undefined).map((place) => ({ ...place,
    was: place.node.properties[WAS], partners: place.graph.nodes.filter((other) => other.properties?.[WAS]?.of === place.node.id) }));
  const reasons = new Map(places.map((place) => [place, whyNotBack(place)]));
  const taken = places.filter(({ was }) => was.taken);
  const edited = taken.find((place) => reasons.get(place) ?? (isRewired(place, taken) && reasons.set(place, { reason: "edited" })));
  for (const place of edited ? taken : []) if (!reasons.get(place)) reasons.set(place, { reason: "with", by: edited.node.title || edited.node.type });
  const restored = places.filter((place) => !reasons.get(place));
  for (const place of places) if (reasons.get(place)) left.push({ ...called(book, place), ...reasons.get(place) });
  const records = book.graphs.map((graph) => [graph, detachLinks(book, graph, restored.filter((place) => place.graph === graph).flatMap(({ was }) => was.links ?? []))]);
  for (const place of restored) {
    restore(book, place);
    undone.push(...place.partners.map((partner) => [place.graph, partner.properties[WAS]]));
  }
  for (const [graph, links] of records) attachLinks(book, graph, links);
  for (const [graph, { groups }] of [...undone].reverse()) shrink(graph, groups);
  if (undone.length) resetCounters(book, undone[0][1].before);
  return { workflow, changed: restored.length, left };
}

/** Return the files of a workflow's loaders, {models, vaes}, for which toAllGpus needs refusals. */
export function filesOf(workflow, definitions = {}) {
  const files = { models: new Set(), vaes: new Set() };
  const add = (list, file) => typeof file === "string" && list.add(file);
  for (const { node } of everyNode(read(workflow))) {
    const loader = loaderOf(node, definitions);
    if (loader?.file && node.outputs?.some(({ type }) => type === "MODEL")) add(files.models, loader.values[loader.file]);
    if (RAYLIGHT[node.type]?.to === LOAD) add(files.models, valuesByName(node, definitions).unet_name);
    if (node.type in VAE_FILES && Array.isArray(node.widgets_values)) add(files.vaes, node.widgets_values[0]);
  }
  return { models: [...files.models], vaes: [...files.vaes] };
}

// ---- convertible nodes

/** Return how a loader of a model converts, {change} or {reason}; null if the node is none, or unused. */
function loaderChange(book, place, refusals) {
  const { graph, node } = place, { definitions } = book;
  if (book.subgraphs.has(node.type) || node.type === LOAD) return null;
  const own = PIPELINES[node.type] ?? runnerOf(node);
  if (own) return { reason: ["own_model", { by: own }] };
  const at = (node.outputs ?? []).findIndex((slot) => slot.type === "MODEL" && hasLinks(slot));
  if (at < 0 || node.inputs?.some((slot) => carries(slot, null, "MODEL"))) return null;
  const loader = loaderOf(node, definitions);
  if (!loader?.file) return { reason: loader ? ["several_files", loader] : ["no_counterpart"] };
  const { file, names, values, standards } = loader;
  const dtype = values.weight_dtype ?? "default";
  if (!DTYPES.includes(dtype)) return { reason: ["dtype", { dtype }] };
  if (refusals[values[file]]) return { reason: ["file", { text: refusals[values[file]] }] };
  const others = names.filter((name) => name !== file), effects = Object.fromEntries(others.map((name) => [name, effectOf(name, values[name], standards[name])]));
  const acting = others.find((name) => effects[name] === "acts");
  if (acting) return { reason: ["setting", { name: acting, value: String(values[acting]) }] };
  const linked = node.inputs?.find(({ name, link, widget }) => link != null && !(widget && [file, "weight_dtype"].includes(name)) && effects[name] !== "placement");
  if (linked) return { reason: ["input", { name: linked.name }] };
  const rest = node.outputs.map((slot, index) => (index !== at && hasLinks(slot) ? index : -1)).filter((index) => index >= 0);
  if (rest.length && linkOf(node, file) == null && isProxied(book, graph, node, file)) return { reason: ["promoted"] };
  let reason = null;
  walkDown(book, graph, node.outputs[at], "MODEL", (inner, user) => {
    const other = FOR_OTHERS[user.type] ?? inConditioning(book, inner, user, ({ type }) => FOR_OTHERS[type]);
    if (other) reason ??= ["other_model", { model: other }];
    const found = refusedInput(user) ?? ([...REFUSED, ...REFUSED_OF_PACKS].includes(user.type) ? user : null) ?? inConditioning(book, inner, user, refusedInput);
    if (found) reason ??= ["patch", { by: found.title || found.type }];
  });
  return reason ? { reason } : { change: changeOf(book, place, loader, at, rest, others.filter((name) => effects[name] === "placement")) };
}

/** Return the change of a loader: to Load xDiT Model, or with one for its MODEL alone if the rest of its outputs needs another loader. */
function changeOf({ definitions }, { node }, { file, names, values }, at, rest, dropped) {
  const settings = Object.entries(ATTENTIONS).flatMap(([name, kinds]) => (kinds[values[name]] ? [{ attention: kinds[values[name]] }] : []));
  const config = settings.map((named) => ({ type: CONFIG, feeds: "parallel", named }));
  const load = { named: { model_name: values[file], weight_dtype: values.weight_dtype ?? "default" }, from: { model_name: file, ...(names.includes("weight_dtype") ? { weight_dtype: "weight_dtype" } : {}) } };
  const parts = rest.map((index) => partOf(node.type, node.outputs[index].type, values, (type, widget) => choicesOf(definitions, type, widget)));
  if (parts.every(Boolean)) return { type: LOAD, first: [PARALLEL], slots: { [file]: "model_name" }, ...load, names, outputs: [at], dropped, adds: [...config, ...partsOf(parts, rest)] };
  const model = { type: LOAD, ...load, file, takes: { 0: at }, adds: config };
  const isCheckpoint = file === "ckpt_name" && node.outputs.every(({ type }) => ["MODEL", "CLIP", "VAE"].includes(type));
  if (!isCheckpoint) return { type: node.type, adds: [model], dropped: [] };
  return { type: "XDiTLoadClipVae", named: { ckpt_name: values[file] }, from: { ckpt_name: file }, names, outputs: node.outputs.map((_, index) => index).filter((index) => index !== at),
    adds: [model], dropped };
}

/** Return the nodes to add for the parts of a loader, with the outputs at these indices; one node for both outputs of a checkpoint. */
function partsOf(parts, indices) {
  const adds = new Map();
  parts.forEach(({ type, output, values, same }, order) => {
    const add = adds.get(type) ?? { type, named: values, from: same, takes: {} };
    add.takes[OUTPUTS[type].indexOf(output)] = indices[order];
    adds.set(type, add);
  });
  return [...adds.values()];
}

/** Return the pack whose model class a node outputs and runs itself, if any. */
function runnerOf(node) {
  const slot = node.outputs?.find(({ type }) => type in OWN_MODELS);
  return slot && hasLinks(slot) && !node.inputs?.some(({ type }) => type === slot.type) ? OWN_MODELS[slot.type] : null;
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

/** Return why a node that uses a converted model, or that another pack places, stays as it is; null if it is neither. */
function whyItStays(book, graph, node, converted) {
  if (!isActive(node) || !converted.size) return null;
  if (/MultiGPU$/.test(node.type) && !converted.has(node) && !(node.type in LOADERS)) return "placed";
  if (!(node.type in STAY)) return null;
  if (STAY[node.type] !== "as_it_is") return STAY[node.type];
  const guiders = linkOf(node, "guider") == null ? [node] : sources(book, graph, linkOf(node, "guider"), "GUIDER");
  const links = guiders.map((one) => [book.graphs.find((inner) => inner.nodes.includes(one)), linkOf(one, "model")]).filter(([, link]) => link != null);
  return links.some(([inner, link]) => sources(book, inner, link, "MODEL").some((source) => converted.has(source))) ? STAY[node.type] : null;
}

function refusedInput(node) {
  return node.inputs?.some((slot) => REFUSED_INPUTS.includes(slot.type) && slot.link != null) ? node : null;
}

/** Return the first result of find(node) among the active nodes upstream of a node's conditioning inputs. */
function inConditioning(book, graph, node, find) {
  let found = null;
  for (const slot of node.inputs ?? [])
    if (slot.type === "CONDITIONING" && slot.link != null)
      walkUp(book, graph, slot.link, "CONDITIONING", (inner, source) => {
        if (isActive(source)) found ??= find(source);
      });
  return found;
}

const dropped = (settings) => (settings?.length ? { reason: "settings", text: settings.join(", ") } : {});

// ---- graphs of packs with types of their own (raylight)

const hasOwnTypes = (node) => [...(node.inputs ?? []), ...(node.outputs ?? [])].some(({ type }) => type in RAY_TYPES);

/** Convert all nodes that exchange raylight's types, or leave all of them if one has no counterpart. Returns the added nodes. */
function takeOver(book, refusals, report, leave) {
  const places = [...everyNode(book)].filter(({ node }) => hasOwnTypes(node));
  const reasons = new Map(places.map((place) => [place, whyNotTaken(book, place, refusals)]));
  const first = places.find((place) => reasons.get(place));
  if (first) {
    for (const place of places) leave(place, reasons.get(place) ?? ["with", { by: first.node.title || first.node.type }]);
    return [];
  }
  const changes = places.map((place) => [place, rowChange(book, place)]);
  for (const [place, change] of changes) report(place, "converted", { to: change.type, ...dropped(change.dropped) });
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
  const named = row.settings?.(values) ?? (same && Object.fromEntries(Object.entries(same).map(([to, from]) => [to, row.as?.[from]?.[values[from]] ?? values[from]])));
  return { type: row.to, names, named, from: same, slots: row.slots ?? {}, first: inputs, outputs: row.outputs?.map(([, index]) => index), titles: row.outputs?.map(([name]) => name), types: RAY_TYPES,
    adds: feeds.map(([name, { type, same: from }]) => ({ type, feeds: name, named: Object.fromEntries(Object.entries(from).map(([to, old]) => [to, values[old]])), from })),
    dropped: (row.dropped ?? []).filter((name) => values[name]) };
}

const rowNames = (node, definitions) => namesOf(node, definitions[node.type], RAYLIGHT[node.type]?.widgets, RAYLIGHT[node.type]?.kinds) ?? [];

function valuesByName(node, definitions) {
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
function isRewired({ node, was }, taken) {
  const known = new Set(taken.flatMap((place) => (place.was.links ?? []).map(([, , link]) => field(link, "id"))));
  const types = new Set(Object.values(RAY_TYPES));
  const inputs = (was.inputs ?? []).filter(({ type }) => type in RAY_TYPES).map(({ name }) => linkOf(node, was.slots?.[name] ?? name));
  const outputs = (was.outputs ?? []).filter(({ type }) => type in RAY_TYPES).length ? (node.outputs ?? []).filter(({ type }) => types.has(type)).flatMap(({ links }) => links ?? []) : [];
  return [...inputs, ...outputs].some((id) => id != null && !known.has(id));
}

// ---- conversion

/** Return what restore() needs of a node: its slots, size, properties and widgets. */
function snapshot(node) {
  const { inputs, outputs, size, pos } = structuredClone({ inputs: node.inputs, outputs: node.outputs, size: node.size, pos: node.pos });
  return { type: node.type, inputs, outputs, size, pos, keys: node.properties && Object.keys(node.properties), ...pick(node.properties ?? {}, "cnr_id", "ver", "aux_id"), links: [] };
}

/**
 * Convert a node in place and add the nodes that the change needs. Returns these. A change: {type, slots: {old input: new one, or null}, first: inputs
 * before the others, named: {widget: value} of the new node (absent: the widgets stay), from: {new widget: the original's widget}, names: those of
 * the original's, outputs: indices of the original's (undefined: a new one; absent: all), titles: new names of these, types: {old type of slots: new one}, adds}.
 */
function apply(book, { graph, node }, change) {
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
  const turned = (slot, name = slot.name) => (types[slot.type] ? { ...renamed(slot, name), type: types[slot.type] } : renamed(slot, name));
  if (node.inputs || change.first)
    node.inputs = [...structuredClone(change.first ?? []), ...(node.inputs ?? []).filter((slot) => slots[slot.name] !== null).map((slot) => turned(slot, slots[slot.name] ?? slot.name))];
  const model = change.outputs ? null : Object.values(change.adds?.find(({ takes }) => takes)?.takes ?? {})[0];
  const outputs = (node.outputs ?? []).map((slot) => ({ ...slot, links: slot.links && [...slot.links] }));
  if (node.outputs)
    node.outputs = change.outputs ? change.outputs.map((index, at) => (index === undefined ? { ...turned(outputs[0]), name: titles[at], links: null } : turned(outputs[index], titles[at])))
      : outputs.map((slot, index) => (index === model ? { ...slot, links: [] } : turned(slot)));
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
  return { same: Object.fromEntries(Object.entries(from).map(([to, old]) => [order.indexOf(to), names.indexOf(old)]).filter(([to, old]) => to >= 0 && old >= 0)) };
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
    inputs: load ? [structuredClone(PARALLEL), { name: "model_name", type: "COMBO", widget: { name: "model_name" }, link: link == null ? null : copyLink(book, graph, link) }] : [],
    outputs: OUTPUTS[type].map((kind, index) => ({ name: kind, type: kind, links: takes[index] === undefined ? null : outputs[takes[index]].links })),
    properties: { "Node name for S&R": type, cnr_id: type.startsWith("XDiT") ? PACK : CORE,
      [WAS]: { of: node.id, now: values, ...mapped({ from, names }, order), ...(Object.keys(takes).length ? { takes } : {}), ...(groups.length ? { groups } : {}) } },
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

function whyNotBack(place) {
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
      if (one.type === LOAD && index === 1 && value !== before && !(original !== undefined && DTYPES.includes(value))) return { reason: { reason: "dtype", dtype: value } };
      if (original === undefined && value !== before && one.type !== CONFIG) return { reason: { reason: "edited" } };
      if (original === undefined) continue;
      if (latest.has(original) && latest.get(original) !== value) return { reason: { reason: "files_differ", text: value } };
      if (!was.now && node.widgets_values?.[original] !== value) return { reason: { reason: "files_differ", text: value } };
      latest.set(original, value);
      if (values && value !== before) values[original] = value;
    }
  return { values };
}

function restore(book, { graph, node, was, partners }) {
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
  const known = new Set((was.inputs ?? []).map(({ name }) => slots[name] ?? name)), back = Object.fromEntries(Object.entries(slots).map(([from, to]) => [to, from]));
  const gained = (node.inputs ?? []).filter((slot) => !known.has(slot.name) && linksOf(book, graph).has(slot.link));
  for (const slot of gained) if (slot.name === "parallel") removeLink(book, graph, slot.link);
  for (const [from, to] of Object.entries(slots)) if (to !== null) renameOutside(book, graph, node, to, from);
  const inputs = [...(was.inputs ?? []).map((slot) => relinked(slot, "link", slots[slot.name] === null ? null : linkOf(node, slots[slot.name] ?? slot.name) ?? null)),
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
  const { [WAS]: _, ...properties } = node.properties, origin = pick(was, "cnr_id", "ver", "aux_id");
  if (was.cnr_id === undefined) delete properties.cnr_id;
  const all = { ...properties, ...origin };
  node.properties = pick(all, ...(was.keys ?? []), ...Object.keys(all));                      // in their original order
  if (!was.keys && !Object.keys(all).length) delete node.properties;
  renumber(book, graph, node);
}

/** Return a slot with its links; without the key if the file had none and there is none now. */
const relinked = (slot, key, value) => (key in slot || value != null ? { ...slot, [key]: value } : slot);
