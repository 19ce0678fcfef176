"""What a node says of itself in its heartbeats, for people to see: bytes held, cache levels. Nothing is decided by it.

Source: man knot-service(5), TRACKER.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from knotctl.core.cluster.fields import Fields

# More levels than any node has.
_MAX_LEVELS = 8
_COUNTS = ("hits", "misses", "poisoned", "evictions", "errors", "dropped", "bytes")
_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class Figures:
    """One heartbeat's: bytes by name, and of each cache level its tier and counts."""

    weight_bytes: int
    peak_weight_bytes: int
    kv_bytes: int
    caches: tuple[tuple[str, Mapping[str, int]], ...] = ()


def figures_of(document: object) -> Figures:
    """Return the figures of a heartbeat. Raises: FormatError bad-figures."""
    fields = Fields(document, "figures", "bad-figures")
    held = [fields.integer(name, 0, _MOST) for name in ("weight_bytes", "peak_weight_bytes", "kv_bytes")]
    levels = []
    for i, level in enumerate(fields.items("caches", _MAX_LEVELS)):
        of_level = Fields(level, f"figures: cache {i}", "bad-figures")
        tier = of_level.text("tier")
        levels.append((tier[:32], {name: of_level.integer(name, 0, _MOST) for name in _COUNTS}))
    return Figures(held[0], held[1], held[2], tuple(levels))
