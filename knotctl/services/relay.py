"""One generation at the tracker: followed line by line from a head, gone on with by another where one is lost.

The lines have every step so far, and a step depends on those before it, on the seed and its position alone: so the
other head goes on with the very next token. Use it as `Generation` is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from starlette.types import Receive

from knotctl.core.cluster.routes import Route
from knotctl.core.errors import Cancelled, KnotctlError, RequestError
from knotctl.services.billing import Bill
from knotctl.services.dispatch import Dispatch
from knotctl.services.flights import Flights
from knotctl.services.head_calls import HeadLost, RouteFailed
from knotctl.services.relayed import parse_delta
from knotctl.services.text import Delta

# How long a stream waits for a route to come back, as in core/engine/recovery.py; heads that may die over one request.
PATIENCE_SECONDS = 60.0
MAX_CRASHES = 2
_PAUSE, _MOST_PAUSE = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it is sent to heads, with its seed drawn: `prompt` are ids."""

    chat: bool
    body: Mapping[str, Any]
    prompt: Sequence[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class _News:
    """What a line says: a route that serves from now on, tokens and what they add to the reply, the end."""

    route: Sequence[tuple[str, int]] | None = None
    n_steps: int = 0
    delta: Delta | None = None
    finish: str | None = None
    error: KnotctlError | None = None


class Relay:
    """Use it with `async with`; iterate `deltas()` once. It listens on `receive`, so nobody else may."""

    def __init__(
        self, dispatch: Dispatch, route: Route, call: Call, bill: Bill, flights: Flights, receive: Receive,
        on_recovery: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._dispatch, self._route, self._call, self._bill = dispatch, route, call, bill
        self._flights, self._receive, self._on_recovery = flights, receive, on_recovery
        self._flight = flights.begin(len(call.prompt))
        self._news: asyncio.Queue[_News] = asyncio.Queue()
        self._finish_reason: str | None = None
        self.n_prompt = len(call.prompt)
        self.n_tokens = 0
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._wait_for_leaving())]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._flights.end(self._flight)

    @property
    def finish_reason(self) -> str:
        """Why it ended, "stop" or "length", once it has."""
        assert self._finish_reason is not None
        return self._finish_reason

    async def deltas(self, idle_seconds: float | None = None, *, delivered: bool = True) -> AsyncIterator[Delta | None]:
        """Yield the pieces of the reply, each recorded before; None each time that so long passed without one.

        Where they are not `delivered` as they come, none is recorded: a reply that is lost half made costs nothing.

        Raises: Cancelled when the client has left, and what ended the generation if it failed.
        """
        while self._finish_reason is None:
            try:
                news = [await asyncio.wait_for(self._news.get(), idle_seconds)]
            except TimeoutError:
                yield None
                continue
            # What has come meanwhile is recorded in one go.
            while not self._news.empty():
                news.append(self._news.get_nowait())
            had = self.n_tokens
            for item in news:
                if item.route is not None:
                    self._bill.passes(item.route)
                    self._flight.passes(item.route)
                self.n_tokens += item.n_steps
                self._bill.generated(item.n_steps)
                self._flight.generated(item.n_steps)
            if delivered and self.n_tokens > had:
                await self._bill.record()
            for item in news:
                if item.error is not None:
                    raise item.error
                if item.delta is not None and (item.delta.text or item.delta.tokens):
                    yield item.delta
                if item.finish is not None:
                    self._finish_reason = item.finish

    async def _follow(self) -> None:
        try:
            await self._follow_heads()
        except KnotctlError as e:
            self._news.put_nowait(_News(error=e))
        except Exception as e:
            self._news.put_nowait(_News(error=KnotctlError("internal", f"{type(e).__name__}: {e}")))

    async def _follow_heads(self) -> None:
        steps: list[Any] = []
        crashes, pause = 0, _PAUSE  # nodes that died over it, stations too, since its last token
        since = time.monotonic()
        while True:
            route = self._route
            call = self._call
            try:
                with contextlib.ExitStack() as passing:
                    passing.enter_context(self._dispatch.passing([s.node_id for s in route]))
                    self._news.put_nowait(_News(route=[(s.node_id, len(s.span)) for s in route]))
                    calls = self._dispatch.calls
                    async for said in calls.lines(
                        route, call.chat, call.body, call.prompt, call.max_tokens, list(steps), crashes=crashes
                    ):
                        new = said.get("steps", [])
                        steps += new
                        crashes = 0 if new else said.get("crashes", crashes)
                        if new:
                            since, pause = time.monotonic(), _PAUSE
                        news = _news_of(said, len(new))
                        if news.route is not None:
                            passing.close()
                            passing.enter_context(self._dispatch.passing([node_id for node_id, _ in news.route]))
                        self._news.put_nowait(news)
                self._dispatch.worked(route)
                return
            except (HeadLost, RouteFailed) as e:
                self._on_recovery()
                self._flight.passes(())
                if isinstance(e, HeadLost):
                    await self._dispatch.lost(route[0])
                    crashes += e.crash
                else:
                    await self._dispatch.blame([(s.node_id, s.url) for s in route], e.failed)
                    crashes = max(crashes, e.crashes)
                if crashes >= MAX_CRASHES:
                    what = f"the nodes that worked on this request died, {crashes} of them: {e.message}"
                    raise KnotctlError("poison-request", what) from e
                if time.monotonic() - since > PATIENCE_SECONDS:
                    raise RequestError("no-route", e.message, status=503, hint="retry later") from e
            self._route = await self._another(since)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE)

    async def _another(self, since: float) -> Route:
        while True:
            try:
                return await self._dispatch.choose()
            except RequestError:
                if time.monotonic() - since > PATIENCE_SECONDS:
                    raise
            await asyncio.sleep(0.25)

    async def _wait_for_leaving(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._tasks[0].cancel()
        self._news.put_nowait(_News(error=Cancelled("cancelled", "the client has left")))


def _news_of(said: Mapping[str, Any], n_steps: int) -> _News:
    route = None
    if "route" in said:
        route = [(str(s["node_id"]), int(s["layers"][1]) - int(s["layers"][0])) for s in said["route"]]
    return _News(route, n_steps, parse_delta(dict(said)), said.get("finish"))
