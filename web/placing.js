/**
 * Placement of the Load xDiT Model that is split from a checkpoint loader: in the loader's group, which is enlarged if necessary, or else to the
 * left, above or below; never over a node or a group's title. Boxes are [left, top, width, height] in canvas pixels.
 */

const [TITLE, GROUP_TITLE, MARGIN] = [30, 36, 10];             // heights, and the margin at a group's edges
const MIN_HEIGHT = 82;                     // of a node with two widgets and a row of slots
const COLLAPSED = 80;                      // width of a collapsed node's title, at least
const MAX_STEPS = 40;                      // positions to try in each direction

/**
 * Return {pos, groups, size, loaderHeight}. groups: the groups to enlarge, [index, box before, box after]. If the group has no space otherwise,
 * both nodes get their minimum height, `least` for the given one; loaderHeight is its new height.
 */
export function placeNextTo(graph, node, [width, height], least = MIN_HEIGHT) {
  const nodes = graph.nodes.map(({ pos, size }) => [pos[0], pos[1] - TITLE, size[0], size[1] + TITLE]);
  const boxes = (graph.groups ?? []).map(({ bounding }) => [...bounding]);
  const isFree = ([x, y], high = height, occupied = nodes, groups = boxes) => [...occupied, ...groups.map(([left, top, wide]) => [left, top, wide, GROUP_TITLE])]
    .every((other) => !overlap([x, y - TITLE, width, high + TITLE], other));
  const size = [width, height], loaderHeight = node.size[1];
  const own = around(boxes, node.pos)[0];
  if (own !== undefined) {
    const inside = positionsIn(boxes[own], width, height).find((pos) => isFree(pos));
    if (inside) return { pos: inside, groups: [], size, loaderHeight };
    for (const pos of positionsAt(boxes[own], node.pos, width, height)) {
      const groups = grown(boxes, nodes, around(boxes, node.pos), [pos[0] - MARGIN, pos[1] - TITLE - GROUP_TITLE, width + 2 * MARGIN,
        height + TITLE + GROUP_TITLE + MARGIN]);
      const titles = boxes.map((box, index) => groups?.find(([at]) => at === index)?.[2] ?? box);      // titles move with an enlarged group
      if (groups && isFree(pos, height, nodes, titles)) return { pos, groups, size, loaderHeight };
    }
    const lower = nodes.map((box, index) => (graph.nodes[index] === node ? [...box.slice(0, 3), Math.min(least, loaderHeight) + TITLE] : box));
    const lowest = Math.min(height, MIN_HEIGHT);
    const between = positionsIn(boxes[own], width, lowest).find((pos) => isFree(pos, lowest, lower));
    if (between) return { pos: between, groups: [], size: [width, lowest], loaderHeight: Math.min(loaderHeight, least) };
  }
  const [x, y] = [node.pos[0], node.pos[1]], positions = [];
  for (let step = 0; step < MAX_STEPS; step++)
    positions.push([x - width - 40 - 80 * step, y], [x, y - height - 40 - 80 * step], [x, y + node.size[1] + 60 + 80 * step]);
  return { pos: positions.find((pos) => isFree(pos)) ?? positions[0], groups: [], size, loaderHeight };
}

/** Return the nearest position at which a node covers no other one; its present position if there is none nearby. */
export function settle(graph, node) {
  const [[x, y], [width, height]] = [node.pos, node.size];
  const others = graph.nodes.filter((other) => other !== node).map(({ pos, size, flags }) => [pos[0], pos[1] - TITLE, flags?.collapsed ? COLLAPSED : size[0],
    (flags?.collapsed ? 0 : size[1]) + TITLE]);
  const isFree = ([left, top]) => others.every((other) => !overlap([left, top - TITLE, width, height + TITLE], other));
  const steps = Array.from({ length: 2 * MAX_STEPS + 1 }, (_, index) => 20 * (index - MAX_STEPS));
  const positions = steps.flatMap((right) => steps.map((down) => [right, down])).sort(([a, b], [c, d]) => a * a + b * b - c * c - d * d);
  const found = positions.find(([right, down]) => isFree([x + right, y + down]));
  return found && (found[0] || found[1]) ? [x + found[0], y + found[1]] : node.pos;
}

/** Restore the size of enlarged groups, unless they have been changed since. */
export function shrink(graph, groups = []) {
  for (const [index, before, after] of groups) {
    const group = graph.groups?.[index];
    if (group && after.every((value, at) => Math.abs(value - group.bounding[at]) < 1)) group.bounding = before;
  }
}

const overlap = (one, other) => one[0] < other[0] + other[2] && other[0] < one[0] + one[2] && one[1] < other[1] + other[3] && other[1] < one[1] + one[3];
const area = ([, , wide, high]) => wide * high;
const isIn = (one, other) => other[0] <= one[0] && one[0] + one[2] <= other[0] + other[2] && other[1] <= one[1] && one[1] + one[3] <= other[1] + other[3];

/** Return the indices of the groups that contain a position, the smallest first. */
function around(boxes, pos) {
  const found = boxes.map((_, index) => index).filter((index) => isIn([pos[0], pos[1], 0, 0], boxes[index]));
  return found.sort((one, other) => area(boxes[one]) - area(boxes[other]));
}

function positionsIn([left, top, wide, high], width, height) {
  const positions = [];
  for (let y = top + GROUP_TITLE + TITLE; y + height + MARGIN <= top + high; y += 10)
    for (let x = left + MARGIN; x + width + MARGIN <= left + wide; x += 10) positions.push([x, y]);
  return positions;
}

/** Return positions at the edges of a group: below, left, right and above. */
function positionsAt([left, top, wide, high], [, y], width, height) {
  return [[left + MARGIN, top + high + TITLE], [left - width - MARGIN, y], [left + wide + MARGIN, y], [left + MARGIN, top - height - MARGIN]];
}

/** Enlarge groups to contain a box: [index, before, after] of each that changes; null if one would then overlap something new. */
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
