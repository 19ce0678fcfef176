"""Bytes of a knot in a sealed memory file, which the processes of a host map by name instead of copying.

A mapped file that somebody truncates kills its reader with SIGBUS, and one that somebody writes to lies. A memory file
can be sealed against both, for good: the kernel then refuses to shrink or change it. Whoever maps one looks for the
seals first. Where the system has no such files a segment is plain memory, and goes over the wire.
Source: memfd_create(2), fcntl(2) "File Sealing".
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from collections.abc import Callable

from knotctl.core.spans import ByteRange

# A process's own descriptor, by which others of its user may open the same file.
_NAME = re.compile(r"/proc/[1-9]\d{0,9}/fd/\d{1,9}")
CAN_SEAL = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


class Segment:
    """Bytes [start, end) of a knot's file. `name` is what other processes map it by, None where they cannot."""

    def __init__(self, span: ByteRange, fill: Callable[[memoryview], None]) -> None:
        self.range = span
        self.name: str | None = None
        self._fd = -1
        if not CAN_SEAL:
            plain = bytearray(len(span))
            fill(memoryview(plain))
            self.data = memoryview(plain).toreadonly()
            return
        self._fd = os.memfd_create("knotctl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, len(span))
            # Where this raises, its traceback still holds pieces of the view: the mapping then ends with the error.
            fill(memoryview(writable := mmap.mmap(self._fd, len(span))))
            writable.close()
            # Only now, as a file that is mapped to be written cannot be sealed.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
            self.data = memoryview(mmap.mmap(self._fd, len(span), prot=mmap.PROT_READ))
        except BaseException:
            self.close()
            raise
        self.name = f"/proc/{os.getpid()}/fd/{self._fd}"

    def part(self, span: ByteRange) -> memoryview:
        """Return the bytes of a part of the range."""
        return self.data[span.start - self.range.start : span.end - self.range.start]

    def close(self) -> None:
        """Give up the name. The memory goes when the last process that maps it has let go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.name = None

    def __del__(self) -> None:
        # A warden that moves to other layers leaves requests behind that still fill what nobody will close.
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


def map_segment(name: str, length: int) -> memoryview | None:
    """Return the bytes of another process's segment, None where it is not one that can be trusted to stay as it is.

    What they are is for the caller to check, once: they cannot change.
    """
    if not CAN_SEAL or not _NAME.fullmatch(name):
        return None
    try:
        # Without waiting: by the time it is opened the name can belong to anything, a pipe too.
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & needed != needed or os.fstat(fd).st_size != length:
            return None
        return memoryview(mmap.mmap(fd, length, prot=mmap.PROT_READ))
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
