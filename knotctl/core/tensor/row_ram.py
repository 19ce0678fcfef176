"""The memory level of the row cache: records of rows, the least recently used given up when the budget is full.

Rows are all alike and each use is a reason to expect the next, so LRU is right here; the layers' tensors are swept in
a cycle, where it is wrong (`layer_policy.py`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from knotctl.core.source.cache_counts import CacheCounts

DEFAULT_BUDGET = 256 << 20
# A dictionary's slot, a key and a bytes object: what an entry costs beside its record, measured with tracemalloc.
ENTRY_OVERHEAD = 200


class RamRows:
    """Records by row number. Units: budget in bytes, overhead counted."""

    def __init__(self, budget: int, counts: CacheCounts) -> None:
        self.budget = budget
        self.counts = counts
        self._records: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, row: object) -> bool:
        return row in self._records

    def get(self, row: int) -> bytes | None:
        """Return a row's record, unchecked, and make it the last to go."""
        with self._lock:
            record = self._records.get(row)
            if record is not None:
                self._records.move_to_end(row)
            return record

    def put(self, row: int, record: bytes) -> None:
        """Keep a record; those used longest ago go where the budget is full."""
        size = len(record) + ENTRY_OVERHEAD
        if size > self.budget:
            return
        with self._lock:
            self._forget(row)
            self._records[row] = record
            self.counts.bytes += size
            while self.counts.bytes > self.budget:
                self._forget(next(iter(self._records)))
                self.counts.add("evictions")

    def delete(self, rows: Iterable[int]) -> int:
        """Forget rows; returns how many were there."""
        with self._lock:
            return sum(self._forget(row) for row in rows)

    def clear(self) -> int:
        """Forget all rows; returns how many were there."""
        with self._lock:
            count = len(self._records)
            self._records.clear()
            self.counts.bytes = 0
            return count

    def _forget(self, row: int) -> bool:
        record = self._records.pop(row, None)
        if record is not None:
            self.counts.bytes -= len(record) + ENTRY_OVERHEAD
        return record is not None
