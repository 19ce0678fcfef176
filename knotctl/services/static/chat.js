// A conversation with /v1/chat/completions, streamed. It is kept in this page's memory and nowhere else.

import { $, el, rate, seconds, setText } from "./dom.js";
import { headers } from "./feed.js";

let model = null;
let running = null; // the AbortController of the answer that is being written
let turns = []; // {role, content}

export function setModels(names) {
  const select = $("model");
  const shown = [...select.options].map((o) => o.value);
  if (names.join("\n") !== shown.join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    if (names.includes(chosen)) select.value = chosen;
    select.hidden = names.length < 2;
  }
  model = select.value || null;
}

export function start({ onDenied }) {
  const form = $("ask");
  const message = $("message");
  $("model").addEventListener("change", (e) => (model = e.target.value));
  $("temperature").addEventListener("input", (e) => setText($("temperature-value"), Number(e.target.value).toFixed(1)));
  message.addEventListener("keydown", (e) => {
    if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
      e.preventDefault();
      form.requestSubmit();
    }
  });
  message.addEventListener("input", () => grow(message));
  form.addEventListener("submit", (e) => {
    e.preventDefault();
    if (!running && message.value.trim()) answer(message.value, onDenied);
  });
  // a field that is wrong must be seen
  form.addEventListener("invalid", (e) => e.target.closest("details")?.setAttribute("open", ""), true);
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => {
    running?.abort();
    turns = [];
    $("log").replaceChildren(el("p", { class: "empty soft" }, "A new chat."));
    $("clear").disabled = true;
    message.focus();
  });
}

function grow(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 200)}px`;
}

function request() {
  const number = (id) => ($(id).value.trim() === "" ? undefined : Number($(id).value));
  const system = $("system").value;
  const seed = $("seed").value.trim();
  const stop = $("stop-at").value;
  const body = {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top-p"),
    max_tokens: number("max-tokens"),
    ...(stop && { stop }),
  };
  // digit by digit: a seed has 64 bits, a number here 53
  return seed ? JSON.stringify(body).replace(/}$/, `,"seed":${BigInt(seed)}}`) : JSON.stringify(body);
}

async function answer(text, onDenied) {
  const log = $("log");
  const message = $("message");
  log.querySelector(".empty")?.remove();
  turns.push({ role: "user", content: text });
  const asked = bubble("user", "You");
  show(asked.body, text);
  const reply = bubble("assistant", model ?? "Model");
  message.value = "";
  grow(message);
  running = new AbortController();
  busy(true);
  const run = { text: "", pieces: 0, began: performance.now(), first: null, last: null, usage: null, reason: null };
  let painting = false;
  const paint = () => {
    painting = false;
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    show(reply.body, run.text);
    setText(reply.note, note(run));
    if (follow) log.scrollTop = log.scrollHeight;
  };
  log.scrollTop = log.scrollHeight;
  const waiting = setInterval(() => run.first === null && paint(), 250);
  try {
    for await (const event of completions(request(), running.signal)) {
      if (event.error) throw new Error(event.error.message);
      run.usage = event.usage ?? run.usage;
      for (const choice of event.choices) {
        run.reason = choice.finish_reason ?? run.reason;
        const piece = choice.delta.content;
        if (!piece) continue;
        run.last = performance.now();
        run.first ??= run.last;
        run.pieces += 1;
        run.text += piece;
        if (!painting) {
          painting = true;
          requestAnimationFrame(paint);
        }
      }
    }
  } catch (error) {
    if (error.name === "AbortError") run.reason = "stopped here";
    else if (error.status === 401) {
      run.failed = "the key was not taken";
      onDenied();
    } else run.failed = error instanceof TypeError ? "the server does not answer" : error.message;
  }
  clearInterval(waiting);
  paint();
  if (run.failed) reply.body.append(el("p", { class: "bad", role: "alert" }, run.failed));
  if (run.text) turns.push({ role: "assistant", content: run.text });
  else turns.pop(); // what got no answer is not part of what is asked next
  running = null;
  busy(false);
}

function busy(yes) {
  $("log").setAttribute("aria-busy", yes);
  $("send").hidden = yes;
  $("stop").hidden = !yes;
  $("clear").disabled = false;
  if (yes) $("stop").focus({ preventScroll: true });
  else if ($("ask").contains(document.activeElement) || document.activeElement === document.body) {
    if (matchMedia("(pointer: fine)").matches) $("message").focus({ preventScroll: true });
  }
}

// Yields the events of a streamed completion. Throws with the server's words, and its status, where it refuses.
async function* completions(body, signal) {
  const reply = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body,
    signal,
  });
  if (!reply.ok) {
    const words = await reply.json().then((d) => d.error.message, () => `status ${reply.status}`);
    throw Object.assign(new Error(words), { status: reply.status });
  }
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream broke off");
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment that keeps the connection awake
      if (event === "data: [DONE]") return;
      yield JSON.parse(event.slice(6));
    }
  }
}

function bubble(role, name) {
  const body = el("div", { class: "body" });
  const foot = el("p", { class: "note soft" });
  $("log").append(el("article", { class: role }, el("h3", {}, name), body, foot));
  return { body, note: foot };
}

// Text as it is, and what stands between ``` fences as code: elements are made here, the text is never parsed as HTML.
function show(body, text) {
  const parts = text.split(/^```(.*)\n?/m);
  body.replaceChildren(
    ...parts.flatMap((part, i) => {
      if (i % 2) return []; // the language
      const code = i % 4 === 2;
      const content = code ? part.replace(/\n$/, "") : part.replace(i ? /^\n+/ : "", "").replace(i + 1 < parts.length ? /\n+$/ : "", "");
      if (!content && !code) return [];
      return code ? [el("pre", { tabindex: "0" }, el("code", {}, content))] : [el("div", { class: "text" }, content)];
    }),
  );
}

function note(run) {
  const n = run.usage?.completion_tokens ?? run.pieces;
  if (run.first === null) return run.reason ?? `thinking for ${seconds((performance.now() - run.began) / 1e3)}`;
  const words = [`${n} token${n === 1 ? "" : "s"}`];
  if (n > 1 && run.last > run.first) words.push(`${rate(((n - 1) * 1e3) / (run.last - run.first))} tokens/s`);
  words.push(`first after ${seconds((run.first - run.began) / 1e3)}`);
  if (run.usage) words.push(`${run.usage.prompt_tokens} in the prompt`);
  if (run.reason === "length") words.push("cut at the limit");
  else if (run.reason && run.reason !== "stop") words.push(run.reason);
  return words.join(" · ");
}
