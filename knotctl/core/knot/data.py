"""The payload against its digests, each byte read once: SHA-256 of every tensor and the digest of every 64 KiB chunk.

Both are computed, so that damage is found by the one and placed by the other, and so that the table itself is proved:
whoever fetches a range later relies on it.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from knotctl.core.errors import Cancelled
from knotctl.core.findings import Finding
from knotctl.core.knot.codes import finding
from knotctl.core.knot.entry import KnotHeader, TensorEntry
from knotctl.core.knot.layout import DIGEST_BYTES, DIGEST_CHUNK, DIGESTS_TENSOR
from knotctl.core.knot.subset import Subset
from knotctl.core.knot.values import ValueCheck
from knotctl.core.source.base import ByteSource

Advance = Callable[[int], None]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Read and hashed at a time by each thread: one request to a store, within a core's cache.
PIECE = 16 * DIGEST_CHUNK
# Before the piece in memory: the start of a block that the piece before it ended in. No block is longer.
_CARRY = 512
# At least so many, for a store answers after a while; at most so many wait for one disk.
_LEAST_JOBS, _MAX_JOBS = 4, 8


@dataclass(frozen=True, slots=True)
class DataCheck:
    """What reading the payload found. Units: checked in bytes, those that a digest was compared for."""

    findings: tuple[Finding, ...]
    checked: int


@dataclass
class _Read:
    """What was computed over a stretch of payload; `edges` are the parts of chunks that it does not hold whole."""

    sha256: str = ""
    chunks: dict[int, bytes] = field(default_factory=dict)
    edges: list[tuple[int, int, bytes]] = field(default_factory=list)  # chunk, offset in it, bytes
    values: list[tuple[TensorEntry, ValueCheck]] = field(default_factory=list)


def data_bytes(header: KnotHeader, subset: Subset | None) -> int:
    """Return about how many bytes a check reads, for a progress bar."""
    return header.payload_bytes if subset is None else subset.expected(header.payload_bytes)


def check_data(
    source: ByteSource,
    header: KnotHeader,
    *,
    subset: Subset | None = None,
    jobs: int | None = None,
    advance: Advance = lambda _: None,
) -> DataCheck:
    """Return what is wrong with the bytes of a knot whose header has no error.

    Units: advance gets bytes, from any thread, one call at a time.
    Raises: SourceError; ObjectChanged where the file is changed meanwhile.
    """
    with _Payload(source, header, jobs or min(max(os.cpu_count() or 1, _LEAST_JOBS), _MAX_JOBS), advance) as payload:
        return payload.check_all() if subset is None else payload.check_subset(subset)


class _Payload:
    """The payload being read, by threads that all stop within a piece when one fails or the caller is interrupted."""

    def __init__(self, source: ByteSource, header: KnotHeader, jobs: int, advance: Advance) -> None:
        self.source = source
        self.header = header
        self.tensors = sorted((e for e in header.tensors if e.length), key=lambda e: e.offset)
        self.table_entry = next((e for e in self.tensors if e.name == DIGESTS_TENSOR), None)
        self.covered = self.table_entry.offset if self.table_entry else 0  # bytes that the table speaks of
        self.table = self.bytes_of(self.table_entry) if self.table_entry else b""
        self._advance = advance
        self._lock = threading.Lock()
        self._own = threading.local()
        self._stopped = False
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="knot-verify")

    def __enter__(self) -> _Payload:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._threads.shutdown(cancel_futures=True)

    def bytes_of(self, e: TensorEntry) -> bytes:
        return self.source.read(self.header.range_of(e).start, e.length)

    def map(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        return list(self._threads.map(work, items))

    # The two ways to look

    def check_all(self) -> DataCheck:
        reads = self.read_tensors(self.tensors)
        bad = self.bad_chunks(reads.values())
        checked = sum(e.length for e in self.tensors if e.sha256 is not None or e.end <= self.covered)
        return DataCheck(tuple(self.judge(reads, bad)), checked)

    def check_subset(self, subset: Subset) -> DataCheck:
        """Look at pieces of whole chunks where there is a table to compare them with, else at whole tensors."""
        if self.table_entry is None:
            chosen = subset.choose([e.length for e in self.tensors])
            reads = self.read_tensors([self.tensors[i] for i in chosen])
            checked = sum(self.tensors[i].length for i in chosen if self.tensors[i].sha256 is not None)
            return DataCheck(tuple(self.judge(reads, [])), checked)
        starts = range(0, self.covered, PIECE)
        chosen = subset.choose([min(PIECE, self.covered - at) for at in starts])
        spans = [(starts[i], min(starts[i] + PIECE, self.covered)) for i in chosen]
        pieces = self.map(self.read_piece, spans)
        bad = self.bad_chunks(pieces)
        # A chunk can lie in two tensors: their own digests tell which one it is, or that the table lies.
        suspects = [e for e in self.tensors if any(_overlap(e, c) for c in bad)]
        reads = self.read_tensors([*suspects, self.table_entry])
        findings = [*self.judge(reads, bad)]
        for piece in pieces:
            findings += [f for e, check in piece.values if e.name not in reads for f in self.judge_values(e, check)]
        return DataCheck(tuple(findings), sum(end - start for start, end in spans))

    # Reading

    def read_tensors(self, entries: Sequence[TensorEntry]) -> dict[str, _Read]:
        # The largest first, so that no thread is left alone with one at the end.
        order = sorted(entries, key=lambda e: -e.length)
        return dict(zip((e.name for e in order), self.map(self.read_tensor, order), strict=True))

    def read_tensor(self, e: TensorEntry) -> _Read:
        read, whole, values = _Read(), hashlib.sha256(), ValueCheck(e.qtype)
        memory = self.memory()
        carry, block = 0, 0
        for at in _cuts(e.offset, e.end):
            piece = memory[_CARRY : _CARRY + min(at + PIECE - at % PIECE, e.end) - at]
            self.fill(at, piece)
            whole.update(piece)
            self.hash_chunks(read, at, piece)
            blocks = memory[_CARRY - carry : _CARRY + len(piece)]
            count = len(blocks) // e.qtype.block_bytes
            values.look(blocks[: count * e.qtype.block_bytes], block)
            rest = bytes(blocks[count * e.qtype.block_bytes :])
            block, carry = block + count, len(rest)
            memory[_CARRY - carry : _CARRY] = rest
        read.sha256 = whole.hexdigest()
        read.values.append((e, values))
        return read

    def read_piece(self, span: tuple[int, int]) -> _Read:
        read, (start, end) = _Read(), span
        piece = self.memory()[: end - start]
        self.fill(start, piece)
        self.hash_chunks(read, start, piece)
        for e in self.tensors:
            if e.offset < end and e.end > start:
                size = e.qtype.block_bytes
                first, last = -(-max(start - e.offset, 0) // size), (min(end, e.end) - e.offset) // size
                if last > first:
                    values = ValueCheck(e.qtype)
                    values.look(piece[e.offset - start + first * size : e.offset - start + last * size], first)
                    values.all_zero = False  # of a part there is no telling
                    read.values.append((e, values))
        return read

    def memory(self) -> memoryview:
        """Return this thread's own memory: the carry, then room for a piece."""
        if not hasattr(self._own, "memory"):
            self._own.memory = memoryview(bytearray(_CARRY + PIECE))
        return self._own.memory  # type: ignore[no-any-return]

    def fill(self, at: int, piece: memoryview) -> None:
        if self._stopped:
            raise Cancelled("cancelled", "verification was given up")
        self.source.read_into(self.header.payload_offset + at, piece)
        with self._lock:
            self._advance(len(piece))

    def hash_chunks(self, read: _Read, at: int, piece: memoryview) -> None:
        end = min(at + len(piece), self.covered)
        start = at
        while start < end:
            chunk = start // DIGEST_CHUNK
            first, last = chunk * DIGEST_CHUNK, min((chunk + 1) * DIGEST_CHUNK, self.covered)
            part = piece[start - at : min(last, end) - at]
            if len(part) == last - first:
                read.chunks[chunk] = hashlib.sha256(part).digest()[:DIGEST_BYTES]
            else:
                read.edges.append((chunk, start - first, bytes(part)))
            start += len(part)

    # Judging

    def bad_chunks(self, reads: Iterable[_Read]) -> list[int]:
        """Return the chunks whose digest differs from the table's."""
        found: dict[int, bytes] = {}
        edges: list[tuple[int, int, bytes]] = []
        for read in reads:
            found |= read.chunks
            edges += read.edges
        joined: dict[int, hashlib._Hash] = {}
        for chunk, _, part in sorted(edges):
            joined.setdefault(chunk, hashlib.sha256()).update(part)
        found |= {chunk: h.digest()[:DIGEST_BYTES] for chunk, h in joined.items()}
        return sorted(c for c, d in found.items() if d != self.table[c * DIGEST_BYTES : (c + 1) * DIGEST_BYTES])

    def judge(self, reads: Mapping[str, _Read], bad: Sequence[int]) -> Iterator[Finding]:
        """Yield a finding for every tensor that differs, with the chunks where it does; then for values that cannot be.

        A bad chunk in whose tensors all holds accuses the table, unless the table is accused already.
        """
        table_ok = self.table_entry is None or reads[DIGESTS_TENSOR].sha256 == self.table_entry.sha256
        explained: set[int] = set()
        for e in self.tensors:
            if e.name not in reads:
                continue
            here = [c for c in bad if _overlap(e, c)] if e is not self.table_entry else []
            if (bool(here) and table_ok) if e.sha256 is None else reads[e.name].sha256 != e.sha256:
                explained.update(here)
                yield finding("digest-mismatch", self.place(e, here), tensor=e.name, offset=self.offset_of(e, here))
        left = [c for c in bad if c not in explained]
        if left and table_ok:
            message = f"digests of {_some(left)} differ from bytes whose tensors' sha256 hold"
            offset = self.header.payload_offset + self.covered + left[0] * DIGEST_BYTES
            yield finding("digest-mismatch", message, tensor=DIGESTS_TENSOR, offset=offset)
        for e in self.tensors:
            if e.name in reads:
                for _, values in reads[e.name].values:
                    yield from self.judge_values(e, values)

    def place(self, e: TensorEntry, chunks: Sequence[int]) -> str:
        if not chunks:
            return f"bytes differ from those that were encoded: expected sha256 {e.sha256}"
        return f"bytes differ from those that were encoded, in {_some(chunks)}"

    def offset_of(self, e: TensorEntry, chunks: Sequence[int]) -> int:
        return self.header.payload_offset + (max(e.offset, chunks[0] * DIGEST_CHUNK) if chunks else e.offset)

    def judge_values(self, e: TensorEntry, values: ValueCheck) -> Iterator[Finding]:
        start = self.header.range_of(e).start
        count = e.length // e.qtype.block_bytes
        for code, what, number, first in (
            ("non-finite-scale", "NaN or infinite", values.non_finite, values.first_non_finite),
            ("insane-scale", "absurdly large", values.insane, values.first_insane),
        ):
            if first is not None:
                message = f"block {first} of {count}: scale is {what}; {number} such in all"
                yield finding(code, message, tensor=e.name, offset=start + first * e.qtype.block_bytes)
        if values.all_zero and len(e.shape) > 1:
            yield finding("all-zero", f"every element of {list(e.shape)} is zero", tensor=e.name, offset=start)


def _cuts(start: int, end: int) -> Iterator[int]:
    """Yield where pieces begin: at the start, then at every multiple of PIECE, so that chunks are rarely cut."""
    while start < end:
        yield start
        start += PIECE - start % PIECE


def _overlap(e: TensorEntry, chunk: int) -> bool:
    return e.offset < (chunk + 1) * DIGEST_CHUNK and e.end > chunk * DIGEST_CHUNK


def _some(chunks: Sequence[int]) -> str:
    if len(chunks) == 1:
        return f"chunk {chunks[0]}"
    return f"chunk {chunks[0]} and {len(chunks) - 1} more"
