"""How weights that do not stay pass through memory: read into a buffer, into two by turns, or where the file lies.

One load at a time is in use. Each way enters in the ledger what it takes up, also what is still on its way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from knotctl.core.errors import UsageError
from knotctl.core.source.base import ByteSource, LocalSource
from knotctl.core.source.file import HUGE_PAGE
from knotctl.core.spans import ByteRange

Bytes = npt.NDArray[np.uint8]
Load = Sequence[ByteRange]


class Io(StrEnum):
    """How a local file's weights that pass through get to the kernels."""

    AUTO = "auto"
    MMAP = "mmap"
    PREAD = "pread"


class Way(StrEnum):
    """What a station does for weights that pass through."""

    MAP = "map"
    READ = "read"
    READ_AHEAD = "read-ahead"


# What of a mapping may be resident beside the range asked for: the rest of a huge page at either end. A third one is
# for who looks on: smaps is walked while pages come and go, and shows some of two loads at once (seen: 4 MiB too many).
EDGES_BYTES = 3 * HUGE_PAGE


def ways_of(source: ByteSource, io: Io) -> tuple[Way, ...]:
    """Return how weights of a source may pass through, the fastest first; the last one takes the least memory.

    Reading ahead pays where a read waits for another machine or process; out of the page cache it is a copy that
    competes with the kernels for the same memory. Raises: UsageError where what is no local file is to be mapped.
    """
    local = isinstance(source, LocalSource) and source.local
    mappable = isinstance(source, LocalSource) and source.mappable
    if io is Io.MMAP and not mappable:
        raise UsageError("usage", f"--io mmap: {source.name}: not a local file that can be mapped here")
    if not local:
        return Way.READ_AHEAD, Way.READ
    if io is Io.MMAP:
        return (Way.MAP,)
    return (Way.MAP, Way.READ) if mappable and io is not Io.PREAD else (Way.READ,)


@dataclass(slots=True)
class Ledger:
    """Bytes of weights held now and at most. Every load and eviction is entered here."""

    held: int = 0
    peak: int = 0

    def enter(self, count: int) -> None:
        """Note that so many bytes were loaded (or, negative, evicted)."""
        self.held += count
        self.peak = max(self.peak, self.held)


class Passage(Protocol):
    """One load in use at a time: `take`, multiply, `release`."""

    def expect(self, loads: Iterable[Load]) -> None:
        """Be told what will be taken from now on, in order."""
        ...

    def take(self, load: Load) -> list[Bytes]:
        """Return the bytes of each range. Raises: SourceError."""
        ...

    def release(self) -> None:
        """Let go of what was taken. Raises: SourceError."""
        ...


class Mapped:
    """Weights are multiplied with where they lie in the page cache: none is copied."""

    def __init__(self, source: LocalSource, ledger: Ledger) -> None:
        self._source = source
        self._ledger = ledger
        self._taken: list[ByteRange] = []

    def expect(self, loads: Iterable[Load]) -> None:
        """Do nothing: the system reads ahead by itself what it does not have."""

    def take(self, load: Load) -> list[Bytes]:
        """Return the ranges in the page cache. Raises: SourceError."""
        parts: list[Bytes] = []
        for whole in merged(load):
            at = np.frombuffer(self._source.map_in(whole.start, len(whole)), np.uint8)
            self._taken.append(whole)
            self._ledger.enter(len(whole))
            parts += [
                at[r.start - whole.start : r.end - whole.start] for r in load if whole.start <= r.start < whole.end
            ]
        return parts

    def release(self) -> None:
        """Let the pages go. Raises: ObjectChanged where the bytes changed while they were in use."""
        taken, self._taken = self._taken, []
        self._ledger.enter(-size_of(taken))
        for whole in taken:
            self._source.map_out(whole.start, len(whole))


class Buffered:
    """Weights are read into one buffer."""

    def __init__(self, source: ByteSource, ledger: Ledger, buffer_bytes: int) -> None:
        self._source = source
        self._ledger = ledger
        self._size = buffer_bytes
        self._buffer: Bytes | None = None
        self._taken = 0

    def expect(self, loads: Iterable[Load]) -> None:
        """Do nothing."""

    def take(self, load: Load) -> list[Bytes]:
        """Read the ranges. Raises: SourceError."""
        if self._buffer is None:
            self._buffer = np.empty(self._size, np.uint8)
        parts = read_load(self._source, load, self._buffer)
        self._taken = size_of(load)
        self._ledger.enter(self._taken)
        return parts

    def release(self) -> None:
        """Let the buffer be filled anew."""
        self._ledger.enter(-self._taken)
        self._taken = 0


