// The document of /dashboard.json, asked for once a second while somebody looks, and the rates that follow from it.

const EVERY = 1000;
const SLOWEST = 8000;
const HISTORY = 180;
const KEY = "knotctl-key";

// In this tab alone, and only until it is closed; never in a cookie, a URL or a lasting store.
let key = null;
try {
  key = sessionStorage.getItem(KEY);
} catch {
  // storage is switched off: the key lasts until the page is left
}

export const hasKey = () => key !== null;

export function setKey(value) {
  key = value;
  try {
    if (value === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, value);
  } catch {
    // as above
  }
}

export function headers() {
  return key === null ? {} : { Authorization: `Bearer ${key}` };
}

export class Feed {
  // on.document(document, feed), on.denied(wasKeyWrong), on.refused(), on.lost()
  constructor(on) {
    this.on = on;
    this.samples = [];
    this.failures = 0;
    this.timer = null;
    document.addEventListener("visibilitychange", () => document.hidden || this.ask());
  }

  async ask() {
    clearTimeout(this.timer);
    this.timer = null;
    const asked = (this.asked = Symbol("asked"));
    try {
      const reply = await fetch("/dashboard.json", { headers: headers(), cache: "no-store" });
      if (asked !== this.asked) return;
      if (reply.status === 401) {
        this.on.denied(hasKey());
        return;
      }
      if (reply.status === 403) {
        this.on.refused();
        return;
      }
      if (!reply.ok) throw new Error(`status ${reply.status}`);
      const found = await reply.json();
      if (asked !== this.asked) return;
      this.failures = 0;
      this.note(found);
      this.on.document(found, this);
    } catch {
      if (asked !== this.asked) return;
      this.failures += 1;
      this.on.lost();
    }
    if (!document.hidden) this.timer = setTimeout(() => this.ask(), Math.min(SLOWEST, EVERY * 2 ** this.failures));
  }

  note({ tokens, latency, server }) {
    const last = this.samples.at(-1);
    // another process counts from zero
    if (last && (server.uptime_s < last.uptime || (tokens?.generated ?? 0) < last.generated)) this.samples = [];
    this.samples.push({
      at: performance.now() / 1e3,
      uptime: server.uptime_s,
      generated: tokens?.generated ?? 0,
      first: latency?.first_token ?? { count: 0, seconds: 0 },
      next: latency?.next_token ?? { count: 0, seconds: 0 },
    });
    if (this.samples.length > HISTORY) this.samples.shift();
  }

  // Tokens a second between two neighbours, for the line.
  get rates() {
    return this.samples.slice(1).map((s, i) => (s.generated - this.samples[i].generated) / (s.at - this.samples[i].at));
  }

  // Tokens a second over the last few seconds.
  get rate() {
    const last = this.samples.at(-1);
    const before = this.samples.findLast((s) => last.at - s.at > 2.5) ?? this.samples[0];
    return last === before ? 0 : (last.generated - before.generated) / (last.at - before.at);
  }

  // Mean wait in seconds of the tokens since the page was opened; of all before, where none came since.
  mean(kind) {
    const a = this.samples[0][kind];
    const b = this.samples.at(-1)[kind];
    if (b.count > a.count) return (b.seconds - a.seconds) / (b.count - a.count);
    return b.count ? b.seconds / b.count : null;
  }
}
