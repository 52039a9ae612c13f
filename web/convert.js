/**
 * Conversion of a workflow to run on all GPUs, and back: pure functions of workflow files. change.js has the change of a single node.
 */

import { CONFIG, LOAD, OUTPUTS, PARALLEL, WAS, apply, droppedSettings, restore, whyNotBack } from "./change.js";
import { attachLinks, called, carries, counters, detachLinks, everyNode, hasLinks, isActive, isProxied, keyOf, linkOf, linkPlaces, read, resetCounters, sources,
  walkDown, walkUp } from "./graph.js";
import { choicesOf, loaderOf } from "./loaders.js";
import { ATTENTIONS, DTYPES, LOADERS, OWN_MODELS, PIPELINES, RAYLIGHT, effectOf, partOf } from "./packs.js";
import { shrink } from "./placing.js";
import { isRewired, takeOver, valuesByName } from "./takeover.js";

export const SAME_INPUTS = { KSampler: "XDiTParallelSampler", VAEDecode: "XDiTVAEDecode", VAEEncode: "XDiTVAEEncode",
  ImageUpscaleWithModel: "XDiTUpscaleImage" };
const UPSCALER_FILES = { UpscaleModelLoader: "model_name" };
const VAE_FILES = { VAELoader: "vae_name", CheckpointLoaderSimple: "ckpt_name", ImageOnlyCheckpointLoader: "ckpt_name" };
const REFUSED_OF_PACKS = ["XfuserFluxLoraLoader"];             // nodes that call methods of their own pack's model
// Nodes that are not converted when their model is, with the reason shown.
const STAY = {
  KSamplerAdvanced: "as_it_is", SamplerCustom: "as_it_is", SamplerCustomAdvanced: "as_it_is",
  VAEDecodeTiled: "tiled", VAEEncodeTiled: "tiled", VAEEncodeForInpaint: "on_one_device",
};

/**
 * Convert a workflow to run on all GPUs. refusals: the server's answer of check.js: {models, vaes, upscalers}, each {file: why the workers cannot load it},
 * and nodes, {key of a loader: {by, text}}: why the workers would reject its model's run, because of the node `by`. definitions: {type: definition}
 * of the installed nodes, as /object_info returns them. Returns {workflow, outcomes, changed, left, stay, dropped, already}.
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
    const { reason, change } = loaderChange(book, place, refusals) ?? {};
    if (reason) leave(place, reason);
    if (!change) continue;
    changes.push([place, change]);
    converted.add(place.node);
  }
  for (const place of everyNode(book)) {
    const { node } = place;
    if (!(node.type in SAME_INPUTS)) continue;
    const reason = whyNotSame[node.type](book, place, converted, refusals);
    if (reason) leave(place, reason);
    else changes.push([place, { type: SAME_INPUTS[node.type] }]);
  }
  for (const place of everyNode(book)) {
    const reason = place.node.properties?.[WAS] ? null : whyItStays(book, place.graph, place.node, converted);
    if (reason) report(place, "unchanged", { reason });
  }
  for (const [place, change] of changes) report(place, "converted", { to: change.type, ...droppedSettings(change.dropped) });
  for (const [place, change] of changes) made.push(...apply(book, place, change));
  for (const node of made) node.properties[WAS].before = before;
  const of = (outcome) => outcomes.filter((one) => one.outcome === outcome);
  return { workflow, outcomes, changed: of("converted").length, left: of("named"), stay: of("unchanged"),
    dropped: of("converted").filter(({ reason }) => reason), already: !of("converted").length && hadModel };
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
  const recordsOf = (graph) => restored.filter((place) => place.graph === graph).flatMap(({ was }) => was.links ?? []);
  const records = book.graphs.map((graph) => [graph, detachLinks(book, graph, recordsOf(graph))]);
  for (const place of restored) {
    restore(book, place);
    undone.push(...place.partners.map((partner) => [place.graph, partner.properties[WAS]]));
  }
  for (const [graph, links] of records) attachLinks(book, graph, links);
  for (const [graph, { groups }] of [...undone].reverse()) shrink(graph, groups);
  if (undone.length) resetCounters(book, undone[0][1].before);
  return { workflow, changed: restored.length, left };
}

/** Return the files of the loaders that takeOver converts, whose types the server cannot check. */
export function filesToTakeOver(workflow, definitions = {}) {
  const loaders = [...everyNode(read(workflow))].filter(({ node }) => RAYLIGHT[node.type]?.to === LOAD);
  return loaders.map(({ node }) => valuesByName(node, definitions).unet_name).filter((file) => typeof file === "string");
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
  if (refusals.models?.[values[file]]) return { reason: ["file", { text: refusals.models[values[file]] }] };
  const others = names.filter((name) => name !== file);
  const effects = Object.fromEntries(others.map((name) => [name, effectOf(name, values[name], standards[name])]));
  const acting = others.find((name) => effects[name] === "acts");
  if (acting) return { reason: ["setting", { name: acting, value: String(values[acting]) }] };
  const isKept = ({ name, widget }) => (widget && [file, "weight_dtype"].includes(name)) || effects[name] === "placement";
  const linked = node.inputs?.find((slot) => slot.link != null && !isKept(slot));
  const shown = others.find((name) => name !== "weight_dtype" && isProxied(book, graph, node, name));
  if (linked || shown) return { reason: ["input", { name: linked?.name ?? shown }] };
  const rest = node.outputs.map((slot, index) => (index !== at && hasLinks(slot) ? index : -1)).filter((index) => index >= 0);
  if (rest.length && linkOf(node, file) == null && isProxied(book, graph, node, file)) return { reason: ["promoted"] };
  const refusal = refusals.nodes?.[keyOf(graph === book.root ? undefined : graph.id, node.id)];
  let reason = refusal ? ["patch", refusal] : null;
  walkDown(book, graph, node.outputs[at], "MODEL", (inner, user) => {
    if (REFUSED_OF_PACKS.includes(user.type)) reason ??= ["patch", { by: user.title || user.type }];
  });
  return reason ? { reason } : { change: changeOf(book, place, loader, at, rest, others.filter((name) => effects[name] === "placement")) };
}

