"""A simulation's reports as text for people: a row a figure, a column a policy, and the hours as a strip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from knotctl.core.sizes import format_size

# Hours are drawn as this many characters at the most, the worst hour of each stretch.
_STRIP = 72


def simulation_lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield the report's lines."""
    policies = document["policies"]
    yield (
        f"{document['scenario']}: {document['nodes']:,} nodes, {document['n_layers']} layers, {document['hours']:g} "
        f"simulated hours, seed {document['seed']}"
    )
    yield ""
    rows = [["", *(p["name"] for p in policies)]]
    rows += [[name, *(show(p) for p in policies)] for name, show in _ROWS]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
    for p in policies:
        yield ""
        yield f"{p['name']}, hours from left to right, least copies of a layer at each hour's end (- none):"
        yield f"  {_strip([h['least_copies'] for h in p['hours']])}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "never"
    return f"{value:.0f} s" if value < 6000 else f"{value / 3600:.1f} h"


def _optional(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.4g} {unit}"


_ROWS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("covered first after", lambda p: _seconds(p["first_covered_s"])),
    ("uncovered since", lambda p: _seconds(p["uncovered_s"])),
    ("  the nodes had no room", lambda p: _seconds(p["impossible_s"])),
    ("  a node was not yet missed", lambda p: _seconds(p["unnoticed_s"])),
    ("  every gap was being loaded", lambda p: _seconds(p["loading_s"])),
    ("  some gap was not", lambda p: _seconds(p["neglected_s"])),
    ("outages", lambda p: f"{p['outages']:,}"),
    ("longest outage", lambda p: _seconds(p["longest_outage_s"])),
    ("loads an hour", lambda p: f"{p['loads_per_hour']:,.1f}"),
    ("  of nodes that served", lambda p: f"{p['moves_per_hour']:,.1f}"),
    ("most loads in a minute", lambda p: f"{p['most_loads_in_a_minute']:,}"),
    ("drops", lambda p: f"{p['drops']:,}"),
    ("  that opened a gap", lambda p: f"{p['drops_that_opened_a_gap']:,}"),
    ("loads that timed out", lambda p: f"{p['timeouts']:,}"),
    ("bytes loaded", lambda p: format_size(p["bytes_loaded"])),
    ("liars found", lambda p: f"{p['liars_found']} of {p['liars']}"),
    ("  after", lambda p: _optional(p["found_after_s"], "s")),
    ("copies, least and most", lambda p: f"{p['copies']['least']:,} and {p['copies']['most']:,}"),
    ("slowest layer over median", lambda p: f"{p['balance']:.2f}"),
    ("a token, mean of the hours", lambda p: _optional(p["token_ms"], "ms")),
)


def _strip(counts: list[int]) -> str:
    columns = min(len(counts), _STRIP)
    worst = [min(counts[k * len(counts) // columns : (k + 1) * len(counts) // columns]) for k in range(columns)]
    return "".join("-" if not n else str(n) if n < 10 else "+" for n in worst)
