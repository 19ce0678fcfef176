"""A byte source over a layer warden: a knot's bytes from the warden where it holds them, else from the store itself.

Stations and their residency read it like any source. What the warden holds is mapped where both are on one machine,
and fetched over HTTP where not; either way a tensor is compared with its digest before it is used, and what differs
is forgotten by the warden and read from the store.
"""

from __future__ import annotations

import ssl
import threading
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise

from knotctl.core.errors import KnotctlError, SourceError
from knotctl.core.knot.entry import TensorEntry
from knotctl.core.knot.reader import Knot
from knotctl.core.source.base import check_range
from knotctl.core.source.cache_counts import CacheCounts
from knotctl.core.spans import ByteRange, LayerSpan
from knotctl.core.tensor.digests import ChunkDigests, check_tensors
from knotctl.core.tensor.segments import map_segment
from knotctl.core.tensor.warden_client import WardenClient

# A warden that hands out bad bytes of a run so often has bad memory, or worse: it is not asked for that run again.
_MAX_REJECTED = 3


class _Run:
    """A run of tensors that the warden holds; `data` once it is mapped here."""

    def __init__(self, span: ByteRange, entries: list[TensorEntry]) -> None:
        self.range = span
        self.entries = entries
        self.data: memoryview | None = None
        self.mappable = True
        self.rejected = 0
        self.lock = threading.Lock()


