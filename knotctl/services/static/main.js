// Ties the page together: the feed in, its sections out; the key; the colours.

import * as chat from "./chat.js";
import { $, bytes, el, integer, rate, seconds, setText, svg } from "./dom.js";
import { Feed, hasKey, headers, setKey } from "./feed.js";
import * as layers from "./layers.js";
import * as tables from "./tables.js";

const STATES = { ok: "ready", loading: "loading", draining: "ending", failed: "failed", degraded: "gaps" };

const feed = new Feed({
  document: show,
  lost: () => state("no answer", "bad"),
  denied: askKey,
  refused: onlyChat,
});

function state(words, kind) {
  setText($("state"), words);
  $("state").className = `pill ${kind}`;
  document.body.classList.toggle("stale", kind === "bad");
}

function show(found) {
  const { server, models = [] } = found;
  state(STATES[server.status] ?? server.status, server.status === "ok" ? "good" : server.status === "loading" ? "" : "bad");
  document.body.classList.toggle("stale", false);
  $("state").title = server.reason ?? "";
  $("forget-key").hidden = !hasKey();
  const names = models.map((m) => m.name);
  setText($("title"), names.length === 1 ? names[0] : "knotctl");
  setText($("subtitle"), `${server.role}, up ${seconds(server.uptime_s)}`);
  setText($("version"), `knotctl ${server.version}`);
  document.title = names.length === 1 ? `${names[0]} – knotctl` : "knotctl";
  chat.setModels(names);
  tiles(found);
  layers.show(found);
  memory(found);
  tables.show(found);
}

// ---- what matters now

const tile = {};

function tiles({ requests, latency, tokens }) {
  if (!tile.rate) {
    for (const [name, words] of [["rate", "tokens/s"], ["requests", "requests"], ["first", "to the first token"], ["tokens", "tokens generated"]]) {
      tile[name] = { value: el("strong"), more: el("span", { class: "soft" }) };
      tile[name].box = el("div", { class: `card tile ${name}` }, el("span", { class: "soft" }, words), tile[name].value, tile[name].more);
    }
    tile.line = svg("svg", { class: "line", "aria-hidden": "true", preserveAspectRatio: "none", viewBox: "0 0 180 40" });
    tile.rate.box.append(tile.line);
    $("tiles").replaceChildren(...Object.values(tile).map((t) => t.box).filter(Boolean));
  }
  setText(tile.rate.value, rate(feed.rate));
  line(feed.rates);
  if (requests) {
    setText(tile.requests.value, `${requests.running}`);
    setText(tile.requests.more, requests.waiting ? `running, ${requests.waiting} waiting` : "running, none waiting");
  }
  tile.requests.box.hidden = !requests;
  tile.first.box.hidden = tile.rate.box.hidden = !latency;
  if (latency) {
    setText(tile.first.value, seconds(feed.mean("first")));
    const next = feed.mean("next");
    setText(tile.first.more, next === null ? "no request yet" : `then ${seconds(next)} a token`);
  }
  tile.tokens.box.hidden = !tokens;
  if (tokens) {
    setText(tile.tokens.value, integer(tokens.generated));
    const n = latency?.first_token.count ?? 0;
    setText(tile.tokens.more, `in ${integer(n)} answer${n === 1 ? "" : "s"}`);
  }
}

// The last minutes, newest at the right.
function line(rates) {
  const most = Math.max(...rates, 1);
  const points = rates.map((r, i) => [180 - rates.length + i + 1, 38 - (34 * Math.max(0, r)) / most]);
  if (points.length < 2) return;
  const path = points.map(([x, y]) => `${x} ${y.toFixed(1)}`).join("L");
  tile.line.replaceChildren(
    svg("path", { class: "area", d: `M${points[0][0]} 40L${path}L180 40Z` }),
    svg("path", { class: "stroke", d: `M${path}`, "vector-effect": "non-scaling-stroke" }),
  );
}

// ---- model and memory

