"""OpenAI's API at a tracker: who asks, what it may cost, which route it takes, and its stream on to the client.

Source: man knot-service(5), TRACKER.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from knotctl.core.cluster.accounts import Accounts
from knotctl.core.cluster.ledger import Ledger
from knotctl.core.cluster.store import Database
from knotctl.core.cluster.usage import usage_rows
from knotctl.core.errors import RequestError, printable
from knotctl.services.access import Access
from knotctl.services.billing import Bill, fingerprint_of, request_key
from knotctl.services.dispatch import Dispatch
from knotctl.services.flights import Flights
from knotctl.services.openai_events import ReplyFormat, usage
from knotctl.services.openai_reply import send_stream
from knotctl.services.openai_schema import parse_body, parse_chat, parse_completion
from knotctl.services.relay import Call, Relay
from knotctl.services.replies import JsonReply
from knotctl.services.tracker_metrics import TrackerMetrics


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the API says of the model."""

    name: str
    knot_id: str
    vocab_size: int
    context_length: int


class Gateway:
    """The endpoints under /v1. `ledger` and `database` are there where accounts are kept."""

    def __init__(
        self, model: ServedModel, dispatch: Dispatch, access: Access, flights: Flights, metrics: TrackerMetrics,
        database: Database | None = None,
    ) -> None:  # fmt: skip
        self.model, self.dispatch, self.access = model, dispatch, access
        self.flights, self.metrics = flights, metrics
        self.database = database
        self.ledger = None if database is None else Ledger(database)
        self._created = int(time.time())
        self.routes = [
            Route("/v1/chat/completions", _Completions(self, chat=True), methods=["POST"]),
            Route("/v1/completions", _Completions(self, chat=False), methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/v1/usage", self._usage, methods=["GET"]),
        ]

    def check_model(self, name: str) -> None:
        """Raise RequestError model_not_found unless it is the model of this tracker."""
        if name != self.model.name:
            raise RequestError(
                "model_not_found", f"model {printable(name, 100)!r}: not served here", param="model", status=404,
                hint=f"this tracker has {self.model.name!r}",
            )  # fmt: skip

    async def _models(self, request: Request) -> Response:
        await self.access.account(request)
        listed = [self._description()] if await self.dispatch.listed() else []
        return JsonReply({"object": "list", "data": listed})

    async def _model(self, request: Request) -> Response:
        await self.access.account(request)
        self.check_model(request.path_params["name"])
        if not await self.dispatch.listed():
            raise RequestError("no-route", f"model {self.model.name}: not every layer has a node", status=503)
        return JsonReply(self._description())

    def _description(self) -> dict[str, object]:
        return {
            "id": self.model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "knotctl",
            "knot_id": self.model.knot_id,
            "context_length": self.model.context_length,
        }

    async def _usage(self, request: Request) -> Response:
        account = await self.access.account(request)
        if self.database is None:
            raise RequestError("no-accounts", "usage: this tracker keeps no accounts", status=404, hint="--api-keys")
        database = self.database
        rows = await asyncio.to_thread(usage_rows, database, account)
        state = await asyncio.to_thread(Accounts(database).get, account)
        data = [
            {
                "model": r.model, "requests": r.requests, "prompt_tokens": r.prompt_tokens,
                "completion_tokens": r.generated_tokens, "micro_credits": r.charged,
            }
            for r in rows
        ]  # fmt: skip
        balance = {"balance": state.balance, "held": state.held, "available": state.available}
        return JsonReply({"object": "usage", "account": account, "data": data, "micro_credits": balance})


class _Completions:
    """One of the two endpoints that generate, as an ASGI application: it must hear its client leave."""

    def __init__(self, gateway: Gateway, *, chat: bool) -> None:
        self._gateway = gateway
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        request = Request(scope, receive)
        account = await gateway.access.account(request)
        body = parse_body(await request.body(), request.headers.get("content-type", ""))
        parse = parse_chat if self._chat else parse_completion
        wanted = parse(body, gateway.model.vocab_size)
        gateway.check_model(wanted.model)
        key = request_key(request.headers, request.state.request_id)
        bill = Bill(gateway.ledger, account, key)
        living: asyncio.Task[None] | None = None
        # Drawn once, so that every head that works on the request draws the same tokens.
        fixed = body | {"seed": wanted.params.seed}
        route, prompt, most = await gateway.dispatch.prepared(self._chat, fixed)
        try:
            await bill.reserve(gateway.model.name, len(prompt), most, fingerprint_of(scope["path"], body))
            living = asyncio.create_task(bill.live())
            call = Call(self._chat, fixed, prompt, most)
            flights, recovered = gateway.flights, gateway.metrics.recovered
            async with Relay(gateway.dispatch, route, call, bill, flights, receive, recovered) as relay:
                form = ReplyFormat(
                    self._chat, gateway.model.name, gateway.model.knot_id, wanted.logprobs is not None
                )  # fmt: skip
                if wanted.stream:

                    async def close() -> dict[str, Any]:
                        await bill.close()
                        return {}

                    await send_stream(relay, form, scope, send, with_usage=wanted.include_usage, at_end=close)
                else:
                    deltas = [d async for d in relay.deltas(delivered=False) if d is not None]
                    # Before the reply is whole: whoever has all of it was charged for it.
                    await bill.close()
                    document = form.whole(deltas, relay.finish_reason, usage(relay.n_prompt, relay.n_tokens))
                    await JsonReply(document)(scope, receive, send)
        finally:
            if living is not None:
                living.cancel()
            await asyncio.shield(bill.close())
            if bill.n_tokens:
                gateway.metrics.generated(len(prompt), bill.n_tokens)
