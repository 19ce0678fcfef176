"""Bytes of a knot that came through other hands, compared with the digests that its header vouches for."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable

from knotctl.core.errors import SourceError
from knotctl.core.knot.entry import TensorEntry
from knotctl.core.knot.layout import DIGEST_BYTES, DIGEST_CHUNK, DIGESTS_TENSOR
from knotctl.core.knot.reader import Knot
from knotctl.core.spans import ByteRange


def check_tensors(knot: Knot, entries: Iterable[TensorEntry], span: ByteRange, data: memoryview) -> None:
    """Compare the whole tensors in bytes [start, end) of a knot's file with their digests, where it has any.

    Raises: SourceError digest-mismatch.
    """
    for entry in entries:
        at = knot.header.range_of(entry).start - span.start
        found = hashlib.sha256(data[at : at + entry.length]).hexdigest()
        if entry.sha256 is not None and found != entry.sha256:
            raise _mismatch(knot, f"tensor {entry.name}: expected sha256 {entry.sha256}, found {found}")


class ChunkDigests:
    """The knot's table of the digests of every 64 KiB, for parts of tensors; read when first needed."""

    def __init__(self, knot: Knot) -> None:
        self._knot = knot
        self._table: bytes | None = None

    def check(self, start: int, data: memoryview) -> None:
        """Compare the whole chunks among bytes from `start` of the knot's file; a knot without a table passes.

        Raises: SourceError digest-mismatch.
        """
        if not self._knot.has(DIGESTS_TENSOR):
            return
        if self._table is None:
            table = memoryview(self._knot.read(DIGESTS_TENSOR))
            check_tensors(self._knot, [self._knot.entry(DIGESTS_TENSOR)], self._knot.range_of(DIGESTS_TENSOR), table)
            self._table = bytes(table)
        at = start - self._knot.header.payload_offset
        covered = self._knot.entry(DIGESTS_TENSOR).offset
        for chunk in range(-(-at // DIGEST_CHUNK), (at + len(data)) // DIGEST_CHUNK):
            first, last = chunk * DIGEST_CHUNK, (chunk + 1) * DIGEST_CHUNK
            if last > covered:
                return
            found = hashlib.sha256(data[first - at : last - at]).digest()[:DIGEST_BYTES]
            expected = self._table[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
            if found != expected:
                raise _mismatch(
                    self._knot, f"chunk {chunk} of the payload: expected {expected.hex()}, found {found.hex()}"
                )


class CheckedSource:
    """A knot's source whose reads are compared with its digests, where a store or the way from it may spoil them.

    A whole tensor has its own digest; of a part of one the whole chunks are looked at. What does not match is read once
    more.
    """

    def __init__(self, knot: Knot) -> None:
        self.inner = knot.source
        self.name, self.size, self.identity = self.inner.name, self.inner.size, self.inner.identity
        self._knot, self._chunks = knot, ChunkDigests(Knot(knot.header, self.inner))
        tensors = sorted(knot.header.tensors, key=lambda t: t.offset)
        self._tensors = [(knot.header.range_of(t), t) for t in tensors]
        self._starts = [r.start for r, _ in self._tensors]

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`. Raises: SourceError, digest-mismatch among others."""
        out = bytearray(length)
        self.read_into(offset, memoryview(out))
        return bytes(out)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` wholly with the bytes from `offset`. Raises: SourceError, digest-mismatch among others."""
        self.inner.read_into(offset, out)
        try:
            self._check(offset, out)
        except SourceError as e:
            if e.code != "digest-mismatch":
                raise
            self.inner.read_into(offset, out)
            self._check(offset, out)

    def close(self) -> None:
        """Close the source beneath."""
        self.inner.close()

    def _check(self, offset: int, out: memoryview) -> None:
        end = offset + len(out)
        at = max(0, bisect_right(self._starts, offset) - 1)
        for span, tensor in self._tensors[at:]:
            if span.start >= end:
                return
            if span.start >= offset and span.end <= end:
                check_tensors(self._knot, [tensor], span, out[span.start - offset : span.end - offset])
            elif min(end, span.end) - max(offset, span.start) >= DIGEST_CHUNK:
                a, b = max(offset, span.start), min(end, span.end)
                self._chunks.check(a, out[a - offset : b - offset])


def _mismatch(knot: Knot, what: str) -> SourceError:
    return SourceError(
        "digest-mismatch",
        f"{knot.source.name}: {what}",
        hint="the bytes are not those that were encoded: knotctl verify --read-data KNOT",
    )
