"""The plan as a picture to hang on a wall: layers across, nodes down, the way of a token drawn through them.

One SVG file by itself: no script, no font or colour from elsewhere, light or dark as the viewer prefers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from textwrap import wrap
from xml.sax.saxutils import escape

from knotctl.core.cluster.document import idle, with_rows
from knotctl.core.cluster.explain import warnings_of
from knotctl.core.cluster.picture import ticks
from knotctl.core.cluster.placement import Place
from knotctl.core.cluster.planner import Plan
from knotctl.core.cluster.speed import SECOND, time_text
from knotctl.core.cluster.steps import stages_of
from knotctl.core.sizes import format_size
from knotctl.core.spans import LayerSpan

# Units: pixels of the picture's own grid.
_WIDTH, _LEFT, _RIGHT, _TOP = 1280, 200, 290, 132
_ROW, _BAR = 40, 26
_MOST_ROWS = 36
_MOST_WARNINGS = 4

# What is painted -> (property, light, dark). Viewers that know no media queries, such as printers, show the light one.
_COLOURS = {
    "text": ("fill", "#1a2230", "#e8ecf3"),
    ".paper": ("fill", "#ffffff", "#11151d"),
    ".soft": ("fill", "#667085", "#97a3b6"),
    ".grid": ("stroke", "#e4e7ec", "#2a3342"),
    ".free": ("fill", "#eef1f5", "#1f2733"),
    ".route": ("fill", "#2456c9", "#6f9bff"),
    ".on-route": ("fill", "#ffffff", "#0b1220"),
    ".copy": ("fill", "#b9cdf6", "#2c426f"),
    ".on-copy": ("fill", "#1b3a86", "#d5e2ff"),
    ".kv": ("fill", "#e9a23b", "#d9952f"),
    ".gap-text": ("fill", "#c8322b", "#ff7b72"),
    ".gap": ("stroke", "#c8322b", "#ff7b72"),
    ".hatch-ground": ("fill", "#fbe3e1", "#3a1d1f"),
    ".hatch-line": ("stroke", "#e59a94", "#8f3b39"),
    ".hop": ("stroke", "#1a2230", "#e8ecf3"),
    ".tip": ("fill", "#1a2230", "#e8ecf3"),
}
_SHAPES = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
.title { font-size: 26px; font-weight: 650; } .sub { font-size: 15px; } .name, .gap-text { font-weight: 600; }
.end { text-anchor: end; } .mid { text-anchor: middle; } .gap { fill: url(#hatch); }
.hop { fill: none; stroke-width: 1.6; } .hatch-line { stroke-width: 3; }
"""


def _style() -> str:
    light, dark = (
        "\n".join(f"{what} {{ {rule[0]}: {rule[shade]}; }}" for what, rule in _COLOURS.items()) for shade in (1, 2)
    )
    return f"{_SHAPES}{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def svg_of(plan: Plan) -> str:
    """Return the SVG document of a plan; the same plan gives the same bytes."""
    return _Picture(plan).document()


