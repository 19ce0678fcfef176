"""Writes a knot whole or not at all, and proves it: what lies in the file is what the sources gave.

The header holds the digest of every tensor and lies before them, but is as long whatever they say; so the payload is
copied first, in one pass over the sources, and the header written last. Then the file is read again.

Source: CONTRACT section 1; STYLE rule 8.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TypeVar

from knotctl.core.atomic import replacing
from knotctl.core.errors import Cancelled, SourceError, UsageError, printable
from knotctl.core.knot.config import KnotConfig
from knotctl.core.knot.header import KnotHeader, TensorEntry, encode_header, parse_header
from knotctl.core.knot.layout import DIGEST_BYTES, DIGEST_CHUNK, DIGESTS_TENSOR, UNKNOWN_SHA256, digest_count
from knotctl.core.qtypes import QTYPES, QType
from knotctl.core.source.file import HUGE_PAGE

Advance = Callable[[int], None]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Read, hashed and written at a time by each thread: beyond the cost of a call, near a core's cache. Written whole at a
# multiple of itself it becomes one huge page of the page cache, where the system has such, and stations that map the
# knot make it resident some hundred times faster (core/source/file.py).
_PIECE = HUGE_PAGE
# More threads than this wait for the disk.
_MAX_JOBS = 8


@dataclass(frozen=True, slots=True)
class PayloadTensor:
    """A tensor to be written; `read_into(offset, out)` fills `out` with its bytes. Units: offset, length in bytes."""

    name: str
    qtype: QType
    shape: tuple[int, ...]
    length: int
    read_into: Callable[[int, memoryview], None]


def check_destination(dest: Path, *, force: bool, src: str | None = None) -> None:
    """Refuse a destination that cannot or must not be written, before any work. Raises: UsageError, SourceError."""
    shown = printable(dest, 4096)
    if dest.is_dir() or (dest.exists() and not dest.is_file()):
        raise UsageError("not-a-file", f"{shown}: expected a file's name, found something else of that name")
    if src is not None and dest.exists() and Path(src).exists() and dest.samefile(src):
        raise UsageError("same-file", f"{shown}: is the source itself; expected another file's name")
    if dest.exists() and not force:
        raise UsageError("exists", f"{shown}: exists already", hint="--force replaces it")
    if not dest.parent.is_dir():
        raise SourceError("not-found", f"{printable(dest.parent, 4096)}: no such folder")


def write_knot(
    dest: Path,
    config: KnotConfig,
    payload: Sequence[PayloadTensor],
    *,
    source: Mapping[str, object],
    force: bool = False,
    jobs: int | None = None,
    advance: Advance = lambda _: None,
) -> KnotHeader:
    """Write the tensors in the order given, our digests behind them, and return the header that was written.

    Raises: UsageError and SourceError; whatever is raised, `dest` is as it was and nothing else is left.
    """
    check_destination(dest, force=force)
    jobs = jobs or min(os.cpu_count() or 1, _MAX_JOBS)
    with replacing(dest) as file, _Pool(jobs) as pool:
        header = _Writing(file.fileno(), printable(dest, 4096), pool, advance).write(config, payload, source)
        check_destination(dest, force=force)  # which may have come to exist meanwhile
        return header


class _Pool:
    """Threads that all stop within a piece when one of them fails or the caller is interrupted."""

    def __init__(self, jobs: int) -> None:
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="knot-writer")
        self._own = threading.local()
        self._stopped = False

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._threads.shutdown(wait=True, cancel_futures=True)

    def start(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[Future[_Result]]:
        """Begin the work on every item and return its futures, in order."""
        return [self._threads.submit(work, item) for item in items]

    def results(self, futures: Sequence[Future[_Result]]) -> list[_Result]:
        """Return what the work gave, in order; the first error is raised as soon as it happens."""
        for done in wait(futures, return_when=FIRST_EXCEPTION).done:
            if error := done.exception():
                raise error
        return [f.result() for f in futures]

    def piece(self, length: int) -> memoryview:
        """Return this thread's own memory for the next piece of a tensor."""
        if self._stopped:
            raise Cancelled("cancelled", "writing was given up")
        if not hasattr(self._own, "memory"):
            self._own.memory = memoryview(bytearray(_PIECE))
        return self._own.memory[:length]  # type: ignore[no-any-return]


