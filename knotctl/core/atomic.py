"""A file written whole or not at all: a sibling, flushed to the disk, takes the name at the end."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from knotctl.core.errors import SourceError, printable


@contextmanager
def replacing(dest: Path) -> Iterator[BinaryIO]:
    """Yield a new file, to write and read, that takes dest's name when the block ends well; else nothing is left of it.

    Raises: SourceError not-found, disk-full, write-failed, the last two for every OSError of the block.
    """
    if not dest.parent.is_dir():
        raise SourceError("not-found", f"{printable(dest.parent)}: no such folder")
    temporary = dest.with_name(f".{dest.name[:200]}.{secrets.token_hex(4)}.part")
    try:
        with temporary.open("x+b") as file:
            yield file
            put_in_place(file, temporary, dest)
    except OSError as e:
        raise cannot_write(dest, e) from e
    finally:
        temporary.unlink(missing_ok=True)


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
