"""A whole object into a file: taken up where it was left off, and of the very object that was begun, or not at all."""

from __future__ import annotations

import fcntl
import glob
import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from knotctl.core.atomic import cannot_write, put_in_place
from knotctl.core.errors import KnotctlError, SourceError, UsageError, printable
from knotctl.core.source.base import ByteSource

# A request each: long enough that its round trip is nothing beside it, short enough to lose at an interruption.
PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch brought. Units: size, and what an earlier call had brought of it (resumed_at), in bytes."""

    path: Path
    size: int
    sha256: str
    resumed_at: int


def fetch_object(
    source: ByteSource,
    dest: Path,
    advance: Callable[[int], None],
    *,
    sha256: str | None = None,
    check: Callable[[Path], None] = lambda _: None,
) -> Fetched:
    """Return what was fetched: all bytes of the source, in `dest`, which appears when they are there and right.

    A fetch that is cut off leaves its bytes beside `dest`, and the next one of the same object goes on from there. What
    has another digest than `sha256`, or is refused by `check`, is thrown away.

    Units: advance is called with bytes, source.size in all.
    Raises: SourceError disk-full, write-failed, fetch-in-progress, digest-mismatch; what the source and `check` raise.
    """
    part = dest.with_name(f".{dest.name[:180]}.{identity_key(source)}.pull")
    try:
        _forget_others(dest, part)
        with part.open("a+b") as file:
            _lock(file, dest)
            digest = hashlib.sha256()
            resumed_at = _kept(file, source, digest, advance)
            buffer = memoryview(bytearray(min(PIECE_BYTES, source.size)))
            for at in range(resumed_at, source.size, PIECE_BYTES):
                piece = buffer[: min(PIECE_BYTES, source.size - at)]
                source.read_into(at, piece)
                digest.update(piece)
                file.write(piece)
                advance(len(piece))
            file.flush()
            try:
                _compare(source, digest.hexdigest(), sha256)
                check(part)
            except KnotctlError:
                part.unlink()
                raise
            put_in_place(file, part, dest)
    except OSError as e:
        raise cannot_write(dest, e) from e
    return Fetched(dest, source.size, digest.hexdigest(), resumed_at)


def identity_key(source: ByteSource) -> str:
    """Return a short name of the very object, fit for a file's."""
    return hashlib.sha256(source.identity.encode()).hexdigest()[:16]


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_name(ref: str) -> str:
    """Return the name that a file fetched from a URL has by itself: the last part of its path.

    Raises: UsageError where that cannot be a file's name.
    """
    name = unquote(urlsplit(ref).path.rpartition("/")[2], errors="surrogateescape")
    if name in ("", ".", "..") or not name.isprintable() or "/" in name or len(name.encode()) > 200:
        raise UsageError("bad-name", f"{printable(ref)}: its last part names no file", hint="name the file: DEST")
    return name


def _kept(file: BinaryIO, source: ByteSource, digest: hashlib._Hash, advance: Callable[[int], None]) -> int:
    """Return how many bytes of an earlier fetch are kept, hashed; the file is cut to them.

    The last whole piece is fetched again: after a crash its bytes need not have reached the disk.
    """
    whole = min(file.seek(0, 2), source.size) // PIECE_BYTES * PIECE_BYTES
    kept = max(whole - PIECE_BYTES, 0)
    file.truncate(kept)
    file.seek(0)
    for _ in range(0, kept, PIECE_BYTES):
        digest.update(file.read(PIECE_BYTES))
        advance(PIECE_BYTES)
    return kept


def _compare(source: ByteSource, found: str, expected: str | None) -> None:
    if expected is not None and found != expected.lower():
        raise SourceError(
            "digest-mismatch", f"{source.name}: expected SHA-256 {printable(expected)}, found {found}; thrown away"
        )


def _lock(file: BinaryIO, dest: Path) -> None:
    """Hold the part for this process alone, until it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise SourceError(
            "fetch-in-progress", f"{printable(dest)}: another process is fetching it", hint="wait for that one"
        ) from e


def _forget_others(dest: Path, part: Path) -> None:
    """Remove what is left of fetches of other objects to the same name, but for those that go on."""
    for other in dest.parent.glob(f".{glob.escape(dest.name[:180])}.{'[0-9a-f]' * 16}.pull"):
        if other != part:
            with suppress(OSError), other.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                other.unlink()
