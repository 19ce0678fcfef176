"""The head: OpenAI's API over an engine of this process, with health, metrics and model list.

Every request passes `edge.py` first; its fields are checked in `openai_schema.py`, its text made in `text.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from knotctl.core.engine.session import Engine
from knotctl.core.engine.stream import Stream
from knotctl.core.errors import KnotctlError, RequestError, printable
from knotctl.core.tokens.sampler import SamplingParams
from knotctl.services.dashboard import PUBLIC_PATHS, dashboard_routes, server_section
from knotctl.services.edge import Edge, EdgeConfig
from knotctl.services.generation import Generation, prompt_ids
from knotctl.services.head_status import engine_sections
from knotctl.services.metrics import CONTENT_TYPE, Metrics
from knotctl.services.openai_events import ReplyFormat, usage
from knotctl.services.openai_reply import send_stream
from knotctl.services.openai_schema import parse_body, parse_chat, parse_completion
from knotctl.services.replies import JsonReply


class Head:
    """One model's API. `ready` once a probe token went through, until `drain()`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ready = False
        self._failure: KnotctlError | None = None
        self._draining = False
        self._created = int(time.time())
        self._started = time.monotonic()
        routes = [
            Route("/v1/chat/completions", _Completions(self, chat=True), methods=["POST"]),
            Route("/v1/completions", _Completions(self, chat=False), methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/livez", self._livez, methods=["GET"]),
            Route("/readyz", self._readyz, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]
        routes += dashboard_routes(self._document)
        self.routes = tuple(route.path for route in routes)
        self.metrics = Metrics(engine.model_name, self.routes, engine.stats)
        self._router = Router(routes, redirect_slashes=False, lifespan=self._lifespan)

    def app(self, config: EdgeConfig) -> ASGIApp:
        """Return the ASGI application, behind its edge."""

        def observe(scope: Scope, status: int, seconds: float) -> None:
            self.metrics.request(scope["path"], status, seconds)

        return Edge(self._router, replace(config, public=config.public | PUBLIC_PATHS), observe)

    def drain(self) -> None:
        """Be not ready from now on; what runs goes on."""
        self._draining = True

    def check_model(self, name: str) -> None:
        """Raise RequestError model_not_found unless it is the name of the model served here."""
        if name != self.engine.model_name:
            raise RequestError(
                "model_not_found",
                f"model {printable(name, 100)!r}: not served here",
                param="model",
                status=404,
                hint=f"this server has {self.engine.model_name!r}",
            )

    @asynccontextmanager
    async def _lifespan(self, _: ASGIApp) -> AsyncIterator[None]:
        # One token through the whole model: ready is what has computed, not what has started.
        probe = self.engine.submit([0], SamplingParams(temperature=0), 1, ignore_stop=True)
        waiting = asyncio.create_task(asyncio.to_thread(self._wait_for_probe, probe))
        try:
            yield
        finally:
            probe.cancel()
            await waiting

    def _wait_for_probe(self, probe: Stream) -> None:
        try:
            for _ in probe:
                self.ready = True
        except KnotctlError as e:
            self._failure = e

    def _state(self) -> tuple[str, int]:
        if self._draining:
            return "draining", 503
        if self._failure is not None:
            return "failed", 503
        return ("ok", 200) if self.ready else ("loading", 503)

    async def _livez(self, _: Request) -> Response:
        return JsonReply({"status": "ok"})

    async def _readyz(self, _: Request) -> Response:
        state, status = self._state()
        document = {"status": state}
        if self._failure is not None:
            document["reason"] = self._failure.message
        return JsonReply(document, status)

    async def _health(self, _: Request) -> Response:
        state, status = self._state()
        engine = self.engine
        document = {
            "status": state,
            "role": "head",
            "model": engine.model_name,
            "knot_id": engine.knot_id,
            "spans": [[s.start, s.end] for s in engine.stages.spans],
            "bytes": engine.stats(),
        }
        return JsonReply(document, status)

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    async def _document(self, _: Request) -> dict[str, object]:
        return await asyncio.to_thread(self._dashboard)

    def _dashboard(self) -> dict[str, object]:
        reason = None if self._failure is None else self._failure.message
        return {
            "server": server_section("head", self._state()[0], self._started, reason),
            **engine_sections(self.engine, self.metrics),
        }

    async def _models(self, _: Request) -> Response:
        return JsonReply({"object": "list", "data": [self._description()]})

    async def _model(self, request: Request) -> Response:
        self.check_model(request.path_params["name"])
        return JsonReply(self._description())

    def _description(self) -> dict[str, object]:
        return {
            "id": self.engine.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "knotctl",
            "knot_id": self.engine.knot_id,
            "context_length": self.engine.context_length,
        }


class _Completions:
    """One of the two endpoints that generate, as an ASGI application: it must hear its client leave."""

    def __init__(self, head: Head, *, chat: bool) -> None:
        self._head = head
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head, engine = self._head, self._head.engine
        request = Request(scope, receive)
        document = parse_body(await request.body(), request.headers.get("content-type", ""))
        parse = parse_chat if self._chat else parse_completion
        wanted = parse(document, engine.tokenizer.vocab_size)
        head.check_model(wanted.model)
        ids = await prompt_ids(engine, wanted)
        form = ReplyFormat(self._chat, engine.model_name, engine.knot_id, wanted.logprobs is not None)
        try:
            started = Generation(engine, ids, wanted, receive, head.metrics)
        except RequestError as e:
            # The engine knows token ids only, not which field they came from.
            e.param = e.param and ("messages" if self._chat else "prompt")
            raise
        async with started as generation:
            if wanted.stream:

                async def degraded() -> dict[str, Any]:
                    return _degraded(generation)

                await send_stream(generation, form, scope, send, with_usage=wanted.include_usage, at_end=degraded)
                return
            deltas = [delta async for delta in generation.deltas() if delta is not None]
            used = usage(generation.n_prompt, generation.n_tokens)
            headers = (
                {"x-knot-degraded": ",".join(f"{a}:{b}" for a, b in generation.zeroed)} if generation.zeroed else {}
            )
            document = form.whole(deltas, generation.finish_reason, used) | _degraded(generation)
            await JsonReply(document, headers=headers)(scope, receive, send)


def _degraded(generation: Generation) -> dict[str, Any]:
    """Return what a reply says of positions computed from zeros: nothing where there are none."""
    return {"knot_zeroed": generation.zeroed} if generation.zeroed else {}
