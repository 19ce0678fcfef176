"""Frames from and to files for the commands; `-` is stdin or stdout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from knotctl.core.errors import FrameError, SourceError, UsageError, printable

if TYPE_CHECKING:
    from knotctl.core.wire.frame import Frame


def read_frame_bytes(ref: str) -> bytes:
    """Return the bytes of the one frame in a file, pipe or, for `-`, stdin; no more than its header asks for is read.

    Raises: FrameError with the file's name in front, SourceError.
    """
    name = _name(ref)
    try:
        if ref == "-":
            return _read(sys.stdin.buffer)
        with Path(ref).open("rb") as file:
            return _read(file)
    except FileNotFoundError as e:
        raise SourceError("not-found", f"{name}: no such file") from e
    except (OSError, ValueError) as e:
        raise SourceError("read-failed", f"{name}: {getattr(e, 'strerror', None) or e}") from e
    except FrameError as e:
        raise FrameError(e.code, f"{name}: {e.message}", hint=e.hint) from None


def read_frame(ref: str) -> Frame:
    """Return the one frame that a file or stdin holds.

    Raises: FrameError with the file's name in front, SourceError.
    """
    from knotctl.core.wire.frame import parse_frame
    from knotctl.core.wire.layout import FILE_LIMITS

    data = read_frame_bytes(ref)
    try:
        return parse_frame(data, limits=FILE_LIMITS)
    except FrameError as e:
        raise FrameError(e.code, f"{_name(ref)}: {e.message}", hint=e.hint) from None


def write_frame(ref: str, frame: Frame) -> int:
    """Write the frame to a file, whole or not at all, or to stdout for `-`, and return its bytes' number."""
    from knotctl.core.atomic import write_whole
    from knotctl.core.wire.frame import encode_frame

    if ref == "-" and sys.stdout.isatty():
        raise UsageError("terminal", "stdout is a terminal: a frame is not for reading", hint="-o FILE, or a pipe")
    data = encode_frame(frame)
    if ref == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        write_whole(Path(ref), data)
    return len(data)


def _name(ref: str) -> str:
    return "stdin" if ref == "-" else printable(ref)


def _read(file: BinaryIO) -> bytes:
    from knotctl.core.wire.header import parse_header
    from knotctl.core.wire.layout import FILE_LIMITS, HEADER

    head = file.read(HEADER.size)
    header = parse_header(head, FILE_LIMITS)
    # One byte more than it should hold, so that what follows a frame is found and not passed over.
    return head + file.read(header.body_bytes + 1)
