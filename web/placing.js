/**
 * Where Load xDiT Model goes beside the node that it was split from: in its group, which grows where it has no room, else to its left, over or
 * under it; never over a node or a group's title. Used by convert.js. Boxes are [left, top, width, height] in pixels of the canvas.
 */

const [TITLE, GROUP_TITLE, MARGIN] = [30, 36, 10];             // heights, and what stays free at a group's edge
const LEAST = 82;                          // height of a node with two widgets and a row of slots
const OUTSIDE = 40;                        // places that are tried in each direction

/**
 * {pos, groups, size, beside}: groups are those that grow for it, [index, box before, box after]; where its group has no room otherwise, both nodes
 * are as low as what they show, and beside is the height that leaves to the node that it was split from.
 */
export function placeBeside(graph, node, [width, height]) {
  const nodes = graph.nodes.map(({ pos, size }) => [pos[0], pos[1] - TITLE, size[0], size[1] + TITLE]);
  const boxes = (graph.groups ?? []).map(({ bounding }) => [...bounding]);
  const isFree = ([x, y], high = height, those = nodes, groups = boxes) => [...those, ...groups.map(([left, top, wide]) => [left, top, wide, GROUP_TITLE])]
    .every((other) => !overlap([x, y - TITLE, width, high + TITLE], other));
  const size = [width, height], beside = node.size[1];
  const own = around(boxes, node.pos)[0];
  if (own !== undefined) {
    const inside = placesIn(boxes[own], width, height).find((pos) => isFree(pos));
    if (inside) return { pos: inside, groups: [], size, beside };
    for (const pos of placesAt(boxes[own], node.pos, width, height)) {
      const groups = grown(boxes, nodes, around(boxes, node.pos), [pos[0] - MARGIN, pos[1] - TITLE - GROUP_TITLE, width + 2 * MARGIN,
        height + TITLE + GROUP_TITLE + MARGIN]);
      const titles = boxes.map((box, index) => groups?.find(([at]) => at === index)?.[2] ?? box);      // which go with a group that grows
      if (groups && isFree(pos, height, nodes, titles)) return { pos, groups, size, beside };
    }
    const lower = nodes.map((box, index) => (graph.nodes[index] === node ? [...box.slice(0, 3), LEAST + TITLE] : box));
    const between = placesIn(boxes[own], width, LEAST).find((pos) => isFree(pos, LEAST, lower));
    if (between) return { pos: between, groups: [], size: [width, LEAST], beside: Math.min(beside, LEAST) };
  }
  const [x, y] = [node.pos[0], node.pos[1]], places = [];
  for (let step = 0; step < OUTSIDE; step++)
    places.push([x - width - 40 - 80 * step, y], [x, y - height - 40 - 80 * step], [x, y + node.size[1] + 60 + 80 * step]);
  return { pos: places.find((pos) => isFree(pos)) ?? places[0], groups: [], size, beside };
}

/** Groups that grew, as they were, unless someone has changed them since. */
export function shrink(graph, groups = []) {
  for (const [index, before, after] of groups) {
    const group = graph.groups?.[index];
    if (group && after.every((value, at) => Math.abs(value - group.bounding[at]) < 1)) group.bounding = before;
  }
}

const overlap = (one, other) => one[0] < other[0] + other[2] && other[0] < one[0] + one[2] && one[1] < other[1] + other[3] && other[1] < one[1] + one[3];
const area = ([, , wide, high]) => wide * high;
const isIn = (one, other) => other[0] <= one[0] && one[0] + one[2] <= other[0] + other[2] && other[1] <= one[1] && one[1] + one[3] <= other[1] + other[3];

/** Numbers of the groups that a place is in, the smallest first. */
function around(boxes, pos) {
  const found = boxes.map((_, index) => index).filter((index) => isIn([pos[0], pos[1], 0, 0], boxes[index]));
  return found.sort((one, other) => area(boxes[one]) - area(boxes[other]));
}

function placesIn([left, top, wide, high], width, height) {
  const places = [];
  for (let y = top + GROUP_TITLE + TITLE; y + height + MARGIN <= top + high; y += 10)
    for (let x = left + MARGIN; x + width + MARGIN <= left + wide; x += 10) places.push([x, y]);
  return places;
}

/** Places at the edges of a group: under what is in it, beside it, and over it. */
function placesAt([left, top, wide, high], [, y], width, height) {
  return [[left + MARGIN, top + high + TITLE], [left - width - MARGIN, y], [left + wide + MARGIN, y], [left + MARGIN, top - height - MARGIN]];
}

/** What groups become that take in a box: [index, before, after] of each that changes; null where one would take in what it did not hold. */
function grown(boxes, nodes, chain, box) {
  const changes = [];
  let needed = box;
  for (const index of chain) {
    const before = boxes[index], [left, top] = [Math.min(before[0], needed[0]), Math.min(before[1], needed[1])];
    const after = [left, top, Math.max(before[0] + before[2], needed[0] + needed[2]) - left, Math.max(before[1] + before[3], needed[1] + needed[3]) - top];
    const others = [...nodes, ...boxes.filter((_, at) => !chain.includes(at))];
    if (others.some((other) => overlap(after, other) && !overlap(before, other))) return null;
    if (!isIn(needed, before)) changes.push([index, before, after]);
    needed = [after[0] - MARGIN, after[1] - GROUP_TITLE, after[2] + 2 * MARGIN, after[3] + GROUP_TITLE + MARGIN];
    if (isIn(needed, boxes[chain[chain.indexOf(index) + 1]] ?? needed)) break;
  }
  return changes;
}
