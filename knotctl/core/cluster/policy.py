"""The rules of planning as numbers: each has a default with its reason, and a range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from knotctl.core.cluster.fields import Fields
from knotctl.core.cluster.layers import MAX_BYTES
from knotctl.core.cluster.speed import SECOND

# Field -> (least, most); the kind of number is the default's.
RANGES: dict[str, tuple[float, float]] = {
    "kv_headroom": (0, 0.95), "kv_bytes": (0, MAX_BYTES), "hop_ms": (0, 60_000), "link_mbit": (0.001, 1e6),
    "prompt_tokens": (1, 1 << 20), "prefill_speedup": (1, 10_000), "hysteresis": (0, 10), "level": (1, 1000),
    "monitor_s": (1, 3600), "improve_s": (1, 86_400), "directive_timeout_s": (1, 86_400), "load_patience": (1, 1000),
    "hold_down_s": (0, 3600), "hold_down_most_s": (0, 86_400), "stable_s": (1, 86_400 * 7),
    "moves_per_minute": (1, 1e6), "lie_ratio": (0, 1),
}  # fmt: skip
CHOICES: dict[str, tuple[str, ...]] = {
    "precision": ("smallest", "finest"),
    "spare": ("hotspots", "copies"),
    "rebalance": ("continuous", "static"),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """How to plan, and how to act over time. Units: as the names say; kv_headroom a share of a node's memory."""

    # Memory. A node that runs out of KV in the middle of a request loses it: so a fifth is never filled with weights.
    kv_headroom: float = 0.2
    kv_bytes: int | None = None  # a fixed reserve on every node, in place of the share
    # smallest: each node at its smallest quantisation, which covers with the fewest nodes and decodes fastest;
    # finest: the finest of its quantisations in which the layers it was given still fit.
    precision: str = "smallest"

    # Prediction.
    hop_ms: float = 5.0  # from node to node within a site or a town; 30 to 100 over an ocean
    link_mbit: float = 1000.0
    prompt_tokens: int = 512
    prefill_speedup: float = 5.0  # prompt tokens a second over decoded ones, where a node says none; measured on CPUs

    # Changes. A move costs a download and a stage's caches: it must buy a tenth of the time of a token.
    hysteresis: float = 0.1
    spare: str = "hotspots"  # what spare nodes copy first: the slowest layers, or those with the fewest copies
    level: float = 2.0  # a copy moves where layers are this many times slower than without it at its old place

    # Over time.
    rebalance: str = "continuous"  # or static: assigned once at registration, for comparison
    monitor_s: float = 30.0
    improve_s: float = 600.0
    # A LOAD may take so many times what the link allows, and so much longer; then its node has failed.
    load_patience: float = 3.0
    directive_timeout_s: float = 60.0
    hold_down_s: float = 30.0  # of a node that left soon after it came; doubles each time
    hold_down_most_s: float = 3600.0
    stable_s: float = 600.0  # up for this long, a node's past is forgotten
    moves_per_minute: int = 60  # LOAD directives; gaps go first and may take all, everything else half
    lie_ratio: float = 0.5  # delivers less than this share of its claim: flagged

    @property
    def link_bytes_per_s(self) -> float:
        """Bytes a second between nodes, and from the store to a node."""
        return self.link_mbit * 1e6 / 8

    def hop(self, hidden_size: int, tokens: int = 1) -> int:
        """Return the time from stage to stage: latency and the float32 hidden states of so many tokens."""
        return round(SECOND * (self.hop_ms / 1000 + tokens * hidden_size * 4 / self.link_bytes_per_s))

    def reserve(self, vram_bytes: int) -> int:
        """Return the bytes of a node's memory that are kept for keys and values."""
        return min(vram_bytes, round(vram_bytes * self.kv_headroom) if self.kv_bytes is None else self.kv_bytes)

    def changed(self, document: object, place: str) -> Policy:
        """Return this policy with the fields of a JSON object in place of its own. Raises: FormatError bad-policy."""
        given = Fields(document, place, "bad-policy")
        values: dict[str, Any] = {}
        for field in fields(self):
            if not given.has(field.name):
                given.drop((field.name,))
            elif field.name in CHOICES:
                values[field.name] = given.choice(field.name, CHOICES[field.name], "")
            elif isinstance(field.default, float):
                values[field.name] = given.number(field.name, *RANGES[field.name])
            else:
                low, high = RANGES[field.name]
                values[field.name] = given.integer(field.name, int(low), int(high))
        given.done([f.name for f in fields(self)])
        return replace(self, **values)

    def to_json(self) -> Mapping[str, Any]:
        """Return every number by its name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
