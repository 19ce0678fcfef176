"""What a layer warden keeps: the tensors of a run of layers, a fixed part of them in memory, checked when read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from knotctl.core.errors import UsageError, printable
from knotctl.core.knot.entry import TensorEntry
from knotctl.core.knot.reader import Knot
from knotctl.core.source.cache_counts import CacheCounts
from knotctl.core.spans import ByteRange, LayerSpan
from knotctl.core.tensor.digests import check_tensors
from knotctl.core.tensor.layer_policy import DEFAULT_BUDGET, held_runs, span_tensors
from knotctl.core.tensor.segments import Segment

_PIECE_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class _Place:
    """A run of tensors that is held once somebody asked for one of them."""

    range: ByteRange
    entries: list[TensorEntry]
    segment: Segment | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class LayerCache:
    """The tensors that stations within a span of layers use; safe from many threads."""

    def __init__(self, knot: Knot, span: LayerSpan, budget: int = DEFAULT_BUDGET) -> None:
        self.knot = knot
        self.span = span
        self.budget = budget
        self.counts = CacheCounts("layers")
        phases = span_tensors(knot, span)
        self._entries = {e.name: e for phase in phases for e in phase}
        self._places: dict[str, _Place] = {}
        for run in held_runs(phases, budget):
            first, last = knot.header.range_of(run[0]), knot.header.range_of(run[-1])
            place = _Place(ByteRange(first.start, last.end), run)
            self._places.update(dict.fromkeys((e.name for e in run), place))
        self._lock = threading.Lock()

    @property
    def identity(self) -> str:
        """Whose tensors these are: the model and the layers."""
        return f"{self.knot.id}|{self.span.start}-{self.span.end}"

    @property
    def held(self) -> list[tuple[ByteRange, list[str]]]:
        """The runs that are held, or will be: where they lie in the knot's file, and the tensors in each."""
        return [(p.range, [e.name for e in p.entries]) for p in dict.fromkeys(self._places.values())]

    def entry(self, name: str) -> TensorEntry:
        """Return what the header says of a tensor of the span. Raises: UsageError not-found."""
        if name not in self._entries:
            raise UsageError("not-found", f"tensor {printable(name, 128)!r}: not one of layers {self.span}")
        return self._entries[name]

    def segment(self, name: str) -> Segment | None:
        """Return the segment that holds a tensor, read now where it is not there; None where the policy holds it not.

        Raises: UsageError not-found; SourceError, also where the bytes are not those that were encoded.
        """
        self.entry(name)
        place = self._places.get(name)
        if place is None:
            self.counts.add("misses")
            return None
        with place.lock:
            self.counts.add("misses" if place.segment is None else "hits")
            if place.segment is None:
                place.segment = Segment(place.range, lambda out: self._fill(place, out))
                with self._lock:
                    self.counts.bytes += len(place.range)
            return place.segment

    def pieces(self, name: str, part: ByteRange | None = None) -> Iterator[memoryview]:
        """Yield a tensor's bytes, or a part of them counted from its start, piece by piece.

        Raises: UsageError not-found, out-of-range; SourceError.
        """
        entry = self.entry(name)
        part = ByteRange(0, entry.length) if part is None else part
        if part.end > entry.length:
            raise UsageError("out-of-range", f"tensor {entry.name}: bytes {part}: it has {entry.length}")
        whole = self.knot.header.range_of(entry)
        span = ByteRange(whole.start + part.start, whole.start + part.end)
        segment = self.segment(name)
        for start in range(span.start, span.end, _PIECE_BYTES):
            piece = ByteRange(start, min(start + _PIECE_BYTES, span.end))
            if segment is not None:
                yield segment.part(piece)
            else:
                yield memoryview(self.knot.source.read(piece.start, len(piece)))

    def invalidate(self, name: str) -> bool:
        """Forget a tensor, and those held in one piece with it; returns whether it was in memory.

        Raises: UsageError not-found.
        """
        self.entry(name)
        place = self._places.get(name)
        if place is None:
            return False
        with place.lock:
            segment, place.segment = place.segment, None
            if segment is None:
                return False
            segment.close()
            self.counts.add("poisoned")
            with self._lock:
                self.counts.bytes -= len(place.range)
            return True

    def close(self) -> None:
        """Forget everything; not the knot."""
        for place in dict.fromkeys(self._places.values()):
            with place.lock:
                segment, place.segment = place.segment, None
                if segment is not None:
                    segment.close()
        with self._lock:
            self.counts.bytes = 0

    def _fill(self, place: _Place, out: memoryview) -> None:
        self.knot.source.read_into(place.range.start, out)
        check_tensors(self.knot, place.entries, place.range, out)
