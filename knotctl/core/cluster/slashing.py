"""Claimed speed against delivered speed: when a node's claim is a lie, and what it forfeits of what it earned.

Rates are whole milli-tokens a second, so that a verdict can be checked again from its evidence, to the unit.
Source: seed 001, Consequences ("a node claiming 100 tokens/sec but delivering 2 gets slashed").
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from knotctl.core.errors import UsageError, printable

# Fewer measurements than this, or less work in them, prove nothing: a cold cache or one busy second is no lie.
MIN_SAMPLES = 5
MIN_TOKENS = 64
MAX_SAMPLES = 1000
# A node that delivers half of its claim or more is slow, which the planner's weight answers, and no liar.
HONEST_PERCENT = 50


@dataclass(frozen=True, slots=True)
class SpeedSample:
    """One measurement of a node: so many tokens of its benchmark's kind in so many microseconds."""

    tokens: int
    micros: int

    @property
    def rate(self) -> int:
        """Milli-tokens a second."""
        return self.tokens * 1_000_000_000 // self.micros


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a node claimed and what was measured of it, as it is kept. Units: claimed in milli-tokens a second."""

    node_id: str
    claimed: int
    samples: tuple[SpeedSample, ...]

    def __post_init__(self) -> None:
        if self.claimed <= 0 or not 0 < len(self.samples) <= MAX_SAMPLES:
            raise UsageError("bad-evidence", f"evidence against {printable(self.node_id)}: no claim or no measurement")
        if any(s.tokens < 0 or s.micros <= 0 for s in self.samples):
            raise UsageError("bad-evidence", f"evidence against {printable(self.node_id)}: a measurement without time")

    @property
    def delivered(self) -> int:
        """The median rate, which one stall or one lucky burst does not move."""
        rates = sorted(s.rate for s in self.samples)
        return (rates[(len(rates) - 1) // 2] + rates[len(rates) // 2]) // 2

    @property
    def flagged(self) -> bool:
        """Whether this proves that the claim is a lie."""
        enough = len(self.samples) >= MIN_SAMPLES and sum(s.tokens for s in self.samples) >= MIN_TOKENS
        return enough and self.delivered * 100 < self.claimed * HONEST_PERCENT

    def penalty(self, earned: int) -> int:
        """Return what is forfeited of the amount earned under the claim: the part that the node did not deliver."""
        return earned * (self.claimed - self.delivered) // self.claimed if self.flagged else 0

    def to_json(self) -> str:
        """Return the evidence as the text that is kept and compared."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Evidence:
        """Return the evidence that was kept as this text."""
        document: dict[str, Any] = json.loads(text)
        samples = tuple(SpeedSample(**s) for s in document["samples"])
        return cls(document["node_id"], document["claimed"], samples)
