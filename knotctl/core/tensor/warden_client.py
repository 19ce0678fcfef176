"""Asking a warden over HTTP: who it is, for tensors and rows, and to forget what is bad.

A warden is a cache: whatever is wrong with it, its client goes on without it for a while. Only a warden of another
model is an error, and only at the start, where it is somebody's mistake.
"""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from knotctl.core.errors import FormatError, KnotctlError, SourceError, UsageError, WrongIdentity, printable
from knotctl.core.knot.reader import Knot
from knotctl.core.source.http_call import Peer, Reply
from knotctl.core.source.kv_guard import Breaker
from knotctl.core.spans import Span
from knotctl.core.strict_json import parse_json_object

log = logging.getLogger("knotctl.cache")

_Result = TypeVar("_Result")

# A warden on the way to its own store may take this long for a phase, and this for rows; to say who it is, no time.
CALL_SECONDS = 30.0
ROW_SECONDS = 5.0
HELLO_SECONDS = 2.0
# Of a tensor at a time over HTTP: what is in flight takes twice that.
PIECE_BYTES = 8 << 20


class WardenClient:
    """One warden, of the kind `layer` or `row`, for one model and a part of it.

    Raises: WrongIdentity where it serves another model or not this part; UsageError bad-warden where it is no such
    warden. One that does not answer is no error: it may come up later.
    """

    def __init__(
        self,
        url: str,
        kind: str,
        knot: Knot,
        part: Span,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.url = url
        self.kind = kind
        self.breaker = Breaker()
        self._knot = knot
        self._part = part
        # Sent with every request, so that a warden that is another meanwhile says so; empty until it is known.
        self._identity: dict[str, str] = {}
        self._peer = Peer(url, token=token, tls=tls)
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="knot-warden")
        try:
            self._introduce()
        except SourceError as e:
            self._failed(e)
        except BaseException:
            self.close()
            raise

    def attempt(self, ask: Callable[[], _Result]) -> _Result | None:
        """Return what the warden answers, None where it fails or is left out for now. Raises: nothing of ours."""
        if not self.breaker.allow():
            return None
        try:
            if not self._identity:
                self._introduce()
            found = ask()
        except KnotctlError as e:
            self._failed(e)
            return None
        self.breaker.succeeded()
        return found

    def get_json(self, path: str) -> dict[str, Any] | None:
        """Return the document at a path, None where there is none (404). Raises: SourceError, WrongIdentity."""
        reply = self._call("GET", path, {200, 404})
        return None if reply.status == 404 else self._document(reply)

    def read_into(self, path: str, first: int, out: memoryview) -> bool:
        """Fill `out` with bytes from `first` on of the tensor at a path. Raises: SourceError, WrongIdentity."""
        for at in range(0, len(out), PIECE_BYTES):
            piece = out[at : at + PIECE_BYTES]
            asked = {"Range": f"bytes={first + at}-{first + at + len(piece) - 1}"}
            body = self._call("GET", path, {206}, headers=asked).body
            if len(body) != len(piece):
                raise SourceError("bad-answer", f"{self.url}: asked for {len(piece)} bytes, found {len(body)}")
            piece[:] = body
        return True

    def post(self, path: str, document: Mapping[str, object], *, extra_seconds: float = 0.0) -> bytes:
        """Return the reply to a document. Raises: SourceError, WrongIdentity."""
        return self._call("POST", path, {200}, document, extra_seconds=extra_seconds).body

    def invalidate(self, path: str, document: Mapping[str, object] | None = None) -> None:
        """Have the warden forget something, without waiting for it."""
        self._behind.submit(lambda: self.attempt(lambda: self._call("POST", path, {200}, document or {})))

    def close(self) -> None:
        """Send what is to be sent, and close the connections."""
        self._behind.shutdown()
        self._peer.close()

    def _introduce(self) -> None:
        """Learn the warden's identity and hold it to the model's. Raises: UsageError, WrongIdentity, SourceError."""
        about = self._document(self._peer.call("GET", "/health", seconds=HELLO_SECONDS))
        if about.get("role") != f"{self.kind}-warden":
            raise UsageError(
                "bad-warden", f"{self.url}: expected a {self.kind} warden, found {printable(about.get('role'))!r}"
            )
        if about.get("knot_id") != self._knot.id:
            raise WrongIdentity(
                "wrong-identity",
                f"{self.url}: expected a warden of knot {self._knot.id}, found {printable(about.get('knot_id'))}",
                hint="the warden was started with another model file",
            )
        match about.get("spans"):
            case [[int(start), int(end)]] if start <= self._part.start and self._part.end <= end:
                noun = {"layer": "Layer", "row": "Vocab"}[self.kind]
                self._identity = {
                    "X-Knot-Id": self._knot.id, f"X-{noun}-Start": str(start), f"X-{noun}-End": str(end)
                }  # fmt: skip
            case spans:
                raise WrongIdentity(
                    "wrong-identity", f"{self.url}: expected a warden of {self._part}, found one of {printable(spans)}"
                )

    def _failed(self, error: KnotctlError) -> None:
        # Whoever answers next may be another: it is asked who it is.
        self._identity = {}
        opened = self.breaker.trip() if error.code == "timeout" else self.breaker.failed()
        if opened:
            log.warning("warden %s: left out for now: %s", self.url, error.message)

    def _call(
        self,
        method: str,
        path: str,
        expected: Iterable[int],
        document: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        extra_seconds: float = 0.0,
    ) -> Reply:
        body = b"" if document is None else json.dumps(document).encode()
        fields = {**self._identity, **(headers or {})}
        seconds = (ROW_SECONDS if self.kind == "row" else CALL_SECONDS) + extra_seconds
        reply = self._peer.call(method, path, body, seconds=seconds, headers=fields)
        if reply.status == 409:
            raise WrongIdentity("wrong-identity", f"{self.url}: it is another model's warden now, or of other layers")
        if reply.status not in expected:
            raise SourceError("warden-failed", f"{self.url}: status {reply.status}")
        return reply

    def _document(self, reply: Reply) -> dict[str, Any]:
        return parse_json_object(reply.body, lambda code, what: FormatError(code, f"{self.url}: {what}"))
