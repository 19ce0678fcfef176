// Elements and numbers. Text goes in as text: nothing here, or anywhere on the page, parses a string as markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === false || value == null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((c) => c != null));
  return node;
}

export const el = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

// Writes what differs, so that selections and screen readers are left in peace.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function bytes(n) {
  if (n == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) {
    n /= 1024;
    i += 1;
  }
  return `${i && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[i]}`;
}

export const integer = (n) => (n == null ? "–" : n.toLocaleString("en"));

export function rate(n) {
  if (n == null) return "–";
  return n >= 100 || n === 0 ? String(Math.round(n)) : n.toFixed(n >= 1 ? 1 : 2);
}

export function seconds(s) {
  if (s == null) return "–";
  if (s < 0.0995) return `${(s * 1e3).toPrecision(2)} ms`;
  if (s < 1) return `${Math.round(s * 1e3)} ms`;
  if (s < 100) return `${s.toFixed(1)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
}

export const span = ([a, b]) => `${a}:${b}`;
export const spans = (list) => (list ?? []).map(span).join(", ");
