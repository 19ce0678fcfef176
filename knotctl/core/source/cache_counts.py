"""What a level of a cache did so far, for metrics: hits, misses, and entries found bad."""

from __future__ import annotations

import threading
from typing import Literal

Count = Literal["hits", "misses", "poisoned", "evictions", "errors", "dropped"]
COUNTS: tuple[Count, ...] = ("hits", "misses", "poisoned", "evictions", "errors", "dropped")


class CacheCounts:
    """Counts of one level (`tier` in metrics), and the bytes that it holds.

    `poisoned` entries were found bad when read, and deleted; `errors` are failures of what lies behind the level, and
    `dropped` writes that were given up.
    """

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.bytes = 0
        self._counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self._lock = threading.Lock()

    def add(self, name: Count, amount: int = 1) -> None:
        """Count so many more."""
        with self._lock:
            self._counts[name] += amount

    def __getitem__(self, name: Count) -> int:
        return self._counts[name]

    def to_json(self) -> dict[str, int]:
        """Return all counts and the bytes held, by name."""
        return {**self._counts, "bytes": self.bytes}
