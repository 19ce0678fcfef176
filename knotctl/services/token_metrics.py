"""Tokens and the waits for them, as a head and a tracker count them alike.

Source: man knot-service(5), METRICS; Prometheus' naming rules.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST
# Milliseconds of a small model to minutes of a large one on two cores.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class TokenMetrics:
    """What was generated, and how long that was waited for, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._first = Histogram(
            "knot_time_to_first_token_seconds", "From submission to the first token.",
            registry=self.registry, buckets=SECONDS,
        )  # fmt: skip
        self._next = Histogram(
            "knot_time_per_output_token_seconds", "From one token to the next.",
            registry=self.registry, buckets=SECONDS,
        )  # fmt: skip
        self._prompt = Counter("knot_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self._generation = Counter("knot_generation_tokens", "Tokens generated.", registry=self.registry)

    def step(self, seconds: float, *, first: bool) -> None:
        """Note the wait for a token."""
        (self._first if first else self._next).observe(seconds)

    def generated(self, n_prompt: int, n_tokens: int) -> None:
        """Count the tokens of a generation that has ended, however it did."""
        self._prompt.inc(n_prompt)
        self._generation.inc(n_tokens)

    def totals(self) -> dict[str, Any]:
        """Return tokens and waits so far, for the dashboard; rates follow from two of them. Units: seconds."""
        read = self.registry.get_sample_value
        waits = {
            name: {"count": int(read(f"{metric}_count") or 0), "seconds": read(f"{metric}_sum") or 0}
            for name, metric in (
                ("first_token", "knot_time_to_first_token_seconds"),
                ("next_token", "knot_time_per_output_token_seconds"),
            )
        }
        # those of requests that still run are counted too, unlike in knot_generation_tokens_total
        generated = sum(wait["count"] for wait in waits.values())
        tokens = {"prompt": int(read("knot_prompt_tokens_total") or 0), "generated": generated}
        return {"tokens": tokens, "latency": waits}

    def exposition(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self.registry)
