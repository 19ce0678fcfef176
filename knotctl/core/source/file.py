"""Bytes of a local file: by positioned reads, or where they lie in the system's page cache.

A page of a mapping that is touched after another process has truncated the file kills the reader with SIGBUS. So a
range is made resident before it is used, where what fails is an error, and given back right after; a file that is cut
short within those milliseconds still kills. Whoever rewrites models in place while they run reads them (`--io pread`).

Measured, one token of a 7B in the page cache, idle machine: 128 ms with its weights in private memory, 134 ms mapped
in huge pages, 208 ms mapped in small ones, 500 ms by reads into one buffer.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import sys
import time
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from knotctl.core.errors import ObjectChanged, SourceError, printable
from knotctl.core.source.base import check_range

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

# Threads that share a large read, and the least that is worth handing to one: a hand-off costs some 50 us.
# Measured on 2 loaded cores, pieces of 8 MiB out of the page cache: 3.9 GB/s with one thread, 12.8 GB/s with two.
_READERS = min(4, os.cpu_count() or 1)
_PART_BYTES = 1 << 20
# Linux 5.14: map the pages now, and say what a touch would have been killed for. Python's mmap knows it not yet.
_POPULATE_READ = 22
# The largest piece of the page cache that is mapped at once, so what may come along at either end of a range.
HUGE_PAGE = 2 << 20
# How fast the system makes pages resident tells what they are. Measured over 4.4 GB, two threads of a Zen 4: huge ones
# 1 TB/s; small ones 25 GB/s, and 60 where the kernels' threads touch them as they go, which is then the better way;
# slower than any page cache, they come from the disk, where an error must not be met by a kernel.
_PROBE_BYTES = 256 << 10
_SMALL_AND_CACHED = (2e9, 60e9)


def _identity(st: os.stat_result) -> str:
    return f"{st.st_dev:x}:{st.st_ino:x}:{st.st_size}:{st.st_mtime_ns}"


@cache
def _pool() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(_READERS, thread_name_prefix="knotctl-read")


# In a forked child the pool's threads are gone, and nobody would ever answer.
os.register_at_fork(after_in_child=_pool.cache_clear)


@cache
def _call() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    return function


def _madvise(address: int, length: int, advice: int) -> int:
    """Return 0 or an errno. Other threads run meanwhile, which Python's own mmap.madvise does not let them."""
    return ctypes.get_errno() if _call()(address, length, advice) else 0


