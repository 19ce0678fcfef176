"""One generation seen from the event loop: submitted, awaited delta by delta, and cancelled when its client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from starlette.types import Receive

from knotctl.core.engine.session import Engine, context_exceeded
from knotctl.core.engine.stream import Step
from knotctl.core.errors import Cancelled, KnotctlError, RequestError
from knotctl.core.tokens.chat import encode_chat
from knotctl.services.metrics import Metrics
from knotctl.services.openai_schema import GenerationRequest
from knotctl.services.text import Delta, TextAssembler


async def prompt_ids(engine: Engine, request: GenerationRequest) -> list[int]:
    """Return the token ids of a request's prompt, made in a thread: a long prompt must not hold up the others."""

    def encode() -> list[int]:
        if request.messages is not None:
            return encode_chat(engine.tokenizer, engine.template, request.messages)[1]
        if isinstance(request.prompt, list):
            return request.prompt
        # A word of megabytes takes seconds to cut up; that it is too long for the context is known before.
        if engine.tokenizer.least_tokens(request.prompt) > engine.context_length:
            raise context_exceeded(engine.tokenizer.least_tokens(request.prompt), engine.context_length, "prompt")
        return engine.tokenizer.with_bos(engine.tokenizer.encode(request.prompt))

    return await asyncio.to_thread(encode)


class Generation:
    """Use it with `async with`: it is cancelled on the way out if it has not ended. Iterate `deltas()` once.

    While it is open it listens on `receive` for the client's leaving, so nobody else may.
    """

    def __init__(
        self, engine: Engine, ids: list[int], request: GenerationRequest, receive: Receive, metrics: Metrics
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._metrics = metrics
        self._receive = receive
        # Steps, and at the end None, or why there will be no end.
        self._steps: asyncio.Queue[Step | KnotctlError | None] = asyncio.Queue()
        self._assembler = TextAssembler(engine.tokenizer, request.stops)
        self._started = time.perf_counter()
        self._finish_reason: str | None = None
        self.n_prompt = len(ids)
        max_tokens = engine.context_length if request.max_tokens is None else request.max_tokens
        self._stream = engine.submit(ids, request.params, max_tokens, notify=self._notify)
        self._watch = asyncio.create_task(self._wait_for_leaving())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stream.cancel()
        self._watch.cancel()
        self._metrics.generated(self.n_prompt, self.n_tokens)

    @property
    def n_tokens(self) -> int:
        """Tokens generated so far, those of a stop string too."""
        return self._assembler.n_tokens

    @property
    def zeroed(self) -> list[tuple[int, int]]:
        """Runs [start, end) of positions that were computed from zeros in place of a lost shard's rows (--degrade)."""
        positions = sorted(self._stream.zeroed)
        starts = [p for p in positions if p - 1 not in self._stream.zeroed]
        ends = [p + 1 for p in positions if p + 1 not in self._stream.zeroed]
        return list(zip(starts, ends, strict=True))

    @property
    def finish_reason(self) -> str:
        """Why it ended, "stop" or "length", once it has."""
        assert self._finish_reason is not None
        return self._finish_reason

    async def deltas(self, idle_seconds: float | None = None) -> AsyncIterator[Delta | None]:
        """Yield the pieces of the reply; None each time that so long passed without a step.

        Raises: Cancelled when the client has left, and what ended the generation if it failed.
        """
        last = self._started
        while True:
            try:
                step = await asyncio.wait_for(self._steps.get(), idle_seconds)
            except TimeoutError:
                yield None
                continue
            if isinstance(step, KnotctlError):
                raise step
            if step is None:
                break
            now = time.perf_counter()
            self._metrics.step(now - last, first=self.n_tokens == 0)
            last = now
            delta = self._assembler.push(step)
            if delta.text or delta.tokens:
                yield delta
            if self._assembler.stopped:
                self._finish_reason = "stop"
                return
        if self._stream.error is not None:
            raise self._stream.error
        if self._stream.finish_reason == "cancelled":
            raise RequestError("shutting-down", "the server is shutting down", status=503, hint="retry later")
        rest = self._assembler.finish()
        # What was held back at the end may itself complete a stop string: a cut character becomes U+FFFD.
        self._finish_reason = "stop" if self._assembler.stopped else self._stream.finish_reason
        if rest.text or rest.tokens:
            yield rest

    def _notify(self, step: Step | None) -> None:
        # In the engine's thread, which must outlive a loop that is closed already.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._steps.put_nowait, step)

    async def _wait_for_leaving(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._stream.cancel()
        self._steps.put_nowait(Cancelled("cancelled", "the client has left"))