@dataclass(slots=True)
class _Coming:
    """A load that a thread reads into the buffer which is not in use."""

    load: Load
    slot: int
    done: Future[list[Bytes]]
    wanted: bool = True


class ReadAhead:
    """Weights are read into two buffers by turns: one is filled while the other is multiplied with.

    What is expected and then not taken (the pass was given up) is left to arrive before its buffer is used again.
    """

    def __init__(self, source: ByteSource, ledger: Ledger, buffer_bytes: int) -> None:
        self._source = source
        self._ledger = ledger
        self._size = buffer_bytes
        self._buffers: list[Bytes] = []
        self._slot = 0
        self._taken = 0
        self._expected: Iterator[Load] = iter(())
        self._coming: _Coming | None = None

    def expect(self, loads: Iterable[Load]) -> None:
        """Be told what will be taken from now on; the first of it is read when it is taken.

        So the end of a pass begins no read: whether there will be another pass is not known, and a store is paid by
        the byte.
        """
        self._expected = iter(loads)
        if self._coming is not None:
            self._coming.wanted = False

    def take(self, load: Load) -> list[Bytes]:
        """Return the ranges, which were read before where they were expected; begin to read what comes next.

        Raises: SourceError, of the read that was for this load.
        """
        coming = self._settled(load)
        if coming is None:
            if next(self._expected, None) != load:
                self._expected = iter(())  # the pass does something else than it said
            coming = self._coming = self._read(load, self._slot, ahead=False)
            self._settled(load)
        self._slot, self._taken = coming.slot, size_of(load)
        following = next(self._expected, None)
        if following is not None:
            self._coming = self._read(following, 1 - self._slot, ahead=True)
        return coming.done.result()

    def release(self) -> None:
        """Let the buffer be filled anew."""
        self._ledger.enter(-self._taken)
        self._taken = 0

    def _settled(self, load: Load) -> _Coming | None:
        """Return what is on its way if it is this load and arrives; nothing is on its way afterwards."""
        coming = self._coming
        if coming is None:
            return None
        error = coming.done.exception()  # waits: until then a thread writes to the buffer
        self._coming = None
        wanted = coming.wanted and coming.load == load
        if wanted and error is None:
            return coming
        self._ledger.enter(-size_of(coming.load))
        if wanted and error is not None:
            raise error
        return None

    def _read(self, load: Load, slot: int, *, ahead: bool) -> _Coming:
        while len(self._buffers) <= slot:
            self._buffers.append(np.empty(self._size, np.uint8))
        coming = _Coming(load, slot, Future())
        self._ledger.enter(size_of(load))

        def fill() -> None:
            try:
                coming.done.set_result(read_load(self._source, load, self._buffers[slot]))
            except BaseException as e:
                coming.done.set_exception(e)

        if ahead:
            # A thread for each: it costs 0.1 ms, a request to a store several; and as a daemon it delays no exit.
            threading.Thread(target=fill, name="knotctl-ahead", daemon=True).start()
        else:
            fill()
        return coming


def passage(way: Way, source: ByteSource, ledger: Ledger, buffer_bytes: int) -> Passage:
    """Return the passage of that way."""
    if way is Way.MAP and isinstance(source, LocalSource):
        return Mapped(source, ledger)
    return (ReadAhead if way is Way.READ_AHEAD else Buffered)(source, ledger, buffer_bytes)


def read_load(source: ByteSource, load: Load, block: Bytes) -> list[Bytes]:
    """Fill a block with ranges one after the other, neighbours in one read; return each range's part of it."""
    at = 0
    for r in merged(load):
        source.read_into(r.start, block.data[at : at + len(r)])
        at += len(r)
    ends = list(accumulate(len(r) for r in load))
    return [block[end - len(r) : end] for r, end in zip(load, ends, strict=True)]


def merged(ranges: Load) -> list[ByteRange]:
    """Return the ranges with neighbours that touch made one, so that a phase is one read."""
    out: list[ByteRange] = []
    for r in ranges:
        if out and out[-1].end == r.start:
            out[-1] = ByteRange(out[-1].start, r.end)
        else:
            out.append(r)
    return out


def size_of(load: Load) -> int:
    """Return the bytes of all its ranges."""
    return sum(len(r) for r in load)
