// The coverage map as a picture: layers across, nodes down, the way of a token drawn through them; above it, where the
// model is in this process, what its layers weigh and which of that stays in memory.

import { $, bytes, el, rate, seconds, setText, span, spans, svg } from "./dom.js";

const BAR = 22;
const PHASES = 64; // height of the weights
const ROUTES = 8; // drawn at the most, those with most streams
let drawn = "";
let last = null;

export function start() {
  new ResizeObserver(() => last && draw(last)).observe($("picture"));
}

export function show(found) {
  last = found;
  $("layers").hidden = !found.coverage;
  if (found.coverage) draw(found);
}

function draw(found) {
  const { coverage, nodes = [], routes = [], weights = [], more_nodes: more = 0 } = found;
  const width = Math.floor($("picture").clientWidth);
  if (!width) return;
  // milliseconds change with every token and are only told in tips
  const still = weights.map(({ layer, phase, bytes: n, pinned }) => [layer, phase, n, pinned]);
  const shape = nodes.map((n) => [n.node_id, n.state, n.spans, n.loading, n.dropping, n.flagged, n.residency, speed(n)]);
  const key = JSON.stringify([width, coverage, shape, more, routes, still]);
  if (key === drawn) return;
  drawn = key;
  setText($("coverage-text"), summary(coverage, nodes, more, routes));
  const picture = new Picture(width, found);
  $("picture").replaceChildren(picture.node());
  $("legend").replaceChildren(...picture.legend());
}

function summary({ n_layers: n, covered, gaps, coverage_map: map }, nodes, more, routes) {
  const holders = nodes.filter((node) => node.spans?.length).length + more;
  if (!covered) {
    const count = gaps.reduce((sum, [a, b]) => sum + b - a, 0);
    return `${count} of ${n} layers have no node: the model cannot be served (gaps ${spans(gaps)})`;
  }
  const least = Math.min(...map.map((run) => run.node_count));
  const where = holders === 1 ? "one node" : `${holders} nodes`;
  const streams = routes.reduce((sum, r) => sum + r.streams, 0);
  const used = routes.filter((r) => r.streams).length;
  const words = [`all ${n} layers on ${where}`];
  if (least > 1) words.push(`each at least ${least} times`);
  if (streams) words.push(`${streams} stream${streams > 1 ? "s" : ""} in flight${used > 1 ? ` over ${used} routes` : ""}`);
  return words.join(", ");
}

function ticks(n) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((s) => n <= 8 * s) ?? 2000;
  const marks = [];
  for (let k = 0; k < n; k += step) marks.push(k);
  if (marks.length > 1 && n - marks.at(-1) < step * 0.6) marks.pop();
  return [...marks, n];
}

class Picture {
  constructor(width, found) {
    this.width = width;
    this.coverage = found.coverage;
    this.nodes = found.nodes ?? [];
    this.weights = found.weights ?? [];
    this.more = found.more_nodes ?? 0;
    this.routes = (found.routes ?? []).slice(0, ROUTES);
    this.n = found.coverage.n_layers;
    // names stand above their bars where there is little room
    this.narrow = width < 620;
    const longest = Math.max(6, ...this.nodes.map((node) => node.node_id.length));
    this.left = this.narrow ? 2 : Math.min(210, 8 * longest + 14);
    this.tail = this.weights.some((w) => w.layer == null) ? 2 : 0.2; // room for the output head
    this.seen = new Set();
    this.height = 0;
  }

  x(layer) {
    return this.left + (layer * (this.width - this.left - 12)) / (this.n + this.tail);
  }

  node() {
    const parts = [...this.phases(), ...this.copies(), ...this.rows()];
    const axis = this.axis();
    return svg(
      "svg",
      { viewBox: `0 0 ${this.width} ${this.height}`, width: this.width, height: this.height, role: "img", "aria-labelledby": "coverage-text" },
      svg("defs", {}, hatch("hatch", "hatch-ground", "hatch-line"), hatch("stripes", "copy", "stripe-line")),
      ...axis,
      ...parts,
    );
  }

  legend() {
    const words = {
      pinned: "stays in memory",
      passing: "passes through",
      route: this.routes.length ? "on the way of a token" : "serves",
      copy: "copy",
      loading: "loading",
      dropping: "letting go",
      gap: "nobody",
      lost: "no answer",
    };
    return Object.keys(words).filter((k) => this.seen.has(k)).map((k) =>
      el("li", {}, svg("svg", { width: 14, height: 14, "aria-hidden": "true" }, svg("rect", { class: k, width: 14, height: 14, rx: 3 })), words[k]),
    );
  }

