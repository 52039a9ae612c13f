/** Workflow files: reading them, following their links, and editing nodes' slots and links in place. `book` is what read() returns. */

const INPUT_NODE = -10;                    // ids of a subgraph's input and output nodes in its links
const OUTPUT_NODE = -20;
const [MUTED, BYPASSED] = [2, 4];
const FIELDS = ["id", "origin_id", "origin_slot", "target_id", "target_slot", "type"];        // of a link stored as a list

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

export function linksOf(book, graph) {
  if (!book.links.has(graph)) book.links.set(graph, new Map(graph.links.map((link) => [field(link, "id"), link])));
  return book.links.get(graph);
}

export const nodeOf = (graph, id) => graph.nodes.find((node) => String(node.id) === String(id));
export const linkOf = (node, name) => node.inputs?.find((slot) => slot.name === name)?.link;
export const hasLinks = (slot) => Boolean(slot?.links?.length);
export const isActive = (node) => ![MUTED, BYPASSED].includes(node.mode);
export const field = (link, name) => (Array.isArray(link) ? link[FIELDS.indexOf(name)] : link[name]);
export const carries = (slot, link, type) => [type, "*"].includes(slot.type) || (link != null && field(link, "type") === type);
export const pick = (object, ...names) => Object.fromEntries(names.filter((name) => object[name] !== undefined).map((name) => [name, object[name]]));

export function write(link, values) {
  if (!link) return;                       // files from older frontends refer to missing links
  for (const [name, value] of Object.entries(values)) link[Array.isArray(link) ? FIELDS.indexOf(name) : name] = value;
}

