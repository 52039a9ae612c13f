/** Converts every workflow of a folder there and back; prints what came of each for test_convert.py. Arguments: convert.js, folder. */

import fs from "node:fs";
import path from "node:path";

const { toAllGpus, toOneGpu } = await import(process.argv[2]);
const folder = process.argv[3];

const isSame = (given, other) => JSON.stringify(given) === JSON.stringify(other);

/** Links whose two ends do not name them at the slot that they say. */
function looseEnds(workflow) {
  const loose = [];
  for (const graph of [workflow, ...(workflow.definitions?.subgraphs ?? [])]) {
    const nodes = new Map(graph.nodes.map((node) => [String(node.id), node]));
    for (const link of graph.links) {
      const [id, from, output, to, input] = Array.isArray(link) ? link
        : [link.id, link.origin_id, link.origin_slot, link.target_id, link.target_slot];
      const begins = from === -10 ? graph.inputs[output]?.linkIds : nodes.get(String(from))?.outputs[output]?.links;
      const ends = to === -20 ? graph.outputs[input]?.linkIds : [nodes.get(String(to))?.inputs[input]?.link];
      if (!begins?.includes(id) || !ends?.includes(id)) loose.push(id);
    }
  }
  return loose.length;
}

/** Widgets that a subgraph's node or the app mode shows by the name of a loader that is ours now. */
function staleNames(workflow) {
  const subgraphs = workflow.definitions?.subgraphs ?? [];
  const graphs = [workflow, ...subgraphs];
  const shown = graphs.flatMap((graph) => graph.nodes).flatMap((node) => (node.properties?.proxyWidgets ?? [])
    .map((entry) => [subgraphs.find(({ id }) => id === node.type), ...entry]));
  const inApp = (workflow.extra?.linearData?.inputs ?? []).map((entry) => [workflow, ...entry]);
  return [...shown, ...inApp].filter(([graph, id, name]) => name === "unet_name"
    && graph?.nodes.some((node) => String(node.id) === String(id) && node.type === "XDiTLoadModel")).length;
}

const boxOf = ({ pos, size }) => [pos[0], pos[1] - 30, size[0], size[1] + 30];
const overlap = (one, other) => one[0] < other[0] + other[2] && other[0] < one[0] + one[2] && one[1] < other[1] + other[3] && other[1] < one[1] + one[3];
const isIn = (one, other) => other[0] <= one[0] && one[0] + one[2] <= other[0] + other[2] && other[1] <= one[1] && one[1] + one[3] <= other[1] + other[3];
const titlesAround = (graph, box) => (graph?.groups ?? []).filter(({ bounding }) => isIn(box, bounding))
  .sort((one, other) => one.bounding[2] * one.bounding[3] - other.bounding[2] * other.bounding[3]).map(({ title }) => title);

/** Nodes that a conversion has made: beside which, in which groups, the smallest first, and what of nodes and groups' titles they cover. */
function madeNodes(workflow, given) {
  const before = [given, ...(given.definitions?.subgraphs ?? [])];
  return [workflow, ...(workflow.definitions?.subgraphs ?? [])].flatMap((graph, index) => graph.nodes.filter(({ properties }) =>
    properties?.xdit_was?.of !== undefined).map((node) => {
    const beside = graph.nodes.find(({ id }) => id === node.properties.xdit_was.of);
    const titles = (graph.groups ?? []).map(({ bounding: [x, y, width] }) => [x, y, width, 36]);
    const others = graph.nodes.filter((other) => other !== node).map(boxOf);
    return { title: node.title, beside: beside.title, groups: titlesAround(graph, boxOf(node)),
      begins: titlesAround(before[index], [...beside.pos, 0, 0]), covers: [...titles, ...others].filter((box) => overlap(boxOf(node), box)).length };
  }));
}

const results = [];
for (const name of fs.readdirSync(folder).filter((file) => file.endsWith(".json")).sort()) {
  const given = JSON.parse(fs.readFileSync(path.join(folder, name), "utf8"));
  if (!given.nodes) continue;
  const before = JSON.stringify(given);
  const { workflow, changed, left, stay } = toAllGpus(given);
  const back = toOneGpu(workflow);
  results.push({
    name, changed, left, stay, made: madeNodes(workflow, given), back: isSame(given, back.workflow) && back.changed === changed, kept: JSON.stringify(given) === before,
    types: [workflow, ...(workflow.definitions?.subgraphs ?? [])].flatMap((graph) => graph.nodes.map((node) => node.type)),
    loose: looseEnds(workflow) - looseEnds(given), stale: staleNames(workflow), again: toAllGpus(workflow).changed,
  });
}
console.log(JSON.stringify(results));
