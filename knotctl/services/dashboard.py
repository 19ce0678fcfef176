"""The dashboard at `/`: a page that needs nothing from elsewhere, and the JSON document that it is drawn from.

The page is public, what it shows is not: the document needs a key where the server has any.
Source: man knot-service(5), DASHBOARD.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from knotctl import __version__
from knotctl.services.replies import JsonReply

Status = Callable[[Request], Awaitable[Mapping[str, Any]]]

DOCUMENT_VERSION = 1
# However many look, the document is made so often at the most.
FRESH_SECONDS = 0.5

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    # All that the page is made of comes from here, and no string becomes markup: what models and nodes say is text.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_FILES = {
    path.name: path.read_bytes()
    for path in files("knotctl.services").joinpath("static").iterdir()
    if path.name[path.name.rfind(".") :] in _TYPES
}
_PATHS = {"/" if name == "index.html" else f"/static/{name}": name for name in sorted(_FILES)}
# Paths of the page itself, for EdgeConfig.public: a key is typed into it, so it must load without one.
PUBLIC_PATHS = frozenset(_PATHS)


def server_section(role: str, status: str, started: float, reason: str | None = None) -> dict[str, Any]:
    """Return who answers, and whether it is ready. Units: started in seconds of the monotonic clock."""
    uptime = round(time.monotonic() - started, 1)
    return {"version": __version__, "role": role, "status": status, "reason": reason, "uptime_s": uptime}


def dashboard_routes(status: Status, admit: Callable[[Request], Awaitable[None]] | None = None) -> list[Route]:
    """Return the routes of the page and its document, which `status` makes; `admit` refuses who may not see it."""
    pages = [Route(path, _page(name), methods=["GET"]) for path, name in _PATHS.items()]
    return [*pages, Route("/dashboard.json", _Document(status, admit).reply, methods=["GET"])]


def _page(name: str) -> Callable[[Request], Any]:
    body = _FILES[name]
    headers = _HEADERS | {"etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"'}
    media_type = _TYPES[name[name.rfind(".") :]]

    async def reply(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=media_type)

    return reply


class _Document:
    """The latest document, made anew when somebody asks for it and it is no longer fresh."""

    def __init__(self, status: Status, admit: Callable[[Request], Awaitable[None]] | None) -> None:
        self._status, self._admit = status, admit
        self._made_at = float("-inf")
        self._body: Mapping[str, Any] = {}
        self._lock = asyncio.Lock()

    async def reply(self, request: Request) -> Response:
        if self._admit is not None:
            await self._admit(request)
        async with self._lock:
            if time.monotonic() - self._made_at > FRESH_SECONDS:
                self._body = await self._status(request)
                self._made_at = time.monotonic()
        return JsonReply({"version": DOCUMENT_VERSION, **self._body}, headers={"cache-control": "no-store"})
