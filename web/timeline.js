/** The timeline of a run: one row per rank; zoom with wheel, keys and buttons, pan by dragging and with arrow keys. */

import { element } from "./dom.js";

const ROW = 34, BAR = 18, TOP = 14;                            // pixels
const MIN_WIDTH = 0.2;                                         // of a span in pixels; smaller ones are merged
// What a device does in each kind of span. Where spans overlap, the later of these counts.
const DOES = { whole: "compute", patch: "compute", decode: "compute", encode: "compute", upscale: "compute", measure: "compute", wait: "wait", weights: "transfer", exchange: "transfer" };
const SHARES = ["compute", "wait", "transfer", "idle"];
const WAITS = ["wait", "weights", "exchange"];
const KINDS = ["whole", "patch", "decode", "encode", "upscale", "measure", ...WAITS];    // in the order of the legend

/** Summarise a rank's spans from begin to end: its number of steps, and the shares of the time in percent, which add up to 100. */
export function summarise(spans, begin, end) {
  const edges = spans.filter(([kind, from, to]) => DOES[kind] && to > begin && from < end).flatMap(([kind, from, to]) => [
    [Math.max(begin, from), DOES[kind], 1], [Math.min(end, to), DOES[kind], -1]]).sort(([one], [other]) => one - other);
  const open = { compute: 0, wait: 0, transfer: 0 }, seconds = { compute: 0, wait: 0, transfer: 0, idle: 0 };
  let last = begin;
  for (const [at, does, change] of [...edges, [end, "compute", 0]]) {
    seconds[["transfer", "wait", "compute"].find((one) => open[one]) ?? "idle"] += at - last;
    open[does] += change;
    last = at;
  }
  const steps = spans.filter(([kind]) => kind === "whole" || kind === "patch");
  return { steps: new Set(steps.map((span) => span[3])).size, ...percents(seconds, end - begin) };
}

/** Round shares to whole percents that add up to 100: those with the largest remainders are rounded up. */
function percents(seconds, total) {
  const exact = SHARES.map((name) => (total > 0 ? 100 * seconds[name] / total : name === "idle" ? 100 : 0)), whole = exact.map(Math.floor);
  const order = SHARES.map((_, index) => index).sort((one, other) => exact[other] - whole[other] - (exact[one] - whole[one]));
  const missing = 100 - whole.reduce((all, number) => all + number, 0);
  for (const index of order.slice(0, missing)) whole[index]++;
  return Object.fromEntries(SHARES.map((name, index) => [name, whole[index]]));
}

/** Return the rectangles of the spans between two times, [{x, width, span}], without those hidden by others of the same kind. */
export function rectangles(spans, from, to, width) {
  const scale = width / (to - from), visible = [], last = {};
  for (const span of spans) {
    const [kind, start, end] = span;
    if (end < from || start > to) continue;
    const x = Math.max(0, (start - from) * scale), right = Math.min(width, (end - from) * scale);
    if (last[kind] !== undefined && right - last[kind] < MIN_WIDTH) continue;
    last[kind] = right;
    visible.push({ x, width: Math.max(MIN_WIDTH, right - x), span });
  }
  return visible;
}

