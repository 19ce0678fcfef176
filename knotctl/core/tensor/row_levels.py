"""The row cache: memory, then the key-value level, then whatever lies below; every entry is checked on every read.

Memory holds rows as they lie in the knot (a 7B's takes 2 KiB), as memory is precious and decoding cheap; the key-value
level holds float32 (14 KiB), for whoever reads it. A row that comes from there stays float32 in memory.
Source: seed 000 section 4.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future

from knotctl.core.source.cache_counts import CacheCounts
from knotctl.core.source.kv import KeyValue
from knotctl.core.source.kv_guard import GuardedKv
from knotctl.core.tensor.records import RecordKind, encode_record, open_record
from knotctl.core.tensor.row_ram import DEFAULT_BUDGET, RamRows
from knotctl.core.tensor.rows import Row, RowSource, decode
from knotctl.core.tensor.views import TensorView


class RowLevels:
    """Rows of one knot's embedding table through two levels; safe from many threads, a row is fetched once for all."""

    def __init__(
        self,
        knot_id: str,
        table: TensorView,
        below: RowSource,
        *,
        budget: int = DEFAULT_BUDGET,
        kv: KeyValue | None = None,
    ) -> None:
        self._id = bytes.fromhex(knot_id)
        self._prefix = f"knotctl:row:{knot_id}:f32:".encode()
        self._table = table
        self._below = below
        self.ram = RamRows(budget, CacheCounts("ram"))
        self.kv = None if kv is None else GuardedKv(kv, CacheCounts("kv"))
        self._lengths = {RecordKind.STORED: table.row_bytes, RecordKind.FLOATS: table.columns * 4}
        self._coming: dict[int, Future[Mapping[int, Row]]] = {}
        self._lock = threading.Lock()

    @property
    def counts(self) -> list[CacheCounts]:
        """What each level did."""
        return [self.ram.counts, *([self.kv.counts] if self.kv else []), *self._below.counts]

    def take(self, rows: Collection[int], known: Container[int] = ()) -> dict[int, Row]:
        """Return at least these rows. Raises: SourceError."""
        found: dict[int, Row] = {}
        missing = []
        for row in dict.fromkeys(rows):
            if (entry := self._from_ram(row)) is None:
                missing.append(row)
            else:
                found[row] = entry
        self.ram.counts.add("hits", len(found))
        self.ram.counts.add("misses", len(missing))
        return found | self._bring(missing) if missing else found

    def record(self, row: int, entry: Row) -> bytes:
        """Return a row as a record, as a warden hands it out."""
        return encode_record(entry.kind, self._id, row, entry.data)

    def invalidate(self, rows: Iterable[int] | None = None) -> int:
        """Forget rows (None: all in memory) in both levels; returns how many were in memory."""
        if rows is None:
            return self.ram.clear()
        rows = list(rows)
        if self.kv:
            self.kv.delete_later(self._key(row) for row in rows)
        return self.ram.delete(rows)

    def close(self) -> None:
        """Finish the writes to the key-value level, and close it and what lies below."""
        if self.kv:
            self.kv.close()
        self._below.close()

    def _bring(self, missing: Sequence[int]) -> dict[int, Row]:
        """Return rows that are not in memory; those that another thread is bringing are waited for."""
        promise: Future[Mapping[int, Row]] = Future()
        with self._lock:
            theirs = {row: self._coming[row] for row in missing if row in self._coming}
            mine = [row for row in missing if row not in theirs]
            self._coming.update(dict.fromkeys(mine, promise))
        try:
            brought = self._from_below(mine)
        except BaseException as e:
            promise.set_exception(e)
            raise
        else:
            promise.set_result(brought)
        finally:
            with self._lock:
                for row in mine:
                    self._coming.pop(row, None)
        return brought | {row: coming.result()[row] for row, coming in theirs.items()}

    def _from_below(self, rows: Sequence[int]) -> dict[int, Row]:
        # Between the look into memory and here, another thread may have brought them.
        found = {row: entry for row in rows if (entry := self._from_ram(row))}
        if left := [row for row in rows if row not in found]:
            found |= self._from_kv(left)
        if left := [row for row in left if row not in found]:
            fetched = dict(self._below.take(left, self.ram))
            for row in sorted(fetched, key=set(left).__contains__):  # the wanted ones last: they stay longest
                self.ram.put(row, self.record(row, fetched[row]))
            self._keep(left, fetched)
            found |= fetched
        return found

    def _from_ram(self, row: int) -> Row | None:
        record = self.ram.get(row)
        if record is None:
            return None
        entry = self._opened(row, record, RecordKind.STORED) or self._opened(row, record, RecordKind.FLOATS)
        if entry is None:
            self.ram.counts.add("poisoned")
            self.ram.delete([row])
        return entry

    def _from_kv(self, rows: Sequence[int]) -> dict[int, Row]:
        if self.kv is None:
            return {}
        records = self.kv.get_many([self._key(row) for row in rows])
        found, bad = {}, []
        for row in rows:
            if (record := records.get(self._key(row))) is not None:
                entry = self._opened(row, record, RecordKind.FLOATS)
                if entry is None:
                    bad.append(row)
                else:
                    found[row] = entry
                    self.ram.put(row, record)
        if bad:
            self.kv.delete_later(self._key(row) for row in bad)
        self.kv.counts.add("poisoned", len(bad))
        self.kv.counts.add("hits", len(found))
        self.kv.counts.add("misses", len(rows) - len(found))
        return found

    def _keep(self, rows: Sequence[int], fetched: Mapping[int, Row]) -> None:
        """Have the rows written to the key-value level, decoded by its thread: not while somebody waits for them."""
        if self.kv is None:
            return

        def make() -> dict[bytes, bytes]:
            numbers = decode(self._table, [fetched[row] for row in rows]).astype("<f4", copy=False)
            return {
                self._key(row): encode_record(RecordKind.FLOATS, self._id, row, values.tobytes())
                for row, values in zip(rows, numbers, strict=True)
            }

        self.kv.put_later(make)

    def _opened(self, row: int, record: bytes, kind: RecordKind) -> Row | None:
        data = open_record(record, kind, self._id, row, self._lengths[kind])
        return None if data is None else Row(kind, data)

    def _key(self, row: int) -> bytes:
        return self._prefix + str(row).encode()