class WardenSource:
    """The bytes of a knot, its held tensors from the warden. `counts` are of reads: hits came from the warden."""

    def __init__(self, knot: Knot, client: WardenClient) -> None:
        self._knot = knot
        self._inner = knot.source
        self._client = client
        self.name = knot.source.name
        self.size = knot.source.size
        self.identity = knot.source.identity
        self.counts = CacheCounts("warden")
        self._runs: list[_Run] = []
        self._starts: list[int] = []
        self._known = False
        self._chunks = ChunkDigests(knot)
        self._lock = threading.Lock()

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`. Raises: SourceError."""
        check_range(self.name, self.size, offset, length)
        out = bytearray(length)
        self.read_into(offset, memoryview(out))
        return bytes(out)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` wholly with the bytes from `offset`. Raises: SourceError."""
        view = out.cast("B")
        check_range(self.name, self.size, offset, len(view))
        for part, run in self._split(ByteRange(offset, offset + len(view))):
            piece = view[part.start - offset : part.end - offset]
            if run is None:
                self._inner.read_into(part.start, piece)
            elif self._from_warden(run, part, piece):
                self.counts.add("hits")
            else:
                self.counts.add("misses")
                self._inner.read_into(part.start, piece)

    def view(self, offset: int, length: int) -> memoryview | None:
        """Return bytes as they lie in the warden's memory, without a copy; None where they are not mapped here.

        They stay as they are for as long as somebody holds the view, whatever becomes of the warden.
        """
        part = ByteRange(offset, offset + length)
        run = self._run_at(offset)
        if run is None or part.end > run.range.end or not self._mapped(run):
            return None
        assert run.data is not None
        self.counts.add("hits")
        return run.data[part.start - run.range.start : part.end - run.range.start]

    def close(self) -> None:
        """Close the warden's connections and the store."""
        self._client.close()
        self._inner.close()

    def _split(self, span: ByteRange) -> Iterator[tuple[ByteRange, _Run | None]]:
        """Yield the parts of a range with the run that each lies in, None for what the warden does not hold."""
        at = span.start
        while at < span.end:
            run = self._run_at(at)
            if run is not None:
                end = min(run.range.end, span.end)
            else:
                i = bisect_right(self._starts, at)
                end = min(self._starts[i], span.end) if i < len(self._starts) else span.end
            yield ByteRange(at, end), run
            at = end

    def _run_at(self, offset: int) -> _Run | None:
        if not self._known:
            self._learn()
        i = bisect_right(self._starts, offset) - 1
        return self._runs[i] if i >= 0 and offset in self._runs[i].range else None

    def _learn(self) -> None:
        """Ask what the warden holds: fixed for as long as it is the same warden."""
        with self._lock:
            if self._known:
                return
            document = self._client.attempt(lambda: self._client.get_json("/segments"))
            if document is None:
                return
            entries = {e.name: e for e in self._knot.header.tensors}
            runs = []
            for item in document.get("segments", ()):
                names = item.get("tensors") if isinstance(item, dict) else None
                # Where they lie is the knot's to say; the warden only says which.
                if not isinstance(names, list) or not names or not all(n in entries for n in names):
                    continue
                run = [entries[n] for n in names]
                if all(a.end == b.offset for a, b in pairwise(run)):
                    span = self._knot.header.range_of(run[0]).start, self._knot.header.range_of(run[-1]).end
                    runs.append(_Run(ByteRange(*span), run))
            runs.sort(key=lambda r: r.range)
            if all(a.range.end <= b.range.start for a, b in pairwise(runs)):
                self._runs, self._starts = runs, [r.range.start for r in runs]
            self._known = True

    def _from_warden(self, run: _Run, part: ByteRange, out: memoryview) -> bool:
        rejected = run.rejected
        if self._mapped(run):
            assert run.data is not None
            out[:] = run.data[part.start - run.range.start : part.end - run.range.start]
            return True
        # Where mapping it was what found it bad, the warden may not have forgotten it yet.
        return run.rejected == rejected and all(self._fetch(run, entry, part, out) for entry in run.entries)

    def _mapped(self, run: _Run) -> bool:
        """Map the run where it can be, once; say whether it is."""
        with run.lock:
            if run.data is None and run.mappable and run.rejected < _MAX_REJECTED:
                self._map(run)
            return run.data is not None

    def _map(self, run: _Run) -> None:
        first = run.entries[0].name
        answer = self._client.attempt(lambda: (self._client.get_json(f"/segments/{first}"),))
        if answer is None:
            return  # it may be back for the next sweep
        name = (answer[0] or {}).get("name")
        data = map_segment(name, len(run.range)) if isinstance(name, str) else None
        if data is None:
            run.mappable = False  # another machine, or another user: over HTTP from now on
            return
        try:
            check_tensors(self._knot, run.entries, run.range, data)
        except SourceError:
            self._reject(run, run.entries[0])
            return
        run.data = data

    def _fetch(self, run: _Run, entry: TensorEntry, part: ByteRange, out: memoryview) -> bool:
        """Fill the part of `out` that a tensor takes, over HTTP; say whether that went well."""
        if run.rejected >= _MAX_REJECTED:
            return False
        whole = self._knot.header.range_of(entry)
        start, end = max(whole.start, part.start), min(whole.end, part.end)
        if start >= end:
            return True
        piece = out[start - part.start : end - part.start]
        path, first = f"/tensors/{entry.name}", start - whole.start
        if not self._client.attempt(lambda: self._client.read_into(path, first, piece)):
            self.counts.add("errors")
            return False
        try:
            if len(piece) == entry.length:
                check_tensors(self._knot, [entry], whole, piece)
            else:
                self._chunks.check(start, piece)
        except KnotctlError:
            self._reject(run, entry)
            return False
        return True

    def _reject(self, run: _Run, entry: TensorEntry) -> None:
        """Have the warden forget what was found bad: it would be served for ever."""
        run.rejected += 1
        self.counts.add("poisoned")
        self._client.invalidate(f"/invalidate/{entry.name}")


def behind_warden(
    knot: Knot, url: str, span: LayerSpan, *, token: str | None = None, tls: ssl.SSLContext | None = None
) -> Knot:
    """Return the knot with a layer warden in front of its source; closing it closes both.

    Raises: WrongIdentity, UsageError bad-warden.
    """
    return Knot(knot.header, WardenSource(knot, WardenClient(url, "layer", knot, span, token=token, tls=tls)))
