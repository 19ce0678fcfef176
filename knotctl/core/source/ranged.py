"""What every store that answers range requests has in common: a pinned object, its first bytes kept, answers checked.

Each answer must be of the object that was opened (its ETag), of the range that was asked for (Content-Range), and of
its length. Stores get all three wrong now and then; mixing the rows of two models is worse than an error.

Source: RFC 9110 sections 13 and 14. If-Range is never used: where it fails it answers with the whole body.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from knotctl.core.errors import ObjectChanged, SourceError, printable
from knotctl.core.source.base import check_range
from knotctl.core.source.retry import DEADLINE_S, Transient, with_retries

# Kept from the answer that opened the object: a knot's header is read from it without another request.
HEAD_BYTES = 256 << 10
# A store that sends less than this is not worth waiting for.
_LEAST_BYTES_PER_S = 64 << 10
_BUSY = {408, 425, 429, 500, 502, 503, 504}
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19})")


class Answer(Protocol):
    """A store's answer to a GET: headers in lower case, then the body piece by piece."""

    status: int
    headers: Mapping[str, str]

    def pieces(self) -> Iterable[bytes]:
        """Yield the body. Raises: Transient."""
        ...

    def close(self) -> None:
        """Give up the rest of the body, and with it the connection if need be."""
        ...