class _Writing:
    """One knot being written through a descriptor."""

    def __init__(self, fd: int, name: str, pool: _Pool, advance: Advance) -> None:
        self.fd = fd
        self.name = name
        self.pool = pool
        self._advance = advance
        self._one_at_a_time = threading.Lock()

    def write(self, config: KnotConfig, payload: Sequence[PayloadTensor], source: Mapping[str, object]) -> KnotHeader:
        entries, table = lay_out(payload)
        start = len(encode_header(config, [*entries, table], source=source))
        os.ftruncate(self.fd, start + table.end)

        pairs = list(zip(payload, entries, strict=True))
        digests = self.pool.results(self.pool.start(lambda p: self.copy(p[0], start + p[1].offset), pairs))
        entries = [replace(e, sha256=digest) for e, digest in zip(entries, digests, strict=True)]
        proofs = self.pool.start(lambda e: self.prove(e, start), entries)
        chunks = self.pool.start(lambda at: self.chunk_digests(start, at, table.offset), range(0, table.offset, _PIECE))
        # The disk takes the file while the processors read it again.
        os.fsync(self.fd)
        self.pool.results(proofs)
        digested: list[bytes] = self.pool.results(chunks)
        digest_table = b"".join(digested)

        entries.append(replace(table, sha256=hashlib.sha256(digest_table).hexdigest()))
        header = encode_header(config, entries, source=source)
        self.put(memoryview(digest_table), start + table.offset)
        self.put(memoryview(header), 0)
        self.prove(entries[-1], start)
        if self.get(memoryview(bytearray(start)), 0) != header:
            self.unproved("header")
        return parse_header(header, os.fstat(self.fd).st_size, self.name)

    def copy(self, tensor: PayloadTensor, at: int) -> str:
        """Copy a tensor to its place and return its digest."""
        digest = hashlib.sha256()
        offset = 0
        while offset < tensor.length:
            piece = self.pool.piece(min(_PIECE - (at + offset) % _PIECE, tensor.length - offset))
            tensor.read_into(offset, piece)
            digest.update(piece)
            self.put(piece, at + offset)
            self.advance(len(piece))
            offset += len(piece)
        return digest.hexdigest()

    def prove(self, entry: TensorEntry, start: int) -> None:
        """Read a tensor back and compare its digest. Raises: SourceError not-as-written."""
        digest = hashlib.sha256()
        for offset in range(entry.offset, entry.end, _PIECE):
            piece = self.pool.piece(min(_PIECE, entry.end - offset))
            digest.update(self.get(piece, start + offset))
            self.advance(len(piece))
        if digest.hexdigest() != entry.sha256:
            self.unproved(f"tensor {entry.name}")

    def chunk_digests(self, start: int, offset: int, end: int) -> bytes:
        """Return the chunk digests of the piece of payload that begins at `offset`."""
        piece = self.get(self.pool.piece(min(_PIECE, end - offset)), start + offset)
        at = range(0, len(piece), DIGEST_CHUNK)
        return b"".join(hashlib.sha256(piece[i : i + DIGEST_CHUNK]).digest()[:DIGEST_BYTES] for i in at)

    def put(self, piece: memoryview, at: int) -> None:
        done = 0
        while done < len(piece):
            done += os.pwrite(self.fd, piece[done:], at + done)

    def get(self, piece: memoryview, at: int) -> memoryview:
        done = 0
        while done < len(piece):
            n = os.preadv(self.fd, [piece[done:]], at + done)
            if n == 0:
                self.unproved(f"bytes {at}..{at + len(piece)}")
            done += n
        return piece

    def unproved(self, what: str) -> NoReturn:
        raise SourceError(
            "not-as-written",
            f"{self.name}: {what}: read back other than it was written",
            hint="the disk or the memory of this machine is at fault, or another process writes to the file",
        )

    def advance(self, done: int) -> None:
        with self._one_at_a_time:
            self._advance(done)


def lay_out(payload: Sequence[PayloadTensor]) -> tuple[list[TensorEntry], TensorEntry]:
    """Return the entries of the tensors, one behind the other, and that of the digest table; digests still unknown."""
    entries, offset = [], 0
    for t in payload:
        entries.append(TensorEntry(t.name, t.qtype, t.shape, offset, t.length, UNKNOWN_SHA256))
        offset += t.length
    size = digest_count(offset) * DIGEST_BYTES
    return entries, TensorEntry(DIGESTS_TENSOR, QTYPES["I8"], (size,), offset, size, UNKNOWN_SHA256)
