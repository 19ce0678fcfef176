"""A file written whole or not at all: a sibling, flushed to the disk, takes the name at the end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from knotctl.core.errors import SourceError, printable

_GRACE_SECONDS = 10


@contextmanager
def replacing(dest: Path) -> Iterator[BinaryIO]:
    """Yield a new file, to write and read, that takes dest's name when the block ends well; else nothing is left of it.

    Raises: SourceError not-found, disk-full, write-failed, the last two for every OSError of the block.
    """
    if not dest.parent.is_dir():
        raise SourceError("not-found", f"{printable(dest.parent)}: no such folder")
    # A name is at most 255 bytes, whatever it is spelled with.
    stem = os.fsdecode(os.fsencode(dest.name)[:200])
    temporary = dest.with_name(f".{stem}.{secrets.token_hex(4)}.part")
    try:
        _sweep(dest.parent, stem)
        with temporary.open("x+b") as file:
            # Where there are no locks nothing is swept either.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            put_in_place(file, temporary, dest)
    except OSError as e:
        raise cannot_write(dest, e) from e
    finally:
        temporary.unlink(missing_ok=True)


def _sweep(folder: Path, stem: str) -> None:
    """Remove what writers of the same file left when they were killed: nobody holds the lock of it any more."""
    for left in folder.glob(f".{glob.escape(stem)}.????????.part"):
        with contextlib.suppress(OSError), left.open("rb") as file:
            # a writer that has just made its file may not have locked it yet
            if time.time() - os.fstat(file.fileno()).st_mtime > _GRACE_SECONDS:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()


def write_whole(dest: Path, *pieces: bytes | memoryview) -> None:
    """Replace the file by one of these bytes; whatever happens, there is the old file or the new one, and no other.

    Raises: SourceError not-found, disk-full, write-failed.
    """
    with replacing(dest) as file:
        for piece in pieces:
            file.write(piece)


def put_in_place(file: BinaryIO, temporary: Path, dest: Path) -> None:
    """Give the open file at `temporary` the name `dest`, after its bytes are on the disk; both outlast a crash."""
    file.flush()
    os.fsync(file.fileno())
    temporary.replace(dest)
    folder = os.open(dest.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def cannot_write(dest: Path, e: OSError) -> SourceError:
    """Return the error that says why a file could not be written."""
    full = e.errno in (errno.ENOSPC, errno.EDQUOT)
    return SourceError("disk-full" if full else "write-failed", f"{printable(dest)}: cannot write: {e.strerror or e}")
