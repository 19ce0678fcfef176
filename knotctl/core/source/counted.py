"""A wrapper that counts: how many reads reached the source beneath, and how many bytes."""

from __future__ import annotations

import threading

from knotctl.core.source.base import ByteSource


class CountedSource:
    """The source beneath, with `reads` and `bytes` so far."""

    def __init__(self, inner: ByteSource) -> None:
        self.inner = inner
        self.name = inner.name
        self.size = inner.size
        self.identity = inner.identity
        self.reads = 0
        self.bytes = 0
        self._lock = threading.Lock()

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`. Raises: SourceError."""
        data = self.inner.read(offset, length)
        self._count(length)
        return data

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` wholly with the bytes from `offset`. Raises: SourceError."""
        self.inner.read_into(offset, out)
        self._count(out.nbytes)

    def close(self) -> None:
        """Close the source beneath."""
        self.inner.close()

    def _count(self, length: int) -> None:
        with self._lock:
            self.reads += 1
            self.bytes += length
