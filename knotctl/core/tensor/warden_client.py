"""Asking a warden over HTTP: who it is, for tensors and rows, and to forget what is bad.

A warden is a cache: whatever is wrong with it, its client goes on without it for a while. Only a warden of another
model is an error, and only at the start, where it is somebody's mistake.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx2

from knotctl import __version__
from knotctl.core.errors import FormatError, KnotctlError, SourceError, UsageError, WrongIdentity, printable
from knotctl.core.knot.reader import Knot
from knotctl.core.source.kv_guard import Breaker
from knotctl.core.spans import Span
from knotctl.core.strict_json import parse_json_object

log = logging.getLogger("knotctl.cache")

_Result = TypeVar("_Result")

# A warden on the way to its own store may take this long for a segment; it is on this host or near.
_TIMEOUT = httpx2.Timeout(60.0, connect=1.0)
_URL = re.compile(r"https?://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
_DOCUMENT_CAP = 16 << 20


class WardenClient:
    """One warden, of the kind `layer` or `row`, for one model and a part of it.

    Raises: WrongIdentity where it serves another model or not this part; UsageError bad-warden where it is no such
    warden. One that does not answer is no error: it may come up later.
    """

    def __init__(self, url: str, kind: str, knot: Knot, part: Span, *, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        if not _URL.fullmatch(self.url):
            raise UsageError("bad-warden", f"{printable(url)}: expected http://HOST:PORT or https://HOST:PORT")
        self.kind = kind
        self.breaker = Breaker()
        self._knot = knot
        self._part = part
        # Sent with every request, so that a warden that is another meanwhile says so; empty until it is known.
        self._identity: dict[str, str] = {}
        headers = {"User-Agent": f"knotctl/{__version__}", "Accept-Encoding": "identity"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        # Without the environment's proxies: a warden is a part of the cluster.
        self._http = httpx2.Client(base_url=self.url, timeout=_TIMEOUT, headers=headers, trust_env=False)
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="knot-warden")
        try:
            self._introduce()
        except (SourceError, httpx2.TransportError) as e:
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
        except (KnotctlError, httpx2.TransportError) as e:
            self._failed(e)
            return None
        self.breaker.succeeded()
        return found

    def get_json(self, path: str) -> dict[str, Any] | None:
        """Return the document at a path, None where there is none (404). Raises: SourceError, WrongIdentity."""
        reply = self._send("GET", path)
        return None if reply.status_code == 404 else _document(self.url, reply)

    def read_into(self, path: str, first: int, out: memoryview) -> bool:
        """Fill `out` with bytes from `first` on of the tensor at a path. Raises: SourceError, WrongIdentity."""
        headers = {**self._identity, "Range": f"bytes={first}-{first + len(out) - 1}"}
        with self._http.stream("GET", path, headers=headers) as reply:
            _check_status(self.url, reply, {206})
            done = 0
            for piece in reply.iter_raw():
                if done + len(piece) > len(out):
                    raise SourceError("bad-answer", f"{self.url}: asked for {len(out)} bytes, found more")
                out[done : done + len(piece)] = piece
                done += len(piece)
        if done < len(out):
            raise SourceError("short-body", f"{self.url}: asked for {len(out)} bytes, found {done}")
        return True

    def post(self, path: str, document: Mapping[str, object], cap: int) -> bytes:
        """Return the reply to a document, refused beyond `cap` bytes. Raises: SourceError, WrongIdentity."""
        with self._http.stream("POST", path, json=document, headers=self._identity) as reply:
            _check_status(self.url, reply, {200})
            body = bytearray()
            for piece in reply.iter_raw():
                body += piece
                if len(body) > cap:
                    raise SourceError("bad-answer", f"{self.url}: expected at most {cap} bytes, found more")
        return bytes(body)

    def invalidate(self, path: str, document: Mapping[str, object] | None = None) -> None:
        """Have the warden forget something, without waiting for it."""

        def tell() -> None:
            self.attempt(lambda: self._send("POST", path, document or {}))

        self._behind.submit(tell)

    def close(self) -> None:
        """Send what is to be sent, and close the connections."""
        self._behind.shutdown()
        self._http.close()

    def _introduce(self) -> None:
        """Learn the warden's identity and hold it to the model's. Raises: UsageError, WrongIdentity, SourceError."""
        about = _document(self.url, self._http.get("/health"))
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

    def _failed(self, error: Exception) -> None:
        # Whoever answers next may be another: it is asked who it is.
        self._identity = {}
        if self.breaker.failed():
            log.warning("warden %s: left out for now: %s", self.url, printable(error) or type(error).__name__)

    def _send(self, method: str, path: str, document: Mapping[str, object] | None = None) -> httpx2.Response:
        reply = self._http.request(method, path, json=document, headers=self._identity)
        return _check_status(self.url, reply, {200, 404})


def _check_status(url: str, reply: httpx2.Response, expected: Iterable[int]) -> httpx2.Response:
    if reply.status_code == 409:
        raise WrongIdentity("wrong-identity", f"{url}: it is another model's warden now, or of other layers")
    if reply.status_code not in expected:
        raise SourceError("warden-failed", f"{url}: status {reply.status_code}")
    return reply


def _document(url: str, reply: httpx2.Response) -> dict[str, Any]:
    if len(reply.content) > _DOCUMENT_CAP:
        raise SourceError("bad-answer", f"{url}: a document of {len(reply.content)} bytes")
    return parse_json_object(reply.content, lambda code, what: FormatError(code, f"{url}: {what}"))
