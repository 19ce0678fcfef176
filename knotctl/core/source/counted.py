"""A wrapper that counts: how many reads reached the source beneath, and how many bytes."""

from __future__ import annotations

import threading

from knotctl.core.errors import SourceError
from knotctl.core.source.base import ByteSource, LocalSource


class CountedSource:
    """The source beneath, with `reads` and `bytes` so far."""

    def __init__(self, inner: ByteSource) -> None:
        self.inner = inner
        self.name = inner.name
        self.size = inner.size
        self.identity = inner.identity
        self._local = inner if isinstance(inner, LocalSource) else None
        self.local = self._local is not None and self._local.local
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

    @property
    def mappable(self) -> bool:
        """Whether the source beneath is a file that can be mapped."""
        return self._local is not None and self._local.mappable

    def map_in(self, offset: int, length: int) -> memoryview:
        """Return bytes of the file beneath as they lie in the page cache. Raises: SourceError."""
        if self._local is None:
            raise SourceError("read-failed", f"{self.name}: cannot be mapped: it is no local file")
        view = self._local.map_in(offset, length)
        self._count(length)
        return view

    def map_out(self, offset: int, length: int) -> None:
        """Let a range's pages go. Raises: ObjectChanged."""
        if self._local is not None:
            self._local.map_out(offset, length)

    def close(self) -> None:
        """Close the source beneath."""
        self.inner.close()

    def _count(self, length: int) -> None:
        with self._lock:
            self.reads += 1
            self.bytes += length