class Store(Protocol):
    """One object of a store."""

    def get(self, first: int, last: int, pin: Pin | None) -> Answer:
        """Return the answer to a GET of bytes first..last, conditional on the pin. Raises: Transient, SourceError."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


@dataclass(frozen=True, slots=True)
class Pin:
    """What identifies the object: a strong ETag, else the time of its last change, else nothing but its size."""

    size: int
    etag: str | None
    modified: str | None

    def __str__(self) -> str:
        return self.etag or self.modified or f"{self.size} bytes"


class RangedSource:
    """A byte source over range requests, pinned to the object that it was opened on."""

    def __init__(self, name: str, store: Store) -> None:
        self.name = printable(name, 4096)
        self._store = store
        self._closed = False
        try:
            self._pin, self._head = with_retries(self.name, self._open)
        except BaseException:
            store.close()
            raise
        self.size = self._pin.size
        # Without a validator nobody can say whether two openings hold the same bytes: they are told apart.
        unpinned = "" if self._pin.etag or self._pin.modified else f"|{secrets.token_hex(8)}"
        self.identity = f"{self.name}|{self._pin.size}|{self._pin}{unpinned}"

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`. Raises: SourceError, ObjectChanged."""
        check_range(self.name, self.size, offset, length)
        out = bytearray(length)
        self.read_into(offset, memoryview(out))
        return bytes(out)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` wholly with the bytes from `offset`. Raises: SourceError, ObjectChanged."""
        view = out.cast("B")
        check_range(self.name, self.size, offset, len(view))
        if self._closed:
            raise SourceError("read-failed", f"{self.name}: read after it was closed")
        kept = min(max(len(self._head) - offset, 0), len(view))
        view[:kept] = self._head[offset : offset + kept]
        if kept < len(view):
            with_retries(self.name, lambda: self._fetch(offset + kept, view[kept:]))

    def close(self) -> None:
        """Close the connections; closing twice is no error."""
        if not self._closed:
            self._closed = True
            self._store.close()

    def _open(self) -> tuple[Pin, bytes]:
        """Return the pin and the first bytes, by one request."""
        answer = self._store.get(0, HEAD_BYTES - 1, None)
        try:
            if answer.status == 416:  # only an empty object has no first byte
                return _pin(answer, 0), b""
            total = _total(answer)
            if total is None:
                self._refuse_whole(answer)
                # A small object comes whole from a server that knows no ranges.
                body = bytearray(int(answer.headers["content-length"]))
            else:
                body = bytearray(min(HEAD_BYTES, total))
                self._check_range(answer, 0, len(body), total)
            self._fill(answer, memoryview(body))
            return _pin(answer, len(body) if total is None else total), bytes(body)
        finally:
            answer.close()

    def _fetch(self, offset: int, out: memoryview) -> None:
        answer = self._store.get(offset, offset + len(out) - 1, self._pin)
        try:
            if answer.status in (412, 416):
                raise self._changed(f"status {answer.status}")
            total = _total(answer)
            if total is None:
                self._refuse_whole(answer)
                raise SourceError("range-ignored", f"{self.name}: the server ignores Range: it cannot be read in parts")
            found = _pin(answer, total)
            if found.size != self._pin.size or (found.etag and self._pin.etag and found.etag != self._pin.etag):
                raise self._changed(f"{found.size} bytes, {found}")
            if not (found.etag and self._pin.etag) and found.modified != self._pin.modified:
                raise self._changed(f"{found}")
            self._check_range(answer, offset, len(out), total)
            self._fill(answer, out)
        finally:
            answer.close()

    def _refuse_whole(self, answer: Answer) -> None:
        """Refuse a body that is the whole object, where that is more than was asked for, before it is read."""
        length = answer.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > HEAD_BYTES:
            raise SourceError(
                "range-ignored",
                f"{self.name}: the server ignores Range: asked for a part, found status {answer.status} without "
                "Content-Range",
                hint="fetch the file whole, or serve it by a server that knows range requests",
            )

    def _check_range(self, answer: Answer, offset: int, length: int, total: int) -> None:
        m = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
        if m is None or m[1] is None or (int(m[1]), int(m[2]) + 1) != (offset, offset + length):
            found = printable(answer.headers.get("content-range"), 80)
            raise Transient("bad-answer", f"asked for bytes {offset}..{offset + length} of {total}, found {found!r}")

    def _fill(self, answer: Answer, out: memoryview) -> None:
        """Fill `out` from the body; a longer body is cut off, a shorter or endlessly slow one tried again."""
        until = time.monotonic() + DEADLINE_S + len(out) / _LEAST_BYTES_PER_S
        done = 0
        for piece in answer.pieces():
            if time.monotonic() > until:
                raise Transient("too-slow", f"found {done} of {len(out)} bytes after {DEADLINE_S:.0f} s and more")
            if done + len(piece) > len(out):
                raise Transient("bad-answer", f"asked for {len(out)} bytes, found more")
            out[done : done + len(piece)] = piece
            done += len(piece)
        if done < len(out):
            raise Transient("short-body", f"asked for {len(out)} bytes, found {done}")

    def _changed(self, found: str) -> ObjectChanged:
        return ObjectChanged(
            "object-changed",
            f"{self.name}: the object was replaced while it was read; expected {self._pin.size} bytes, {self._pin}, "
            f"found {printable(found, 200)}",
            hint="run again: it will be read anew from the beginning",
        )


def refusal(name: str, status: int, headers: Mapping[str, str]) -> Exception:
    """Return the error that a status stands for: Transient where the store asks to come again."""
    if status in _BUSY:
        after = headers.get("retry-after", "")
        return Transient("store-busy", f"status {status}", after_s=float(after) if after.isdecimal() else None)
    where = printable(name, 4096)
    if status in (401, 403):
        return SourceError("permission-denied", f"{where}: status {status}: permission denied")
    if status in (404, 410):
        return SourceError("not-found", f"{where}: status {status}: no such object")
    return SourceError("read-failed", f"{where}: expected status 206, found {status}")


def _total(answer: Answer) -> int | None:
    m = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    return int(m[3]) if m else None


def _pin(answer: Answer, size: int) -> Pin:
    etag = answer.headers.get("etag", "")
    # A weak ETag says that two objects are alike, not that their bytes are equal.
    strong = etag if etag.startswith('"') and etag.endswith('"') and len(etag) > 2 else None
    return Pin(size, strong, answer.headers.get("last-modified"))
