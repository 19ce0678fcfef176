"""Rows of the embedding table by number, read from the knot: near ones in one request, several requests at once."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from knotctl.core.kernels.decode import decode_rows
from knotctl.core.knot.reader import Knot
from knotctl.core.source.base import ByteSource
from knotctl.core.source.cache_counts import CacheCounts
from knotctl.core.spans import ByteRange, VocabSpan
from knotctl.core.tensor.records import RecordKind
from knotctl.core.tensor.views import TensorView, view

Floats = npt.NDArray[np.float32]

# A request to a store takes longer than this much of its answer; a read of a file costs next to nothing.
STORE_GAP_BYTES = 256 << 10
STORE_REQUESTS = 8
# The longest piece that is asked for at once, so that several requests share out a long run.
_MAX_READ_BYTES = 4 << 20


class Row(NamedTuple):
    """A row as its blocks lie in the knot, or as float32."""

    kind: RecordKind
    data: bytes


class RowSource(Protocol):
    """Where rows come from; `counts` are what its levels did, the first asked first."""

    @property
    def counts(self) -> list[CacheCounts]:
        """What each level did; none of the knot itself."""
        ...

    def take(self, rows: Collection[int], known: Container[int] = ()) -> Mapping[int, Row]:
        """Return at least these rows, each one whole and right; `known` ones need not come along.

        Raises: SourceError.
        """
        ...

    def close(self) -> None:
        """Give back what the source holds, pending writes done; not the knot."""
        ...


def embedding_table(knot: Knot) -> TensorView:
    """Return the view of the embedding table. Raises: ModelError."""
    config = knot.header.config
    return view(knot, "token_embd_weight", (config.embedding_rows, config.hidden_size))


def knot_rows(knot: Knot) -> KnotRows:
    """Return the rows straight from a knot, near ones together where the knot is at a store."""
    gap = STORE_GAP_BYTES if "://" in knot.source.name else 0
    return KnotRows(knot.source, embedding_table(knot), gap_bytes=gap)


def decode(table: TensorView, rows: Sequence[Row]) -> Floats:
    """Return the rows' numbers [rows, columns]."""
    out = np.empty((len(rows), table.columns), np.float32)
    stored = [i for i, row in enumerate(rows) if row.kind is RecordKind.STORED]
    if stored:
        out[stored] = decode_rows(table.qtype, b"".join(rows[i].data for i in stored), table.columns)
    for i, row in enumerate(rows):
        if row.kind is RecordKind.FLOATS:
            out[i] = np.frombuffer(row.data, "<f4")
    return out


class KnotRows:
    """Rows straight from the knot. Rows between two wanted ones come along where asking for less costs more.

    They lie between rows of one shard, so they are its rows too: nothing is fetched that is not owned.
    """

    def __init__(self, source: ByteSource, table: TensorView, *, gap_bytes: int = 0) -> None:
        self._source = source
        self._table = table
        self._gap = gap_bytes // table.row_bytes
        # Only where waiting is what reading costs.
        self._threads = ThreadPoolExecutor(STORE_REQUESTS, thread_name_prefix="knot-rows") if gap_bytes else None

    @property
    def counts(self) -> list[CacheCounts]:
        """None: the knot is no cache."""
        return []

    def take(self, rows: Collection[int], known: Container[int] = ()) -> dict[int, Row]:
        """Return at least these rows, and none of the known ones beside. Raises: SourceError."""
        most = max(1, _MAX_READ_BYTES // self._table.row_bytes)
        runs = coalesced(rows, self._gap, most, known)
        found: dict[int, Row] = {}
        several = self._threads is not None and len(runs) > 1
        for part in self._threads.map(self._read, runs) if several and self._threads else map(self._read, runs):
            found.update(part)
        return found

    def close(self) -> None:
        """End the threads."""
        if self._threads:
            self._threads.shutdown(cancel_futures=True)

    def _read(self, run: VocabSpan) -> dict[int, Row]:
        at: ByteRange = self._table.row_range(run.start, run.end)
        data, size = self._source.read(at.start, len(at)), self._table.row_bytes
        return {
            row: Row(RecordKind.STORED, data[i * size : (i + 1) * size])
            for i, row in enumerate(range(run.start, run.end))
        }


def coalesced(rows: Collection[int], gap: int, most: int, known: Container[int] = ()) -> list[VocabSpan]:
    """Return runs that hold the rows, at most `most` in each.

    Two are in one run where at most `gap` others lie between them, none of which is known.
    """
    runs: list[VocabSpan] = []
    for row in sorted(set(rows)):
        near = runs and row - runs[-1].end <= gap and row + 1 - runs[-1].start <= most
        if near and not any(between in known for between in range(runs[-1].end, row)):
            runs[-1] = VocabSpan(runs[-1].start, row + 1)
        else:
            runs.append(VocabSpan(row, row + 1))
    return runs
