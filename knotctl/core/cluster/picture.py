"""The coverage map as text: layers across, nodes down; for terminals and logs."""

from __future__ import annotations

from collections.abc import Sequence

from knotctl.core.cluster.document import with_rows
from knotctl.core.cluster.planner import Plan
from knotctl.core.cluster.steps import stages_of
from knotctl.core.spans import LayerSpan

WIDTH = 64
MOST_ROWS = 40
# Characters of a route, a copy, an empty place and a gap.
BLOCKS, PLAIN = ("█", "▒", "·", "✗"), ("#", "=", ".", "!")


def picture(plan: Plan, *, blocks: tuple[str, str, str, str] = BLOCKS, width: int = WIDTH) -> list[str]:
    """Return the lines of the picture; of many copies the first rows, as the last line says."""
    route_mark, copy_mark, none, gap = blocks
    scale = _Scale(plan.model.n_layers, width)
    stages = {c.node_id: span for c, span in plan.route or stages_of(plan.placement)}
    shown, hidden = with_rows(plan, MOST_ROWS)
    label = max([6, *(min(24, len(p.capacity.node_id)) for p in shown)])
    lines = [f"{'':{label}}  {scale.ruler()}"]
    for p in shown:
        node_id, own = p.capacity.node_id, stages.get(p.capacity.node_id)
        cells = [
            route_mark if own and scale.touches(own, k) else copy_mark if scale.touches(p.span, k) else none
            for k in range(scale.columns)
        ]
        lines.append(f"{_cut(node_id, label):{label}}  {''.join(cells)}  {p.span}")
    counts = plan.placement.coverage.counts
    cells = [_digit(min(counts[scale.first(k) : scale.end(k)]), gap) for k in range(scale.columns)]
    lines.append(f"{'copies':{label}}  {''.join(cells)}")
    if hidden:
        lines.append(f"{'':{label}}  {len(hidden):,} nodes without a row of their own hold copies")
    return lines


def _digit(count: int, gap: str) -> str:
    return gap if not count else str(count) if count < 10 else "+"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


class _Scale:
    """Columns of a picture: several a layer where there is room, else several layers a column."""

    def __init__(self, n_layers: int, width: int) -> None:
        self.n_layers = n_layers
        self.columns = n_layers * (width // n_layers) if n_layers <= width else width

    def first(self, column: int) -> int:
        return column * self.n_layers // self.columns

    def end(self, column: int) -> int:
        return max(self.first(column) + 1, (column + 1) * self.n_layers // self.columns)

    def touches(self, span: LayerSpan, column: int) -> bool:
        return span.start < self.end(column) and self.first(column) < span.end

    def ruler(self) -> str:
        """Layer numbers above their columns."""
        line = [" "] * (self.columns + 6)
        for layer in ticks(self.n_layers):
            at = layer * self.columns // self.n_layers
            line[at : at + len(str(layer))] = str(layer)
        return "".join(line).rstrip()


def ticks(n_layers: int) -> Sequence[int]:
    """Return the layers that an axis names: round steps, and the last where it does not touch another."""
    step = next(s * 10**e for e in range(6) for s in (1, 2, 5) if n_layers <= 8 * s * 10**e)
    marks = list(range(0, n_layers, step))
    if len(marks) > 1 and n_layers - marks[-1] < step * 0.6:
        marks.pop()
    return [*marks, n_layers]
