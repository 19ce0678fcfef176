"""The one narrow way to bytes: a source has a size and an identity, and reads ranges.

Every source and every wrapper has this shape and passes one suite (tests/core/source/test_conformance.py).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from knotctl.core.errors import SourceError


@runtime_checkable
class ByteSource(Protocol):
    """Bytes [0, size) of one object, readable by range from any thread.

    `name` is the path or URL, for messages. `identity` is of this very object: two sources whose identities are equal
    hold the same bytes, so it goes into cache keys and proofs. A source whose object is changed under it raises
    ObjectChanged instead of mixing old bytes with new ones.
    """

    name: str
    size: int
    identity: str

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`. Raises: SourceError."""
        ...

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` wholly with the bytes from `offset`. Raises: SourceError."""
        ...

    def close(self) -> None:
        """Give back what the source holds; reading after it raises SourceError."""
        ...


@runtime_checkable
class SharedSource(Protocol):
    """A source that has some of its bytes in memory already, where other processes share them."""

    def view(self, offset: int, length: int) -> memoryview | None:
        """Return bytes as they lie there, never to change, or None where they do not."""
        ...


@runtime_checkable
class LocalSource(Protocol):
    """A source that may be of a file on this machine: then its bytes can be used in the system's page cache.

    `local` says whether it is, `mappable` whether the file could be mapped as well.
    """

    local: bool
    mappable: bool

    def map_in(self, offset: int, length: int) -> memoryview:
        """Return bytes where the system keeps them, resident until `map_out`. Raises: SourceError, ObjectChanged."""
        ...

    def map_out(self, offset: int, length: int) -> None:
        """Let a range's pages go. Raises: ObjectChanged where the bytes were changed since `map_in`."""
        ...


def check_range(name: str, size: int, offset: int, length: int) -> None:
    """Refuse a range that is not within [0, size).

    Raises: SourceError `out-of-range`, before anything is allocated.
    """
    if offset < 0 or length < 0 or offset + length > size:
        raise SourceError(
            "out-of-range",
            f"{name}: bytes {offset}..{offset + length}: range outside the object; expected within 0..{size}",
        )
