"""What a worker with layer 0 does for its tracker: it tokenises requests and runs their streams over given routes.

Streams of one route share an engine, and so its passes. Source: man knot-service(5), WORKERS.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from knotctl.core.engine.hop import RemoteError
from knotctl.core.engine.route import Hop, Reroute, RouteEnded, RouteStages, parse_route
from knotctl.core.engine.session import Engine, EngineSpec, context_exceeded
from knotctl.core.engine.stream import Step, Stream
from knotctl.core.errors import KnotctlError, RequestError, UsageError, as_error
from knotctl.core.knot.reader import Knot
from knotctl.core.model.embed import Shard
from knotctl.core.source.cache_counts import CacheCounts
from knotctl.core.spans import VocabSpan
from knotctl.core.strict_json import parse_json_object
from knotctl.core.tokens.chat import encode_chat
from knotctl.core.tokens.tokenizer import load_tokenizer
from knotctl.services.node import until_left
from knotctl.services.openai_schema import GenerationRequest, parse_chat, parse_completion
from knotctl.services.relayed import BEAT_SECONDS, LINES_TYPE, delta_json, error_json, line, parse_steps, step_json
from knotctl.services.replies import JsonReply
from knotctl.services.text import Delta, TextAssembler

# A step, None behind the last one, and the version of the route that it came over.
_Item = tuple[Step | None, int]
# Routes whose engines stay without a stream; beyond it the one unused for longest is closed.
MAX_IDLE = 4


class _Line:
    """The engine of one route, opened by whoever comes first. `users` is its owner's to keep, under its lock."""

    def __init__(self, hops: tuple[Hop, ...], opened: Callable[[], Engine]) -> None:
        self.hops, self.users = hops, 0
        self._opened, self._lock = opened, threading.Lock()
        self._engine: Engine | None = None

    def engine(self) -> Engine:
        """Return the engine. Raises: what keeps the route from being used."""
        with self._lock:
            self._engine = self._engine or self._opened()
            return self._engine

    @property
    def has_moved(self) -> bool:
        """Whether it left its route behind, and is another route's by now."""
        return self._engine is not None and getattr(self._engine.stages, "hops", self.hops) != self.hops

    def close(self) -> None:
        """Close the engine, where there is one."""
        with self._lock:
            if self._engine is not None:
                self._engine.close()