export class Timeline {
  constructor(text) {
    this.text = text;
    this.time = { ranks: [], seconds: 0, steps: 0, run: 0 };
    this.known = "";
    this.svg = element("svg", { class: "xdit-time", tabindex: "0", role: "group", "aria-label": text("time_hint") });
    this.table = element("table");
    this.legend = element("ul", { class: "xdit-legend" });
    const button = (key, act) => element("button", { type: "button", "aria-label": text(key), title: text(key), "data-zoom": key, onclick: act },
      { zoom_in: "+", zoom_out: "−", zoom_all: text("zoom_all") }[key]);
    this.root = element("div", { class: "xdit-timeline" },
      element("div", { class: "xdit-zoom" }, button("zoom_in", () => this.zoom(0.5)), button("zoom_out", () => this.zoom(2)),
        button("zoom_all", () => this.all())),
      this.svg,
      this.legend, this.table);
    this.resized = new ResizeObserver(() => this.draw());       // the user can resize the sidebar
    this.resized.observe(this.svg);
    this.svg.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.at(event));
    }, { passive: false });
    this.svg.addEventListener("pointerdown", (event) => this.drag(event));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.all();
  }

  close() {
    this.resized.disconnect();
    this.svg.replaceChildren();
  }

  /** Return whether this shows spans of the run with this number. */
  isOf(run) {
    return this.time.run === run && this.time.ranks.some(({ spans }) => spans.length);
  }

  /** Show a timeline as returned by GET /xdit/timeline. An unchanged one keeps the current view. */
  show(time) {
    const known = JSON.stringify(time.ranks);
    if (known === this.known && time.run === this.time.run) return;
    this.known = known;
    this.time = time;
    this.all();
    const kinds = KINDS.filter((kind) => time.ranks.some(({ spans }) => spans.some((span) => span[0] === kind)));
    this.legend.replaceChildren(...[...kinds, "idle"].map((kind) => element("li", {}, element("i", { "data-kind": kind }), this.text(`kind_${kind}`))));
    const head = ["rank", "steps", ...SHARES].map((key) => element("th", { scope: "col" }, this.text(`time_${key}`)));
    const steps = time.ranks.flatMap(({ spans }) => spans.filter((span) => span[3]));
    const begin = Math.min(...steps.map((span) => span[1])), end = Math.max(...steps.map((span) => span[2]));
    const rows = time.ranks.map(({ name, spans }) => {
      const summary = summarise(spans, begin, end);
      return element("tr", {}, element("th", { scope: "row" }, name), ...[summary.steps, ...SHARES.map((share) => `${summary[share]} %`)]
        .map((value) => element("td", {}, String(value))));
    });
    this.table.hidden = !steps.length;     // e.g. if measuring was cancelled
    this.table.replaceChildren(...(time.steps ? [element("caption", {}, this.text("time_caption", { steps: time.steps }))] : []), element("thead", {}, element("tr", {}, ...head)),
      element("tbody", {}, ...rows));
  }

  all() {
    [this.from, this.to] = [0, this.time.seconds || 1];
    this.draw();
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    const span = Math.min(this.time.seconds || 1, Math.max(1e-4, (this.to - this.from) * factor));
    this.move(at - (at - this.from) * span / (this.to - this.from), span);
  }

  move(from, span = this.to - this.from) {
    this.from = Math.max(0, Math.min(from, (this.time.seconds || 1) - span));
    this.to = this.from + span;
    this.draw();
  }

  /** Return the time under the pointer. */
  at(event) {
    const { left, width } = this.svg.getBoundingClientRect();
    return this.from + (this.to - this.from) * (event.clientX - left) / width;
  }

  drag(event) {
    const start = this.at(event), { from, to } = this, { width } = this.svg.getBoundingClientRect();
    const moved = (other) => this.move(from - (to - from) * (other.clientX - event.clientX) / width);
    const end = () => this.svg.removeEventListener("pointermove", moved);
    if (Number.isFinite(start)) this.svg.addEventListener("pointermove", moved);
    this.svg.addEventListener("pointerup", end, { once: true });
    this.svg.addEventListener("pointerleave", end, { once: true });
  }

  key(event) {
    const step = (this.to - this.from) / 5;
    const act = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), ArrowLeft: () => this.move(this.from - step),
      ArrowRight: () => this.move(this.from + step), Home: () => this.all() }[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();               // the page has its own key bindings
    act();
  }

  draw() {
    const { ranks } = this.time, width = this.svg.clientWidth || 280, numTicks = Math.max(2, Math.min(4, Math.floor(width / 70)));
    this.svg.style.height = `${TOP + ROW * Math.max(1, ranks.length)}px`;
    this.svg.replaceChildren(...Array.from({ length: numTicks }, (_, tick) => tick / numTicks).map((share) =>
      element("text", { x: width * share + 2, y: 10, class: "xdit-tick" }, `${(this.from + share * (this.to - this.from)).toPrecision(3)} s`)),
    ...ranks.map(({ name, spans }, rank) => element("g", { "data-rank": rank, transform: `translate(0 ${TOP + rank * ROW})` },
      element("title", {}, name), element("rect", { x: 0, y: 2, width, height: BAR, "data-kind": "idle" }),
      ...rectangles(spans, this.from, this.to, width).map(({ x, width, span: [kind, start, end, step, row] }) =>
        element("rect", { x, width, y: WAITS.includes(kind) ? 7 : 2, height: WAITS.includes(kind) ? BAR - 10 : BAR, "data-kind": kind, "data-step": step,
          "data-odd": String(step % 2) }, element("title", {}, this.text("span_hint", {
          kind: this.text(`kind_${kind}`), step: step || "", row, start: start.toFixed(3), seconds: (end - start).toFixed(4) })))),
      element("text", { x: 2, y: BAR + 12, class: "xdit-rank" }, name))));
  }
}