class FileSource:
    """A regular file opened for reading; the file is pinned, also where its name is given to another file."""

    local = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = printable(os.fspath(path), 4096)
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._map_at = 0
        try:
            # O_NONBLOCK: opening a FIFO must fail below, not wait for somebody to write to it.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            st = os.fstat(self._fd)
        except FileNotFoundError as e:
            raise SourceError("not-found", f"{self.name}: no such file") from e
        except PermissionError as e:
            raise SourceError("permission-denied", f"{self.name}: permission denied") from e
        except (OSError, ValueError) as e:
            raise SourceError("read-failed", f"{self.name}: cannot open: {getattr(e, 'strerror', None) or e}") from e
        if not stat.S_ISREG(st.st_mode):
            self.close()
            raise SourceError("not-a-file", f"{self.name}: expected a regular file, found something else")
        self.size = st.st_size
        self.identity = _identity(st)

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`. Raises: SourceError, ObjectChanged."""
        check_range(self.name, self.size, offset, length)
        try:
            # One allocation, where filling a buffer and making bytes of it takes two.
            data = os.pread(self._fd, length, offset)
            if len(data) == length and _identity(os.fstat(self._fd)) == self.identity:
                return data
        except OSError:
            pass  # read_into says which
        out = bytearray(length)
        self.read_into(offset, memoryview(out))
        return bytes(out)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` wholly with the bytes from `offset`. Raises: SourceError, ObjectChanged."""
        view = out.cast("B")
        check_range(self.name, self.size, offset, len(view))
        # Out of the page cache a read is a copy, and one core copies at a third of what the memory gives.
        parts = min(_READERS, len(view) // _PART_BYTES) or 1
        edges = [len(view) * i // parts for i in range(parts + 1)]
        try:
            others = [_pool().submit(self._fill, view[a:b], offset + a) for a, b in pairwise(edges[1:])]
            done = self._fill(view[: edges[1]], offset) + sum(f.result() for f in others)
            now = _identity(os.fstat(self._fd))
        except OSError as e:
            raise self._failed(offset, len(view), e) from e
        if now != self.identity or done < len(view):
            raise self._changed()

    def _fill(self, view: memoryview, offset: int) -> int:
        """Read until the view is full or the file ends; return how many bytes there were."""
        done = 0
        while done < len(view):
            # One call moves at most 0x7ffff000 bytes.
            n = os.preadv(self._fd, [view[done:]], offset + done)
            if n == 0:
                break
            done += n
        return done

    @property
    def mappable(self) -> bool:
        """Whether the file can be mapped: not on another system than Linux, nor where address space is short."""
        if self._map is None and sys.platform == "linux" and self._fd >= 0:
            try:
                self._map = mmap.mmap(self._fd, self.size, prot=mmap.PROT_READ)
            except (OSError, ValueError):
                return False
            import numpy as np  # a read-only buffer says by no simpler way where it lies

            self._map_at = int(np.frombuffer(self._map, np.uint8).ctypes.data)
            # What is not in the page cache yet comes in pieces of this size, which take one entry to map and not 512.
            _madvise(self._map_at, self.size, mmap.MADV_HUGEPAGE)
        return self._map is not None

    def map_in(self, offset: int, length: int) -> memoryview:
        """Return bytes as they lie in the page cache, resident until `map_out`. Raises: SourceError, ObjectChanged."""
        check_range(self.name, self.size, offset, length)
        if not self.mappable:
            raise SourceError("read-failed", f"{self.name}: cannot be mapped", hint="--io pread")
        assert self._map is not None
        self._check_unchanged(offset, length)
        start, end = offset // mmap.PAGESIZE * mmap.PAGESIZE, offset + length
        # Inside: at its ends a tensor shares its pages with others, which were written apart.
        inside = -(-start // HUGE_PAGE) * HUGE_PAGE
        probe = inside if inside + _PROBE_BYTES <= end else start
        began = time.perf_counter()
        error = _madvise(self._map_at + probe, min(_PROBE_BYTES, end - probe), _POPULATE_READ)
        slowest, fastest = (_PROBE_BYTES / rate for rate in _SMALL_AND_CACHED)
        if not error and not fastest < time.perf_counter() - began < slowest:
            error = _madvise(self._map_at + start, end - start, _POPULATE_READ)
        if error and error != errno.EINVAL:  # an older kernel maps page by page as they are touched
            self._check_unchanged(offset, length)
            raise self._failed(offset, length, OSError(error, os.strerror(error)))
        return memoryview(self._map)[offset:end]

    def map_out(self, offset: int, length: int) -> None:
        """Let a range's pages go, and those that came along with them. Raises: ObjectChanged."""
        if self._map is not None:
            start, end = offset // HUGE_PAGE * HUGE_PAGE, -(-(offset + length) // HUGE_PAGE) * HUGE_PAGE
            _madvise(self._map_at + start, min(self.size, end) - start, mmap.MADV_DONTNEED)
        self._check_unchanged(offset, length)

    def _check_unchanged(self, offset: int, length: int) -> None:
        try:
            if _identity(os.fstat(self._fd)) != self.identity:
                raise self._changed()
        except OSError as e:
            raise self._failed(offset, length, e) from e

    def _failed(self, offset: int, length: int, e: OSError) -> SourceError:
        return SourceError("read-failed", f"{self.name}: bytes {offset}..{offset + length}: {e.strerror or e}")

    def _changed(self) -> ObjectChanged:
        return ObjectChanged(
            "object-changed",
            f"{self.name}: the file was changed while it was read; expected {self.size} bytes as they were at open",
            hint="writers must write a new file and rename it; run again when the writer is done",
        )

    def close(self) -> None:
        """Close the file; closing twice is no error."""
        self._map = None  # it goes when the last view of it has gone
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
