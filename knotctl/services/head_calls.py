"""A tracker's calls to heads: prepare a request, follow a stream line by line, probe a route. On the event loop."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx2

from knotctl.core.cluster.routes import Route
from knotctl.core.errors import KnotctlError, printable
from knotctl.services.relayed import BEAT_SECONDS, parse_error

# A head that says nothing for so many of its beats hangs, or its machine does.
_SILENT_BEATS = 10
_CONNECT_SECONDS = 2.0
_PREPARE_SECONDS = 60.0
_LIVE_SECONDS = 2.0
# Refusals of a head that say nothing of the request: another one may take it.
_ELSEWHERE = frozenset(("shutting-down", "not-ready", "unreachable", "wrong-identity", "closed-early", "closed-midway"))


class HeadLost(KnotctlError):
    """A head did not do its part; `crash` says that it died, so that the work may be the cause."""

    http_status = 503

    def __init__(self, message: str, *, crash: bool = False) -> None:
        super().__init__("head-lost", message, hint="retry later")
        self.crash = crash


class RouteFailed(KnotctlError):
    """A head did its part, and nodes behind it did not: `failed` are their URLs, each with how.

    `crashes` are the nodes that died over the stream since its last token.
    """

    http_status = 503

    def __init__(self, message: str, failed: Mapping[str, str], crashes: int = 0) -> None:
        super().__init__("route-failed", message, hint="retry later")
        self.failed, self.crashes = failed, crashes


class HeadCalls:
    """Calls to the workers of one cluster."""

    def __init__(self, *, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        timeout = httpx2.Timeout(BEAT_SECONDS * _SILENT_BEATS, connect=_CONNECT_SECONDS)
        limits = httpx2.Limits(max_connections=None)
        self._client = httpx2.AsyncClient(
            headers=headers, timeout=timeout, limits=limits, verify=tls or True, trust_env=False
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def prepare(self, route: Route, chat: bool, body: Mapping[str, Any]) -> tuple[list[int], int]:
        """Return a request's prompt and the most tokens that it may generate.

        Raises: RequestError; HeadLost, RouteFailed.
        """
        document = {"chat": chat, "body": body, "route": [s.to_json() for s in route]}
        try:
            reply = await self._client.post(f"{route[0].url}/prepare", json=document, timeout=_PREPARE_SECONDS)
        except httpx2.HTTPError as e:
            raise await self._lost(route, e) from e
        if reply.status_code != 200:
            raise _refusal(reply.content)
        found = reply.json()
        return found["prompt"], found["max_tokens"]

    async def lines(
        self, route: Route, chat: bool, body: Mapping[str, Any], prompt: Sequence[int], most: int,
        steps: Sequence[Any] = (), *, crashes: int = 0, probe: bool = False,
    ) -> AsyncIterator[dict[str, Any]]:  # fmt: skip
        """Yield what the head of a route says of a stream, to its `finish`.

        `crashes` are the nodes that died over it at this place. A `probe` ends with the route that it is for.
        Raises: RequestError; HeadLost, RouteFailed.
        """
        document = {
            "chat": chat, "body": body, "route": [s.to_json() for s in route], "prompt": list(prompt),
            "max_tokens": most, "steps": list(steps), "crashes": crashes, "probe": probe,
        }  # fmt: skip
        try:
            async with self._client.stream("POST", f"{route[0].url}/generate", json=document) as reply:
                if reply.status_code != 200:
                    raise _refusal(await reply.aread())
                async for text in reply.aiter_lines():
                    said = json.loads(text)
                    if "error" in said:
                        raise _refusal(text.encode())
                    yield said
                    if "finish" in said:
                        return
        except httpx2.HTTPError as e:
            raise await self._lost(route, e) from e
        except ValueError as e:
            raise HeadLost(f"{route[0].url}: said what no head says") from e
        raise HeadLost(f"{route[0].url}: the stream broke off")

    async def probe(self, route: Route, tokens: int, seconds: float) -> str:
        """Return what a route answers to the probe: the first tokens behind the lowest ids.

        Raises: as `lines`; HeadLost where it takes longer.
        """
        body = {"model": "probe", "prompt": [0, 1, 2], "temperature": 0, "seed": 0}
        answer: list[int] = []
        try:
            async with asyncio.timeout(seconds):
                async for said in self.lines(route, False, body, [0, 1, 2], tokens, probe=True):
                    answer += [step[0] for step in said.get("steps", ())]
        except TimeoutError:
            raise HeadLost(f"{route[0].url}: the probe was not answered for {seconds:g} seconds") from None
        return json.dumps(answer)

    async def is_alive(self, url: str) -> bool:
        """Return whether a node answers at all."""
        try:
            return (await self._client.get(f"{url}/livez", timeout=_LIVE_SECONDS)).status_code == 200
        except httpx2.HTTPError:
            return False

    async def _lost(self, route: Route, error: Exception) -> HeadLost:
        url = route[0].url
        broke_off = isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError)
        crash = broke_off and not await self.is_alive(url)
        return HeadLost(f"{url}: {printable(error) or type(error).__name__}", crash=crash)


def _refusal(content: bytes) -> KnotctlError:
    try:
        document = json.loads(content)
        error = parse_error(document)
    except ValueError:
        return HeadLost("a head answered with what is no error document")
    match document:
        case {"failed": {**failed}}:
            named = {str(url): str(how) for url, how in failed.items()}
            return RouteFailed(error.message, named, int(document.get("crashes", 0)))
    return HeadLost(error.message) if error.code in _ELSEWHERE else error