  label(words, y, kind = "soft") {
    if (this.narrow) return svg("text", { class: kind, x: 2, y: y - 4 }, words);
    return svg("text", { class: `${kind} end`, x: this.left - 10, y: y + 15 }, words);
  }

  // A band of the picture: returns where it begins, below its name where names stand above.
  band(height, gap = 8) {
    const top = this.height + (this.narrow ? 18 : 0);
    this.height = top + height + gap;
    return top;
  }

  axis() {
    const bottom = this.height;
    this.height += 18;
    const marks = ticks(this.n).flatMap((layer) => [
      svg("line", { class: "grid", x1: this.x(layer), x2: this.x(layer), y1: 0, y2: bottom }),
      svg("text", { class: `soft ${layer || !this.narrow ? "mid" : ""}`, x: this.x(layer), y: bottom + 13 }, String(layer)),
    ]);
    return this.narrow ? marks : [...marks, this.label("layer", bottom - 2)];
  }

  // Of each layer its phases, as high as they are heavy, one upon the other.
  *phases() {
    if (!this.weights.length) return;
    const layers = new Map();
    for (const w of this.weights) {
      const at = w.layer ?? this.n + 0.6;
      layers.set(at, [...(layers.get(at) ?? []), w]);
    }
    const sum = (list) => list.reduce((total, w) => total + w.bytes, 0);
    const inside = [...layers].filter(([at]) => at < this.n).map(([, list]) => sum(list));
    const most = Math.max(...inside, 1);
    const top = this.band(PHASES, 12);
    yield this.label("weights", this.narrow ? top : top + PHASES / 2 - 12);
    for (const [at, list] of layers) {
      // the output head is far heavier than a layer, and would make the layers flat
      const scale = PHASES / Math.max(most, sum(list));
      const width = Math.max(1, this.x(at + 1) - this.x(at) - (this.n > 60 ? 0.5 : 2));
      let y = top + PHASES;
      for (const w of list) {
        const height = w.bytes * scale;
        y -= height;
        const kind = w.pinned ? "pinned" : "passing";
        this.seen.add(kind);
        const where = w.layer == null ? "output head" : `layer ${w.layer}, ${w.phase}`;
        yield svg(
          "rect",
          { class: kind, x: this.x(at).toFixed(1), y: y.toFixed(1), width: width.toFixed(1), height: Math.max(0.5, height - (height > 4 ? 1 : 0)).toFixed(1) },
          svg("title", {}, `${where}: ${bytes(w.bytes)}, ${w.pinned ? "stays in memory" : "loaded for each use"}`),
        );
      }
    }
    if (this.tail > 1) yield svg("text", { class: "soft mid small", x: this.x(this.n + 1.1), y: top + PHASES + 11 }, "head");
  }

  // How many nodes have each layer.
  *copies() {
    const runs = this.coverage.coverage_map;
    const most = Math.max(...runs.map((run) => run.node_count));
    if (most < 2) return; // the rows say it
    const top = this.band(BAR);
    yield this.label("copies", top);
    for (const { start_layer: a, end_layer: b, node_count: count } of runs) {
      if (!count) continue;
      const height = 14 + (8 * count) / most;
      const width = this.x(b) - this.x(a) - 1;
      yield svg("rect", { class: "count", x: this.x(a), y: top + BAR - height, width, height }, svg("title", {}, `layers ${a}:${b}: ${count}`));
      if (width > 10 + 7 * String(count).length) {
        yield svg("text", { class: "on-count mid", x: (this.x(a) + this.x(b)) / 2, y: top + 17 }, String(count));
      }
    }
  }

