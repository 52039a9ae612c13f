/** Turns our own templates into stock workflows; prints what came of each for test_convert.py. Arguments: stock.js, convert.js, folder. */

import fs from "node:fs";
import path from "node:path";

const { toStock } = await import(process.argv[2]);
const { toAllGpus } = await import(process.argv[3]);
const folder = process.argv[4];

const results = {};
for (const name of fs.readdirSync(folder).filter((file) => file.endsWith(".json"))) {
  const given = JSON.parse(fs.readFileSync(path.join(folder, name), "utf8"));
  const before = JSON.stringify(given);
  const { workflow, changed, left } = toStock(given);
  const nodes = new Map(workflow.nodes.map((node) => [node.id, node]));
  const loose = workflow.links.filter(([id, from, output, to, input]) => !nodes.get(from)?.outputs[output]?.links?.includes(id)
    || nodes.get(to)?.inputs[input]?.link !== id);
  const unknown = workflow.nodes.flatMap((node) => [...(node.inputs ?? []).map(({ link }) => link), ...(node.outputs ?? []).flatMap(({ links }) => links ?? [])])
    .filter((link) => link != null && !workflow.links.some(([id]) => id === link));
  results[path.parse(name).name] = { workflow, changed, left, loose, unknown, kept: JSON.stringify(given) === before,
    again: toStock(workflow).changed, back: toAllGpus(workflow).changed };
}
console.log(JSON.stringify(results));
