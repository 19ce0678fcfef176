"""Writing files whole or not at all: a temporary sibling, flushed to the disk, then renamed over the name."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from knotctl.core.errors import SourceError, UsageError

# A frame may be larger than memory should hold by accident; pipes are read up to the same cap.
READ_CAP = 4 << 30


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` when the block ends well, and vanishes when it does not.

    Raises: SourceError write-failed.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as e:
        raise SourceError("write-failed", f"{path}: {e.strerror}") from e
    try:
        with os.fdopen(handle, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        mode = path.stat().st_mode if path.exists() else 0o666 & ~_umask()
        Path(temporary).chmod(mode & 0o777)
        Path(temporary).replace(path)
        sync_folder(path.parent)
    except OSError as e:
        raise SourceError("write-failed", f"{path}: {e.strerror}") from e
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(target: str, data: bytes) -> None:
    """Write bytes to a file, whole or not at all, or to stdout where the target is `-`."""
    if target == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    with replacing(Path(target)) as f:
        f.write(data)


def read_whole(source: str, cap: int = READ_CAP) -> bytes:
    """Return the bytes of a file, or of stdin where the source is `-`.

    Raises: SourceError read-failed; UsageError too-large beyond `cap` bytes.
    """
    try:
        if source == "-":
            data = sys.stdin.buffer.read(cap + 1)
        else:
            with Path(source).open("rb") as f:
                data = f.read(cap + 1)
    except OSError as e:
        raise SourceError("read-failed", f"{source}: {e.strerror}") from e
    if len(data) > cap:
        raise UsageError("too-large", f"{source}: more than {cap} bytes")
    return data


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