function memory({ models = [], memory: held, weights = [], store, requests }) {
  $("memory").hidden = !held;
  if (!held) return;
  const ceiling = held.budget_bytes ?? held.planned_bytes ?? held.model_bytes ?? 0;
  const parts = [
    ["pinned", "weights", held.weight_bytes],
    ["kv", "keys and values", held.kv_bytes],
    ["copy", "activations", held.activation_bytes],
    ["program", "program and kernels", held.program_bytes],
  ].filter(([, , n]) => n != null);
  const whole = Math.max(ceiling, parts.reduce((sum, [, , n]) => sum + n, 0), 1);
  let x = 0;
  const bars = parts.map(([kind, , n]) => {
    const rect = svg("rect", { class: kind, x: (1000 * x) / whole, width: (1000 * n) / whole, height: 16 });
    x += n;
    return rect;
  });
  $("memory-bar").replaceChildren(
    svg("svg", { viewBox: "0 0 1000 16", preserveAspectRatio: "none", role: "img", "aria-label": parts.map(([, name, n]) => `${name} ${bytes(n)}`).join(", ") }, svg("rect", { class: "free", width: 1000, height: 16 }), ...bars),
    el("ul", { class: "legend" }, ...parts.map(([kind, name, n]) => el("li", {}, svg("svg", { width: 14, height: 14, "aria-hidden": "true" }, svg("rect", { class: kind, width: 14, height: 14, rx: 3 })), `${name} ${bytes(n)}`))),
  );
  const [model] = models;
  const load = weights.reduce((sum, w) => sum + w.load_ms, 0);
  const work = weights.reduce((sum, w) => sum + w.compute_ms, 0);
  const pinned = weights.filter((w) => w.pinned).reduce((sum, w) => sum + w.bytes, 0);
  const facts = [
    ["Ceiling", held.budget_bytes == null ? "none given" : bytes(held.budget_bytes)],
    ["Most weights at once", bytes(held.peak_weight_bytes)],
    ["Stay in memory", weights.length ? `${bytes(pinned)} of ${bytes(weights.reduce((sum, w) => sum + w.bytes, 0))}` : null],
    ["Time spent loading", load + work > 0 ? `${((100 * load) / (load + work)).toFixed(0)} %` : null],
    ["Model", model && `${model.architecture}, ${model.n_layers} layers of ${integer(model.hidden_size)}`],
    ["Types", model?.types && Object.entries(model.types).slice(0, 4).map(([type, n]) => `${type} ${bytes(n)}`).join(", ")],
    ["Context", model && `${integer(model.context_length)} tokens`],
    ["Vocabulary", model && `${integer(model.vocab_size)} tokens`],
    ["Read of the knot", store && `${bytes(store.bytes)} in ${integer(store.reads)} reads`],
    ["Routes recovered", requests?.recoveries ? integer(requests.recoveries) : null],
    ["Knot", model?.knot_id],
  ].filter(([, value]) => value);
  const list = $("facts");
  if (list.dataset.names !== facts.map(([name]) => name).join()) {
    list.dataset.names = facts.map(([name]) => name).join();
    list.replaceChildren(...facts.map(([name]) => el("div", {}, el("dt", {}, name), el("dd"))));
  }
  facts.forEach(([, value], i) => setText(list.children[i].lastChild, value));
}

// ---- the key

function askKey(wasWrong) {
  state("key needed", "bad");
  setText($("key-error"), wasWrong ? "The server does not take this key." : "");
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

$("key-form").addEventListener("submit", (e) => {
  e.preventDefault();
  setKey($("key").value.trim());
  $("key").value = "";
  $("key-dialog").close();
  feed.ask();
});

$("forget-key").addEventListener("click", () => {
  setKey(null);
  location.reload();
});

// A key that may ask the model, and not look at the server.
async function onlyChat() {
  state("chat only", "");
  $("forget-key").hidden = !hasKey();
  try {
    const reply = await fetch("/v1/models", { headers: headers() });
    if (reply.ok) chat.setModels((await reply.json()).data.map((m) => m.id));
  } catch {
    state("no answer", "bad");
  }
}

// ---- colours

const THEMES = { "": ["◐", "as the system has them"], light: ["☀", "light"], dark: ["☾", "dark"] };

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  const [sign, words] = THEMES[name];
  setText($("theme"), sign);
  $("theme").setAttribute("aria-label", `Colours: ${words}`);
  $("theme").title = `Colours: ${words}`;
}

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length];
  theme(next);
  try {
    localStorage.setItem("knotctl-theme", next);
  } catch {
    // it lasts until the page is left
  }
});

try {
  theme(localStorage.getItem("knotctl-theme") in THEMES ? localStorage.getItem("knotctl-theme") : "");
} catch {
  theme("");
}

layers.start();
tables.start();
chat.start({ onDenied: () => askKey(true) });
feed.ask();
