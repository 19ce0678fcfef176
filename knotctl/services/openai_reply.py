"""A reply of OpenAI's API on its way to the client: the events of a stream, from a generation here or at a head.

Source: man knot-service(5), HEAD.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from starlette.types import Scope, Send

from knotctl.core.errors import Cancelled, KnotctlError
from knotctl.services.openai_events import DONE, PING, ReplyFormat, event, usage
from knotctl.services.replies import error_document
from knotctl.services.text import Delta

# Well below the minute after which common proxies take a silent connection for dead.
PING_SECONDS = 15.0
# A client that reads nothing for so long has left, whatever its kernel says.
SEND_SECONDS = 60.0


class Pieces(Protocol):
    """A generation as a reply sees it."""

    n_prompt: int

    @property
    def n_tokens(self) -> int:
        """Tokens generated so far."""
        ...

    @property
    def finish_reason(self) -> str:
        """Why it ended, once it has."""
        ...

    def deltas(self, idle_seconds: float | None = None) -> AsyncIterator[Delta | None]:
        """Yield the pieces, None each time that so long passed without one."""
        ...


async def send_stream(
    pieces: Pieces, form: ReplyFormat, scope: Scope, send: Send, *, with_usage: bool,
    at_end: Callable[[], Awaitable[dict[str, Any]]],
) -> None:  # fmt: skip
    """Send a generation as events; `at_end` is awaited when all text was sent, and adds to the closing one.

    Raises: Cancelled where the client has left.
    """

    async def write(data: bytes, more: bool = True) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise Cancelled("cancelled", "the client reads nothing") from None

    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        # nginx would hold the pieces back
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if opening := form.opening():
        await write(event(opening))
    try:
        async for delta in pieces.deltas(PING_SECONDS):
            await write(PING if delta is None else event(form.piece(delta)))
        more = await at_end()
    except Cancelled:
        raise
    except KnotctlError as e:
        # Without [DONE]: clients must not take what came for all of it.
        await write(event(error_document(scope["path"], e)), more=False)
        return
    await write(event(form.closing(pieces.finish_reason) | more))
    if with_usage:
        await write(event(form.total(usage(pieces.n_prompt, pieces.n_tokens))))
    await write(DONE, more=False)
