// What is many of a kind, as tables whose cells are written in place; on a phone a row is a card.

import { $, bytes, el, integer, rate, seconds, setText, spans } from "./dom.js";

const MICRO = 1e6;

class Table {
  // columns: [heading, value of a row as text, {number, header, show}]
  constructor(id, key, columns) {
    this.section = $(id);
    this.key = key;
    this.columns = columns;
    this.rows = new Map();
    this.shown = "";
  }

  show(rows, always = false) {
    this.section.hidden = !rows || (!rows.length && !always);
    if (this.section.hidden) return;
    if (!rows.length) {
      if (this.shown !== null) {
        this.section.querySelector("table")?.remove();
        this.section.append(el("p", { class: "none soft" }, "None now."));
      }
      this.shown = null;
      this.rows.clear();
      return;
    }
    const columns = this.columns.filter(([, value]) => rows.some((row) => value(row) != null));
    const headings = columns.map(([name]) => name).join("|");
    if (headings !== this.shown) {
      this.shown = headings;
      this.rows.clear();
      this.body = el("tbody");
      const head = columns.map(([name, , how]) => el("th", { scope: "col", class: how?.number && "number" }, name));
      this.section.querySelector("table, .none")?.remove();
      this.section.append(el("table", { "aria-labelledby": `${this.section.id}-title` }, el("thead", {}, el("tr", {}, ...head)), this.body));
    }
    const wanted = new Set();
    let place = this.body.firstElementChild;
    for (const row of rows) {
      const key = this.key(row);
      wanted.add(key);
      let line = this.rows.get(key);
      if (!line) {
        line = el("tr", {}, ...columns.map(([name, , how]) => el(how?.header ? "th" : "td", { "data-name": name, scope: how?.header && "row", class: (how?.number && "number") || (how?.wide && "words") })));
        this.rows.set(key, line);
      }
      columns.forEach(([, value, how], i) => {
        setText(line.cells[i], value(row) ?? "–");
        if (how?.bad) line.cells[i].classList.toggle("bad", Boolean(how.bad(row)));
      });
      if (line === place) place = line.nextElementSibling;
      else this.body.insertBefore(line, place);
    }
    for (const [key, line] of this.rows) {
      if (!wanted.has(key)) {
        line.remove();
        this.rows.delete(key);
      }
    }
  }
}

const known = (value, text) => (value == null ? null : text(value));
const number = { number: true };

let tables;
let several = false; // models

export function start() {
  tables = {
    nodes: new Table("nodes", (n) => n.node_id, [
      ["Node", (n) => n.node_id, { header: true }],
      ["State", (n) => n.state, { bad: (n) => ["lost", "silent", "quarantined"].includes(n.state) }],
      ["Layers", (n) => spans(n.spans) || "none"],
      ["Residency", (n) => n.residency],
      ["Type", (n) => n.quantization],
      ["Weights", (n) => known(n.weight_bytes, bytes), number],
      ["Most weights", (n) => known(n.peak_weight_bytes, bytes), number],
      ["Keys and values", (n) => known(n.kv_bytes, bytes), number],
      ["Memory", (n) => known(n.memory_bytes, bytes), number],
      ["Claimed tokens/s", (n) => known(n.claimed_tokens_per_s, rate), number],
      ["Measured tokens/s", (n) => known(n.measured_tokens_per_s, rate) ?? (n.claimed_tokens_per_s ? "not yet" : null), { number: true, bad: (n) => n.flagged }],
      ["Note", (n) => (n.flagged ? "claims more than it delivers" : n.reason), { wide: true, bad: (n) => n.flagged }],
    ]),
    streams: new Table("streams", (s) => s.id, [
      ["Stream", (s) => s.id, { header: true }],
      ["Model", (s) => (several ? s.model : null)],
      ["Route", (s) => s.route?.join(" → ") || null, { wide: true }],
      ["Prompt", (s) => known(s.prompt_tokens, integer), number],
      ["Generated", (s) => known(s.generated_tokens, integer), number],
      ["Tokens/s", (s) => (s.state === "generating" ? known(s.tokens_per_s, rate) : s.state), { number: true, bad: (s) => s.state === "stalled" }],
      ["For", (s) => known(s.seconds, seconds), number],
    ]),
    directives: new Table("directives", (d) => String(d.epoch), [
      ["Epoch", (d) => String(d.epoch), { header: true }],
      ["Order", (d) => d.kind],
      ["Node", (d) => d.node_id],
      ["Layers", (d) => `${d.start_layer}:${d.end_layer}`],
      ["State", (d) => (d.closes_gap ? `${d.state}, closes a gap` : d.state), { bad: (d) => d.state === "failed" || d.state === "late" }],
      ["Left", (d) => known(d.seconds_left, (s) => (s < 0 ? "late" : seconds(s))), number],
      ["Why", (d) => d.reason, { wide: true }],
    ]),
    caches: new Table("caches", (c) => c.tier, [
      ["Level", (c) => c.tier, { header: true }],
      ["Found", (c) => (c.hits + c.misses ? `${Math.round((100 * c.hits) / (c.hits + c.misses))} %` : "–"), number],
      ["Hits", (c) => integer(c.hits), number],
      ["Misses", (c) => integer(c.misses), number],
      ["Given up", (c) => integer(c.evictions), number],
      ["Poisoned", (c) => integer(c.poisoned), { number: true, bad: (c) => c.poisoned > 0 }],
      ["Errors", (c) => integer(c.errors + c.dropped), number],
      ["Held", (c) => bytes(c.bytes), number],
    ]),
    ledger: new Table("ledger", (l) => l.key, [
      ["For", (l) => l.name, { header: true }],
      ["Requests", (l) => integer(l.requests), number],
      ["Tokens in", (l) => known(l.prompt_tokens, integer), number],
      ["Tokens out", (l) => known(l.generated_tokens, integer), number],
      ["Layers × tokens", (l) => known(l.layer_tokens, integer), number],
      ["Charged", (l) => known(l.charged, credits), number],
      ["Earned", (l) => known(l.earned, credits), number],
      ["Balance", (l) => known(l.balance, credits), number],
    ]),
  };
}

const credits = (micro) => (micro / MICRO).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 6 });

export function show(found) {
  // a table of one row that the picture has already said says nothing more
  several = (found.models?.length ?? 0) > 1;
  const alone = found.server.role === "head" && (found.nodes?.length ?? 0) < 2;
  tables.nodes.show(alone ? [] : found.nodes);
  // beside the chat there is room for it, and it must not come and go there
  tables.streams.show(found.streams, !found.memory);
  tables.directives.show(found.directives);
  tables.caches.show(found.caches);
  const { models = [], nodes = [] } = found.ledger ?? {};
  tables.ledger.show([
    ...models.map((m) => ({ ...m, key: `m ${m.model}`, name: m.model })),
    ...nodes.map((n) => ({ ...n, key: `n ${n.account_id}`, name: n.account_id })),
  ]);
}
