"""Rows from a row warden, with the knot behind it: what the warden gets wrong is told to it and read from there."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping

from knotctl.core.source.cache_counts import CacheCounts
from knotctl.core.tensor.records import RecordKind, open_record, split_records
from knotctl.core.tensor.rows import Row, RowSource
from knotctl.core.tensor.views import TensorView
from knotctl.core.tensor.warden_client import WardenClient

# A row that the warden has to fetch for us, among others that it fetches at once.
_COLD_ROW_SECONDS = 0.02
# What a warden takes at once: more than a prompt has distinct rows of one shard.
ROWS_AT_ONCE = 4096
# And what is asked for at once: well below the largest answer that a call takes.
_REPLY_BYTES = 32 << 20


class WardenRows:
    """The rows of a shard from its host's warden."""

    def __init__(self, client: WardenClient, knot_id: str, table: TensorView, below: RowSource) -> None:
        self._counts = CacheCounts("warden")
        self._client = client
        self._id = bytes.fromhex(knot_id)
        self._below = below
        self._lengths = {RecordKind.STORED: table.row_bytes, RecordKind.FLOATS: table.columns * 4}

    @property
    def counts(self) -> list[CacheCounts]:
        """What the warden was good for."""
        return [self._counts]

    def take(self, rows: Collection[int], known: Container[int] = ()) -> Mapping[int, Row]:
        """Return at least these rows. Raises: SourceError where the knot cannot be read either."""
        found: dict[int, Row] = {}
        asked = sorted(set(rows))
        step = min(ROWS_AT_ONCE, max(1, _REPLY_BYTES // max(self._lengths.values())))
        for at in range(0, len(asked), step):
            found |= self._ask(asked[at : at + step])
        self._counts.add("hits", len(found))
        left = [row for row in asked if row not in found]
        self._counts.add("misses", len(left))
        return found | dict(self._below.take(left, known)) if left else found

    def close(self) -> None:
        """Close the warden's connections and what lies below."""
        self._client.close()
        self._below.close()

    def _ask(self, rows: list[int]) -> dict[int, Row]:
        reply = self._client.attempt(
            lambda: split_records(
                self._client.post("/tensors", {"rows": rows}, extra_seconds=len(rows) * _COLD_ROW_SECONDS), len(rows)
            )
        )
        if reply is None:
            self._counts.add("errors")
            return {}
        found = {}
        for kind, row, record in reply:
            data = open_record(record, kind, self._id, row, self._lengths[kind])
            if data is not None:
                found[row] = Row(kind, data)
        # A row that did not come is as bad as a wrong one: without this it would be asked for, for ever.
        if bad := [row for row in rows if row not in found]:
            self._counts.add("poisoned", len(bad))
            self._client.invalidate("/invalidate", {"rows": bad})
        return {row: found[row] for row in rows if row in found}