class _Picture:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.n = plan.model.n_layers
        self.coverage = plan.placement.coverage
        self.route = {c.node_id: span for c, span in plan.route or stages_of(plan.placement)}
        self.shown, self.hidden = with_rows(plan, _MOST_ROWS)
        self.notes = list(self.remarks())
        self.lanes = _TOP + 64
        self.foot = self.lanes + _ROW * len(self.shown) + (90 if self.hidden else 10)

    def x(self, layer: float) -> float:
        return round(_LEFT + layer * (_WIDTH - _LEFT - _RIGHT) / self.n, 1)

    def document(self) -> str:
        body = "\n".join(
            [*self.heading(), *self.grid(), *self.copies(), *self.rows(), *self.hops(), *self.crowd(), *self.footer()]
        )
        height = self.foot + 44 + 20 * len(self.notes) + 12
        name = escape(self.plan.model.name)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" role="img">\n<title>Coverage of {name}</title>\n'
            f"<desc>{escape(self.summary())}</desc>\n<style>{_style()}</style>\n"
            '<defs><pattern id="hatch" width="10" height="10" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect class="hatch-ground" width="10" height="10"/>'
            '<line class="hatch-line" x1="0" y1="0" x2="0" y2="10"/></pattern></defs>\n'
            f'<rect class="paper" width="{_WIDTH}" height="{height}"/>\n{body}\n</svg>\n'
        )

    def summary(self) -> str:
        plan = self.plan
        if plan.times is None or plan.route is None:
            count = self.coverage.gap_layers
            return f"{count} of {self.n} layers have no node: the model cannot be served"
        token, first = time_text(plan.times.token), time_text(plan.times.first_token)
        stages = len(plan.route)
        way = "one node" if stages == 1 else f"{stages} nodes"
        return (
            f"{token} a token ({SECOND / plan.times.token:.3g} tokens/s) through {way}, "
            f"{first} to the first token of a prompt of {plan.policy.prompt_tokens}"
        )

    def heading(self) -> Iterator[str]:
        plan = self.plan
        kinds = sorted({p.capacity.quantization for p in plan.placement.places.values()})
        yield _text(40, 56, f"{plan.model.name}", "title")
        facts = f"{self.n} layers · {len(plan.placement.places)} of {len(plan.nodes)} nodes hold layers"
        facts += f" · {', '.join(kinds)}" if kinds else ""
        yield _text(40, 82, facts, "sub soft")
        yield _text(40, 106, self.summary(), "sub" if plan.covered else "sub gap-text")

    def copies(self) -> Iterator[str]:
        """The coverage map: a strip above the lanes, its height the number of copies."""
        y = _TOP + 28
        yield _text(_LEFT - 16, y + 14, "copies", "soft end")
        most = max(self.coverage.counts)
        for span, count in self.coverage.runs():
            x, width = self.x(span.start), self.x(span.end) - self.x(span.start)
            if count:
                height = round(15 + 7 * count / most, 1)
                yield f'<rect class="route" x="{x}" y="{y + 22 - height}" width="{width:.1f}" height="{height}"/>'
                if width > 12 + 7 * len(str(count)):
                    yield _text(x + width / 2, y + 17, str(count), "on-route mid")
        yield _text(_WIDTH - _RIGHT + 20, y + 14, "memory", "soft")

    def grid(self) -> Iterator[str]:
        bottom = self.lanes + _ROW * len(self.shown) - 8
        yield _text(_LEFT - 16, _TOP + 16, "layer", "soft end")
        for layer in ticks(self.n):
            x = self.x(layer)
            yield f'<line class="grid" x1="{x}" y1="{_TOP + 22}" x2="{x}" y2="{bottom}"/>'
            yield _text(x, _TOP + 16, str(layer), "soft mid")
        for gap in self.coverage.gaps():
            x, width = self.x(gap.start), self.x(gap.end) - self.x(gap.start)
            height = max(30, bottom - _TOP - 26)
            yield f'<rect class="gap" x="{x}" y="{_TOP + 26}" width="{width:.1f}" height="{height}" rx="4"/>'
            if width > 60:
                yield _text(x + width / 2, _TOP + 46, f"gap {gap}", "gap-text mid")

    def rows(self) -> Iterator[str]:
        for i, place in enumerate(self.shown):
            yield from self.row(place, self.lanes + i * _ROW)

    def row(self, place: Place, y: int) -> Iterator[str]:
        c, span = place.capacity, place.span
        own = self.route.get(c.node_id)
        kind = "route" if own else "copy"
        yield "<g>"
        tip = f"{c.node_id}: layers {span} at {c.quantization}; {place.why}"
        yield f"<title>{escape(tip)}</title>"
        yield _text(_LEFT - 16, y + 18, _cut(c.node_id, 22), "name end")
        if own and own != span:
            yield self.bar(span, y, "copy")
        shown = own or span
        yield self.bar(shown, y, kind)
        width = self.x(shown.end) - self.x(shown.start)
        inside = [f"{shown} · {time_text(c.time_of(shown))}", str(shown), ""]
        label = next(t for t in inside if len(t) * 7.4 + 8 < width or not t)
        yield _text((self.x(shown.start) + self.x(shown.end)) / 2, y + 18, label, f"on-{kind} mid")
        if not label and shown.end < 0.9 * self.n:
            yield _text(self.x(shown.end) + 6, y + 18, str(shown), "soft")
        elif not label:
            yield _text(self.x(shown.start) - 6, y + 18, str(shown), "soft end")
        yield from self.memory(place, y)
        yield "</g>"

    def bar(self, span: LayerSpan, y: int, kind: str) -> str:
        width = self.x(span.end) - self.x(span.start) - 1
        return f'<rect class="{kind}" x="{self.x(span.start)}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="4"/>'

    def memory(self, place: Place, y: int) -> Iterator[str]:
        c = place.capacity
        total, weights = c.node.vram_bytes, c.bytes_of(place.span.start, place.span.end)
        left, wide = _WIDTH - _RIGHT + 20, 90.0
        kind = "route" if c.node_id in self.route else "copy"
        parts = [("free", wide), ("kv", wide * (weights + c.kv_bytes) / total), (kind, wide * weights / total)]
        for kind, width in parts:
            yield f'<rect class="{kind}" x="{left}" y="{y + 8}" width="{min(width, wide):.1f}" height="10" rx="3"/>'
        yield _text(left + wide + 10, y + 18, f"{format_size(weights)} of {format_size(total)}", "soft")

    def hops(self) -> Iterator[str]:
        """The way of a token: from the end of each stage down or up to the start of the next."""
        lane = {p.capacity.node_id: self.lanes + i * _ROW for i, p in enumerate(self.shown)}
        stages = list(self.plan.route or ())
        for (a, span), (b, _) in pairwise(stages):
            if a.node_id in lane and b.node_id in lane:
                x, y1, y2 = self.x(span.end), lane[a.node_id] + _BAR, lane[b.node_id]
                yield f'<path class="hop" d="M{x} {y1} V{y2 - 5}"/>'
                yield f'<path class="tip" d="M{x - 4} {y2 - 7} h8 l-4 7 z"/>'

    def crowd(self) -> Iterator[str]:
        """The nodes that have no row of their own, as a profile of how many hold each layer."""
        if not self.hidden:
            return
        y, high = self.lanes + _ROW * len(self.shown), 60
        counts = [0] * (self.n + 1)
        for p in self.hidden:
            counts[p.span.start] += 1
            counts[p.span.end] -= 1
        for k in range(1, self.n + 1):
            counts[k] += counts[k - 1]
        most = max(counts[: self.n])
        steps = (f"V{round(y + high - high * counts[k] / most, 1)} H{self.x(k + 1)}" for k in range(self.n))
        yield f'<path class="copy" d="M{self.x(0)} {y + high} {" ".join(steps)} V{y + high} Z"/>'
        yield _text(_LEFT - 16, y + 34, f"{len(self.hidden):,} copies", "name end")
        yield _text(_LEFT - 16, y + 50, f"up to {most:,} a layer", "soft end")

    def footer(self) -> Iterator[str]:
        y = self.foot + 18
        x = 40
        for kind, words in (
            ("route", "on the way of a token"),
            ("copy", "copy"),
            ("gap", "nobody"),
            ("kv", "keys and values"),
        ):
            yield f'<rect class="{kind}" x="{x}" y="{y - 11}" width="14" height="14" rx="3"/>'
            yield _text(x + 20, y, words, "soft")
            x += 44 + round(7.2 * len(words))
        y += 8
        for words, kind in self.notes:
            y += 20
            yield _text(40, y, words, kind)

    def remarks(self) -> Iterator[tuple[str, str]]:
        """The plan's warnings and the nodes without layers, in lines."""
        for w in warnings_of(self.plan)[:_MOST_WARNINGS]:
            kind = "gap-text" if w.code in ("gaps", "forced-drop", "over-full") else "soft"
            for words in wrap(f"{w.code}: {w.message}", 150, subsequent_indent="\u2003"):
                yield words, kind
        if spare := idle(self.plan):
            yield _cut(f"without layers: {', '.join(i for i, _ in spare)}", 150), "soft"


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>' if words else ""


def _cut(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"
