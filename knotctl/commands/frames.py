"""Frames from and to files for the commands; `-` is stdin or stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from knotctl.core.errors import FrameError, SourceError, UsageError, printable

if TYPE_CHECKING:
    from knotctl.core.wire.describe import FrameReport
    from knotctl.core.wire.frame import Frame


def read_frame(ref: str) -> Frame:
    """Return the one frame that a file, a pipe or, for `-`, stdin holds; no more than its header asks for is read.

    Raises: FrameError with the file's name in front, SourceError.
    """
    from knotctl.core.wire.frame import parse_frame
    from knotctl.core.wire.layout import FILE_LIMITS

    with _naming(ref):
        return parse_frame(_read(ref), limits=FILE_LIMITS)


def read_report(ref: str, top: int) -> FrameReport:
    """Return what `inspect` tells of the one frame that a file, a pipe or stdin holds.

    Raises: as read_frame.
    """
    from knotctl.core.wire.describe import describe_frame

    with _naming(ref):
        return describe_frame(_read(ref), top=top)


def write_frame(ref: str, frame: Frame) -> int:
    """Write the frame to a file, whole or not at all, or to stdout for `-`, and return its bytes' number."""
    from knotctl.core.atomic import write_whole
    from knotctl.core.wire.frame import encode_parts

    if ref == "-" and sys.stdout.isatty():
        raise UsageError("terminal", "stdout is a terminal: a frame is not for reading", hint="-o FILE, or a pipe")
    parts = encode_parts(frame)
    if ref == "-":
        sys.stdout.buffer.writelines(parts)
        sys.stdout.buffer.flush()
    else:
        write_whole(Path(ref), *parts)
    return sum(len(part) for part in parts)


@contextmanager
def _naming(ref: str) -> Iterator[None]:
    """Put the file's name in front of what is wrong with it: there may be many."""
    name = "stdin" if ref == "-" else printable(ref)
    try:
        yield
    except FileNotFoundError as e:
        raise SourceError("not-found", f"{name}: no such file") from e
    except (OSError, ValueError) as e:
        raise SourceError("read-failed", f"{name}: {getattr(e, 'strerror', None) or e}") from e
    except FrameError as e:
        raise FrameError(e.code, f"{name}: {e.message}", hint=e.hint) from None


def _read(ref: str) -> bytes:
    from knotctl.core.wire.header import parse_header
    from knotctl.core.wire.layout import FILE_LIMITS, HEADER

    with nullcontext(sys.stdin.buffer) if ref == "-" else Path(ref).open("rb") as file:
        head = file.read(HEADER.size)
        header = parse_header(head, FILE_LIMITS)
        # One byte more than it should hold, so that what follows a frame is found and not passed over.
        return head + file.read(header.body_bytes + 1)