/** Call visit(graph, node, isSource) for all nodes upstream of a link: through reroutes, nodes that pass on the type, and subgraphs. */
export function walkUp(book, graph, id, type, visit, seen = new Set()) {
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

export function sources(book, graph, id, type) {
  const found = [];
  walkUp(book, graph, id, type, (inner, node, isFirst) => isFirst && found.push(node));
  return found;
}

/** Call visit(graph, node) for all active nodes downstream of an output slot. */
export function walkDown(book, graph, slot, type, visit, seen = new Set()) {
  for (const id of slot.links ?? slot.linkIds ?? []) {
    const link = linksOf(book, graph).get(id);
    if (!link || seen.has(link)) continue;
    seen.add(link);
    const index = field(link, "target_slot");
    if (field(link, "target_id") === OUTPUT_NODE) {
      for (const { graph: outer, node } of book.instances.get(graph.id) ?? []) walkDown(book, outer, node.outputs[index] ?? {}, type, visit, seen);
      continue;
    }
    const node = nodeOf(graph, field(link, "target_id"));
    const inner = node && book.subgraphs.get(node.type);
    if (inner) {
      const input = inner.inputs.find(({ name }) => name === node.inputs[index]?.name);
      if (input && isActive(node)) walkDown(book, inner, input, type, visit, seen);
    } else if (node && node.mode !== MUTED) {
      if (node.mode !== BYPASSED) visit(graph, node);
      for (const output of node.outputs ?? []) if (carries(output, null, type)) walkDown(book, graph, output, type, visit, seen);
    }
  }
}

// ---- slots and links

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

export function isProxied(book, graph, node, name) {
  return (book.instances.get(graph.id) ?? []).some(({ node: instance }) =>
    instance.properties?.proxyWidgets?.some((entry) => String(entry[0]) === String(node.id) && entry[1] === name));
}

/** Link an output of a node to an input of another one. */
export function addLink(book, graph, from, output, to, name) {
  const index = to.inputs.findIndex((slot) => slot.name === name), id = counter(graph).link + 1;
  const values = [id, from.id, output, to.id, index, from.outputs[output].type];
  const link = graph === book.root && !graph.links.some((one) => !Array.isArray(one)) ? values : Object.fromEntries(FIELDS.map((key, at) => [key, values[at]]));
  setCounter(graph, { link: id });
  graph.links.push(link);
  linksOf(book, graph).set(id, link);
  from.outputs[output].links = [...(from.outputs[output].links ?? []), id];
  to.inputs[index].link = id;
}

/** Add a second link from the same origin; returns its id. renumber sets its target. */
export function copyLink(book, graph, id) {
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
  for (const list of linkLists(graph, link)) if (list.includes(id)) list.splice(list.indexOf(id), 1);
  graph.links.splice(graph.links.indexOf(link), 1);
  links.delete(id);
}

/** Return the list of link ids at a link's origin, wrapped in an array; empty if there is none. */
export function linkLists(graph, link) {
  const slot = field(link, "origin_slot");
  const list = field(link, "origin_id") === INPUT_NODE ? graph.inputs[slot].linkIds
    : nodeOf(graph, field(link, "origin_id"))?.outputs?.[slot]?.links;
  return list ? [list] : [];
}

export function sameLinks(was, links) {
  return was?.length || links?.length ? links ?? [] : was;
}

// ---- counters for new ids: last_... in the root graph, `state` in subgraphs

function counter(graph) {
  return graph.state ? { node: graph.state.lastNodeId, link: graph.state.lastLinkId } : { node: graph.last_node_id, link: graph.last_link_id };
}

function setCounter(graph, { node = counter(graph).node, link = counter(graph).link }) {
  if (graph.state) Object.assign(graph.state, { lastNodeId: node, lastLinkId: link });
  else Object.assign(graph, { last_node_id: node, last_link_id: link });
}

export const counters = (workflow) => read(workflow).graphs.map(counter);

/** Restore the counters from before the conversion, unless ids have been assigned since. */
export function resetCounters(book, before) {
  const isOlder = (ids, name) => Math.max(0, ...ids.map(Number).filter(Number.isFinite)) <= Math.max(...before.map((values) => values[name] ?? 0));
  const nodes = [...everyNode(book)].map(({ node }) => node.id);
  const links = book.graphs.flatMap((graph) => graph.links.map((link) => field(link, "id")));
  if (before.length === book.graphs.length && isOlder(nodes, "node") && isOlder(links, "link"))
    book.graphs.forEach((graph, index) => setCounter(graph, before[index]));
}

/** Return a node id that is new in all graphs of the workflow. */
export function nextId(book) {
  const ids = [...everyNode(book)].map(({ node }) => Number(node.id)).filter(Number.isFinite);
  const id = Math.max(...ids, ...book.graphs.map((graph) => counter(graph).node ?? 0)) + 1;
  for (const graph of book.graphs) if (graph === book.root || graph.state) setCounter(graph, { node: id });
  return id;
}

// ---- links that a conversion changes: recorded as [index in the graph's links, index among its origin's links, link, whether it was removed]

/** Return where each link of a workflow is, before any change: Map of graphs to Maps of ids. */
export function linkPlaces(book) {
  return new Map(book.graphs.map((graph) => [graph, new Map(graph.links.map((link, index) => {
    const [list] = linkLists(graph, link);
    return [field(link, "id"), [index, list ? list.indexOf(field(link, "id")) : -1, structuredClone(link)]];
  }))]));
}

/** Record a link in the list `records` before its first change. Links that the conversion made are not recorded. book.places: from linkPlaces. */
export function recordLink(book, graph, id, records, isRemoved = false) {
  const place = book.places.get(graph).get(id);
  if (!place) return;
  if (isRemoved) place[3] = true;
  if (book.recorded.has(place)) return;
  book.recorded.add(place);
  records.push(place);
}

/** Take recorded links off their present ends. Returns those that the user has not deleted. */
export function detachLinks(book, graph, records) {
  return records.filter(([, , was, isRemoved]) => {
    const id = field(was, "id"), link = linksOf(book, graph).get(id);
    if (!link) return isRemoved;
    for (const list of linkLists(graph, link)) if (list.includes(id)) list.splice(list.indexOf(id), 1);
    const slot = nodeOf(graph, field(link, "target_id"))?.inputs?.find((one) => one.link === id);
    if (slot) slot.link = null;
    return true;
  });
}

/** Put recorded links back to where they were; not those with an end that is gone or occupied. */
export function attachLinks(book, graph, records) {
  const links = linksOf(book, graph);
  for (const [index, , was] of [...records].sort(([one], [other]) => one - other)) {
    const id = field(was, "id"), link = links.get(id), restored = structuredClone(was);
    if (link) graph.links.splice(graph.links.indexOf(link), 1, restored);
    else graph.links.splice(index, 0, restored);
    links.set(id, restored);
  }
  for (const [, position, was] of [...records].sort(([, one], [, other]) => one - other)) {
    const id = field(was, "id"), [slot, target] = [field(was, "target_slot"), nodeOf(graph, field(was, "target_id"))];
    const list = hasOrigin(graph, was) && listAt(graph, was);
    if (!list || (field(was, "target_id") !== OUTPUT_NODE && (!target?.inputs?.[slot] || target.inputs[slot].link != null))) {
      graph.links.splice(graph.links.indexOf(links.get(id)), 1);
      links.delete(id);
      continue;
    }
    if (position >= 0) list.splice(position, 0, id);
    if (target) target.inputs[slot].link = id;
  }
}

const hasOrigin = (graph, link) => field(link, "origin_id") === INPUT_NODE || nodeOf(graph, field(link, "origin_id"))?.outputs?.[field(link, "origin_slot")];

function listAt(graph, link) {
  if (field(link, "origin_id") === INPUT_NODE) return graph.inputs[field(link, "origin_slot")].linkIds;
  const slot = nodeOf(graph, field(link, "origin_id")).outputs[field(link, "origin_slot")];
  slot.links ??= [];
  return slot.links;
}