/** Return the change of a loader: to Load xDiT Model, or with one for its MODEL alone if the rest of its outputs needs another loader. */
function changeOf({ definitions }, { node }, { file, names, values }, at, rest, dropped) {
  const settings = Object.entries(ATTENTIONS).flatMap(([name, kinds]) => (kinds[values[name]] ? [{ attention: kinds[values[name]] }] : []));
  const config = settings.map((named) => ({ type: CONFIG, feeds: "parallel", named }));
  const load = { named: { model_name: values[file], weight_dtype: values.weight_dtype ?? "default" }, from: { model_name: file, weight_dtype: "weight_dtype" } };
  const parts = rest.map((index) => partOf(node.type, node.outputs[index].type, values, (type, widget) => choicesOf(definitions, type, widget)));
  if (parts.every(Boolean))
    return { type: LOAD, first: [PARALLEL], slots: { [file]: "model_name" }, ...load, names, outputs: [at], adds: [...config, ...partsOf(parts, rest)], dropped };
  const model = { type: LOAD, ...load, file, takes: { 0: at }, adds: config };
  const isCheckpoint = file === "ckpt_name" && node.outputs.every(({ type }) => ["MODEL", "CLIP", "VAE"].includes(type));
  if (!isCheckpoint) return { type: node.type, adds: [model], dropped: [] };
  const others = node.outputs.map((_, index) => index).filter((index) => index !== at);
  return { type: "XDiTLoadClipVae", named: { ckpt_name: values[file] }, from: { ckpt_name: file }, names, outputs: others, adds: [model], dropped };
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

function whyNotVae(book, place, converted, { vaes = {} }) {
  return converted.size ? whyNotFile(book, place, "vae", "VAE", VAE_FILES, vaes) : ["no_model_here"];
}

/** A workflow that only upscales is converted too. */
function whyNotUpscaler(book, place, converted, { upscalers = {} }) {
  return whyNotFile(book, place, "upscale_model", "UPSCALE_MODEL", UPSCALER_FILES, upscalers);
}

/** Return why the workers cannot load the file that an input of this type comes from; null if they can. */
function whyNotFile(book, { graph, node }, input, type, loaders, refused) {
  const link = linkOf(node, input);
  for (const source of link == null ? [] : sources(book, graph, link, type)) {
    const text = source.type in loaders && refused[source.widgets_values?.[0]];
    if (text) return ["file", { text }];
  }
  return null;
}

const whyNotSame = { KSampler: whyNotSampler, VAEDecode: whyNotVae, VAEEncode: whyNotVae, ImageUpscaleWithModel: whyNotUpscaler };

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