class HeadWork:
    """The head of the routes that begin here. `routes` are its endpoints."""

    def __init__(
        self, knot: Knot, reroute: Reroute, *, context: int, token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self.knot = knot
        self._tokenizer = load_tokenizer(knot.tokenizer_keys())
        self._shard = Shard(knot, VocabSpan(0, knot.header.config.vocab_size))
        self._reroute, self._token, self._tls = reroute, token, tls
        self._spec = EngineSpec(context=context)
        # by the route that they are for, those used last at the end
        self._lines: dict[tuple[Hop, ...], _Line] = {}
        self._lock = threading.Lock()
        self.draining = False
        self.routes = [
            Route("/prepare", self._prepare, methods=["POST"]),
            Route("/generate", _Generate(self), methods=["POST"]),
        ]

    @contextlib.contextmanager
    def engine(self, hops: tuple[Hop, ...]) -> Iterator[Engine]:
        """Yield the engine of a route; it stays open for as long. Raises: what keeps the route from being used."""
        with self._lock:
            line = self._lines.pop(hops, None)
            if line is None or line.has_moved:
                self._retire(line)
                line = _Line(hops, lambda: self._open(hops, self._reroute))
            self._lines[hops] = line
            line.users += 1
        try:
            yield line.engine()
        finally:
            with self._lock:
                line.users -= 1
                idle = [h for h, one in self._lines.items() if not one.users]
                for old in idle[: max(0, len(idle) - MAX_IDLE)]:
                    self._retire(self._lines.pop(old))
                if self._lines.get(hops) is not line:
                    self._retire(line)

    @contextlib.contextmanager
    def proving(self, hops: tuple[Hop, ...]) -> Iterator[Engine]:
        """Yield an engine of its own for a route, whose streams end with it: no other route is asked for."""

        def end(_: tuple[Hop, ...], failed: Mapping[str, str]) -> NoReturn:
            raise RouteEnded("the route that is to be proved is lost", failed)

        engine = self._open(hops, end)
        try:
            yield engine
        finally:
            engine.close()

    def caches(self) -> list[CacheCounts]:
        """Return the cache levels of the rows that streams begin with."""
        return self._shard.source.counts

    def drain(self) -> None:
        """Hand the streams over: each is told to go on at another head."""
        self.draining = True

    def close(self) -> None:
        """Close every engine."""
        with self._lock:
            for line in self._lines.values():
                line.close()
            self._lines.clear()

    def _open(self, hops: tuple[Hop, ...], reroute: Reroute) -> Engine:
        stages = RouteStages(self.knot, self._shard, hops, reroute, token=self._token, tls=self._tls)
        try:
            return Engine(self.knot, self._spec, stages, tokenizer=self._tokenizer, owns_knot=False)
        except BaseException:
            stages.close()
            raise

    def _retire(self, line: _Line | None) -> None:
        """Close an engine that is no route's any more, once nobody uses it; the lock is held."""
        if line is not None and not line.users:
            threading.Thread(target=line.close, name="knotctl-retire", daemon=True).start()

    def parse(self, document: dict[str, Any]) -> tuple[GenerationRequest, tuple[Hop, ...]]:
        """Return the request and the route of a call. Raises: RequestError, UsageError."""
        chat, body = document.get("chat"), document.get("body")
        if not isinstance(chat, bool) or not isinstance(body, dict):
            raise UsageError("usage", "request: expected chat, body and route")
        parse = parse_chat if chat else parse_completion
        wanted = parse(body, self.knot.header.config.vocab_size)
        return wanted, parse_route(document.get("route"), self.knot.header.config.n_layers)

    async def _prepare(self, request: Request) -> Response:
        """Check a request and tokenise its prompt; what it would cost is known then, and nothing has begun."""
        document = _object(await request.body())

        def prepare() -> dict[str, Any]:
            wanted, hops = self.parse(document)
            with self.engine(hops) as engine:
                ids = _prompt(engine, wanted)
                room = engine.context_length - len(ids)
                if not ids:
                    raise RequestError("empty-prompt", "the prompt has no tokens", param="prompt")
                if room < 1:
                    raise context_exceeded(len(ids), engine.context_length, "messages" if wanted.messages else "prompt")
                most = room if wanted.max_tokens is None else min(wanted.max_tokens, room)
                return {"prompt": ids, "max_tokens": most, "context_length": engine.context_length}

        try:
            return JsonReply(await asyncio.to_thread(prepare))
        except KnotctlError as e:
            return _refusal(e)


class _Generate:
    """Runs a stream and tells it line by line, as an ASGI application: it must hear its caller leave."""

    def __init__(self, work: HeadWork) -> None:
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        document = _object(await request.body())
        try:
            wanted, hops = self._work.parse(document)
            steps = parse_steps(document.get("steps", []))
            match {"crashes": 0} | document:
                case {"prompt": list(ids), "max_tokens": int(most), "crashes": int(crashes)} if most >= len(steps):
                    crashes = max(0, crashes)
                case _:
                    raise UsageError(
                        "usage", "request: expected prompt, max_tokens, no fewer than the steps, and crashes"
                    )
            opening = contextlib.ExitStack()
            is_probe = bool(document.get("probe"))
            lent = self._work.proving(hops) if is_probe else self._work.engine(hops)
            engine = await asyncio.to_thread(opening.enter_context, lent)
        except KnotctlError as e:
            await _refusal(e)(scope, receive, send)
            return
        told = _Told(engine, wanted, send, lambda: self._work.draining)
        try:
            await told.run(request, ids, steps, most, crashes=crashes, ignore_stop=is_probe)
        finally:
            await asyncio.to_thread(opening.close)


class _Told:
    """One stream on its way to the tracker."""

    def __init__(self, engine: Engine, wanted: GenerationRequest, send: Send, draining: Callable[[], bool]) -> None:
        self._engine, self._wanted, self._send, self._draining = engine, wanted, send, draining
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._assembler = TextAssembler(engine.tokenizer, wanted.stops)
        self._version = 0

    async def run(
        self, request: Request, ids: list[int], steps: list[Step], most: int, *, crashes: int, ignore_stop: bool
    ) -> None:
        """Tell the stream behind the steps that were told before, by another head."""
        for step in steps:
            self._assembler.push(step)
        stages = self._engine.stages
        assert isinstance(stages, RouteStages)
        self._version = stages.version
        history = [*ids, *(s.token for s in steps)]
        stream = self._engine.submit(
            history, self._wanted.params, most - len(steps), ignore_stop=ignore_stop,
            crashes=crashes, notify=lambda step: self._notify(step, stages.version),
        )  # fmt: skip
        headers = [(b"content-type", LINES_TYPE.encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        leaving = asyncio.create_task(until_left(request))
        try:
            while not leaving.done():
                if self._draining():
                    await self._write(error_json(_shutting_down()), more=False)
                    return
                try:
                    item: _Item = await asyncio.wait_for(self._queue.get(), BEAT_SECONDS)
                except TimeoutError:
                    await self._write({"crashes": stream.crashes} if stream.crashes else {})
                    continue
                new, version = item
                if version != self._version:
                    self._version = version
                    route = [{"node_id": h.node_id, "layers": [h.span.start, h.span.end]} for h in stages.hops]
                    await self._write({"route": route})
                if new is None:
                    await self._write(self._end(stream), more=False)
                    return
                delta = self._assembler.push(new)
                await self._write({"steps": [step_json(new)]} | delta_json(delta))
                if self._assembler.stopped:
                    await self._write({"finish": "stop"}, more=False)
                    return
        finally:
            stream.cancel()
            leaving.cancel()

    def _end(self, stream: Stream) -> dict[str, Any]:
        reason = stream.finish_reason or "stop"
        if stream.error is not None:
            return _failure(stream.error) | {"crashes": stream.crashes}
        if reason == "cancelled":
            return error_json(_shutting_down())
        rest: Delta = self._assembler.finish()
        return {"finish": "stop" if self._assembler.stopped else reason} | delta_json(rest)

    def _notify(self, step: Step | None, version: int) -> None:
        # In the engine's thread, which must outlive a loop that is closed already.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (step, version))

    async def _write(self, document: dict[str, Any], *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": line(document), "more_body": more})


def _prompt(engine: Engine, wanted: GenerationRequest) -> list[int]:
    if wanted.messages is not None:
        return encode_chat(engine.tokenizer, engine.template, wanted.messages)[1]
    if isinstance(wanted.prompt, list):
        return wanted.prompt
    least = engine.tokenizer.least_tokens(wanted.prompt)
    if least > engine.context_length:
        raise context_exceeded(least, engine.context_length, "prompt")
    return engine.tokenizer.with_bos(engine.tokenizer.encode(wanted.prompt))


def _shutting_down() -> RequestError:
    return RequestError("shutting-down", "the worker is shutting down", status=503, hint="go on at another")


def _object(body: bytes) -> dict[str, Any]:
    return parse_json_object(body, lambda code, what: UsageError(code, f"request: {what}"))


def _failure(error: KnotctlError) -> dict[str, Any]:
    """Return the document of an error, and which node failed, where it was one of the route."""
    document = error_json(as_error(error))
    if isinstance(error, RouteEnded):
        document["failed"] = error.failed
    elif isinstance(error, RemoteError):
        document["failed"] = {error.url: error.code}
    return document


def _refusal(error: KnotctlError) -> JsonReply:
    document = _failure(error)
    return JsonReply(document, document["error"]["status"])
