"""Bytes of an http(s):// URL by range requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx2

from knotctl import __version__
from knotctl.core.errors import SourceError, printable
from knotctl.core.source.ranged import Pin, RangedSource, refusal
from knotctl.core.source.retry import Transient

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 30.0
_PIECE = 256 << 10


def open_http(url: str) -> RangedSource:
    """Return the open source of a URL. Raises: SourceError."""
    name = shown_url(url)
    return RangedSource(name, HttpStore(url, name))


def shown_url(url: str) -> str:
    """Return a URL as it may be shown: a query can hold a signature, a user part a password."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class HttpStore:
    """A URL, over connections that are kept."""

    def __init__(self, url: str, name: str, headers: Mapping[str, str] | None = None) -> None:
        self._url = url
        self._name = name
        self._client = httpx2.Client(
            timeout=httpx2.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            follow_redirects=True,
            max_redirects=5,
            # Ranges of a compressed body would be ranges of other bytes.
            headers={"Accept-Encoding": "identity", "User-Agent": f"knotctl/{__version__}", **(headers or {})},
        )

    def get(self, first: int, last: int, pin: Pin | None) -> HttpAnswer:
        """Return the answer to a GET of bytes first..last. Raises: Transient, SourceError."""
        headers = {"Range": f"bytes={first}-{last}"}
        if pin is not None and pin.etag:
            headers["If-Match"] = pin.etag
        elif pin is not None and pin.modified:
            headers["If-Unmodified-Since"] = pin.modified
        try:
            stream = self._client.stream("GET", self._url, headers=headers)
            answer = HttpAnswer(stream, stream.__enter__())
        except httpx2.TransportError as e:
            raise Transient("unreachable", f"no answer: {printable(e) or type(e).__name__}") from e
        except (httpx2.InvalidURL, httpx2.HTTPError) as e:
            raise SourceError("bad-url", f"{self._name}: {printable(e)}") from e
        if answer.status not in (200, 206, 412, 416):
            answer.close()
            raise refusal(self._name, answer.status, answer.headers)
        return answer

    def close(self) -> None:
        """Close connections."""
        self._client.close()


class HttpAnswer:
    """An answer whose body is still to come."""

    def __init__(self, stream: AbstractContextManager[Any], response: httpx2.Response) -> None:
        self._stream = stream
        self._response = response
        self.status = response.status_code
        self.headers: Mapping[str, str] = {k.lower(): v for k, v in response.headers.items()}

    def pieces(self) -> Iterator[bytes]:
        """Yield the body. Raises: Transient."""
        try:
            yield from self._response.iter_raw(_PIECE)
        except httpx2.TransportError as e:
            raise Transient("unreachable", f"the connection broke: {printable(e) or type(e).__name__}") from e

    def close(self) -> None:
        """Give up the rest of the body."""
        self._stream.__exit__(None, None, None)