  *rows() {
    // what each node does on the routes, each part once
    const own = new Map();
    const hops = new Map();
    for (const { stages, streams } of this.routes) {
      stages.forEach((s, i) => {
        const parts = own.get(s.node_id) ?? own.set(s.node_id, new Map()).get(s.node_id);
        parts.set(`${s.start_layer}:${s.end_layer}`, [s.start_layer, s.end_layer]);
        if (!i) return;
        const key = JSON.stringify([stages[i - 1].node_id, s.node_id, s.start_layer]);
        const hop = hops.get(key) ?? { from: stages[i - 1].node_id, to: s.node_id, layer: s.start_layer, streams: 0 };
        hops.set(key, { ...hop, streams: hop.streams + streams });
      });
    }
    const first = this.height;
    const lanes = new Map();
    const bars = [];
    for (const node of this.nodes) {
      const top = this.band(BAR, 8);
      lanes.set(node.node_id, top);
      bars.push(...this.row(node, top, [...(own.get(node.node_id)?.values() ?? [])]));
    }
    const bottom = this.height;
    for (const [a, b] of this.coverage.gaps) {
      this.seen.add("gap");
      const width = this.x(b) - this.x(a);
      const height = Math.max(30, bottom - first - 6);
      if (bottom - first < 30) this.height = first + 36;
      yield svg("rect", { class: "gap", x: this.x(a), y: first, width, height, rx: 3 }, svg("title", {}, `layers ${a}:${b}: nobody has them`));
      if (width > 70) yield svg("text", { class: "gap-text mid", x: (this.x(a) + this.x(b)) / 2, y: first + 14 }, `gap ${a}:${b}`);
    }
    yield* bars;
    for (const hop of hops.values()) {
      const from = lanes.get(hop.from);
      const to = lanes.get(hop.to);
      if (from === undefined || to === undefined || from === to) continue;
      const x = this.x(hop.layer);
      const [y1, y2] = from < to ? [from + BAR, to - 6] : [from, to + BAR + 6];
      yield svg("path", { class: `hop${hop.streams ? " busy" : ""}`, d: `M${x} ${y1}V${y2}` });
      const d = from < to ? `M${x - 4} ${y2 - 1}h8l-4 7z` : `M${x - 4} ${y2 + 1}h8l-4 -7z`;
      yield svg("path", { class: "tip", d });
    }
    if (this.more) {
      const top = this.band(6);
      yield this.label(`and ${this.more} more nodes`, top);
    }
  }

  row(node, top, own) {
    const name = node.node_id;
    const most = Math.floor(this.narrow ? this.width / 8 - 14 : (this.left - 14) / 7.4);
    const cut = name.length > most ? `${name.slice(0, most - 1)}…` : name;
    const lost = node.state === "lost" || node.state === "silent";
    const parts = [svg("title", {}, tip(node)), this.label(cut + (node.flagged ? " ⚑" : ""), top, `name${lost || node.flagged ? " gap-text" : ""}`)];
    const fast = speed(node);
    const bar = (kind, [a, b], words) => {
      this.seen.add(kind);
      const width = this.x(b) - this.x(a) - 1;
      parts.push(svg("rect", { class: `${kind}${node.flagged ? " liar" : ""}`, x: this.x(a), y: top, width, height: BAR, rx: 4 }));
      const choice = words ? [fast && `${words} · ${fast}`, words, span([a, b])] : [];
      const inside = choice.find((w) => w && 7.2 * w.length + 8 < width);
      if (inside) parts.push(svg("text", { class: `on-${kind} mid`, x: (this.x(a) + this.x(b)) / 2, y: top + 15.5 }, inside));
    };
    for (const held of node.spans ?? []) {
      const mine = own.filter(([a, b]) => held[0] <= a && b <= held[1]);
      if (!mine.some(([a, b]) => a === held[0] && b === held[1])) {
        bar(this.routes.length ? "copy" : "route", held, mine.length ? "" : `layers ${span(held)}`);
      }
      for (const part of mine) bar("route", part, `layers ${span(part)}`);
    }
    for (const s of node.dropping ?? []) bar("dropping", s, "letting go");
    for (const s of node.loading ?? []) bar("loading", s, `loading ${span(s)}`);
    if (!parts.some((p) => p.tagName === "rect")) {
      parts.push(svg("text", { class: "soft", x: this.x(0) + 4, y: top + 15 }, lost ? "no answer" : (node.state ?? "idle")));
    }
    return [svg("g", {}, ...parts)];
  }
}

// What a node says of its speed and what was seen of it, in a few words.
function speed({ claimed_tokens_per_s: claimed, measured_tokens_per_s: measured, flagged }) {
  if (flagged) return `claims ${rate(claimed)}, delivers ${rate(measured)} tokens/s`;
  return measured ? `${rate(measured)} tokens/s` : "";
}

function tip(node) {
  const words = [`${node.node_id}: ${node.state}${node.spans?.length ? `, layers ${spans(node.spans)}` : ""}`];
  if (node.quantization) words.push(`at ${node.quantization}`);
  if (node.residency) words.push(`residency ${node.residency}`);
  if (node.claimed_tokens_per_s) words.push(`claims ${rate(node.claimed_tokens_per_s)} tokens/s`);
  if (node.measured_tokens_per_s) words.push(`delivers ${rate(node.measured_tokens_per_s)}`);
  if (node.stage_ms) words.push(`${seconds(node.stage_ms / 1e3)} a token`);
  if (node.reason) words.push(node.reason);
  return words.join("; ");
}

function hatch(id, ground, line) {
  return svg(
    "pattern",
    { id, width: 10, height: 10, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { class: ground, width: 10, height: 10 }),
    svg("line", { class: line, x1: 0, y1: 0, x2: 0, y2: 10 }),
  );
}
