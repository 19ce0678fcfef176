"""A vocabulary shard as a service: ids to partial embeddings, and hidden states to the highest of its logits.

Source: man knot-service(5), NODES.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from knotctl.core.errors import Cancelled, RequestError
from knotctl.core.model.embed import Shard, token_frame
from knotctl.core.wire.frame import Frame, check_finite, encode_frame
from knotctl.core.wire.layout import WIRE_LIMITS
from knotctl.services.node import FrameEndpoint, FrameReply, Node, until_left

# Frames that wait for their turn; a caller that hears 429 tries a replica, or reads the rows itself.
MAX_QUEUED = 64


class ShardService(Node):
    """One shard behind HTTP. The head of its rows is opened by the first call that wants it."""

    role = "shard"

    def __init__(self, shard: Shard, *, head_resident: bool = False) -> None:
        self.shard = shard
        self._head_resident = head_resident
        self._head: Any = None
        self._queued = 0
        # rows are read in the order asked for; the head's weights are for one thread at a time
        self._worker = ThreadPoolExecutor(1, "knotctl-shard")
        super().__init__(
            [
                Route("/cobordism-embed", FrameEndpoint(self._embed), methods=["POST"]),
                Route("/cobordism-head", FrameEndpoint(self._top), methods=["POST"]),
            ]
        )

    def probe(self) -> None:
        """Embed the first id that the shard owns."""
        token = self.shard.span.start
        check_finite(self.shard.embed(token_frame(self.shard.knot.id, [token], 0, bytes(16))))

    def describe(self) -> dict[str, Any]:
        """Return the model, the ids owned and the bytes held."""
        span = self.shard.span
        return {
            "knot_id": self.shard.knot.id,
            "vocab": [span.start, span.end],
            "spans": [[span.start, span.end]],
            "bytes": {"weights": self._weight_bytes()},
        }

    def stats(self) -> Mapping[str, float]:
        """Return the gauges."""
        return {"knot_frames_queued": self._queued, "knot_weight_bytes": self._weight_bytes()}

    def close(self) -> None:
        """Wait for what runs, and end the thread."""
        self._worker.shutdown()

    def _weight_bytes(self) -> int:
        return 0 if self._head is None else int(self._head.weights.ledger.held)

    async def _embed(self, frame: Frame, _: bytes, request: Request) -> Response:
        return await self._run(frame, request, self.shard.embed)

    async def _top(self, frame: Frame, _: bytes, request: Request) -> Response:
        return await self._run(frame, request, self._top_of)

    def _top_of(self, frame: Frame) -> Frame:
        if self._head is None:
            # numba comes with it, which most shards never need
            from knotctl.core.model.shard_head import ShardHead

            self._head = ShardHead(self.shard.knot, self.shard.span, resident=self._head_resident)
        answer: Frame = self._head.top(frame)
        return answer

    async def _run(self, frame: Frame, request: Request, work: Callable[[Frame], Frame]) -> Response:
        if self._queued >= MAX_QUEUED:
            raise RequestError("overloaded", "shard: too many frames wait", status=429, hint="retry later")
        left = asyncio.Event()

        def compute() -> bytes:
            if left.is_set():
                raise Cancelled("cancelled", "the caller left")
            started = time.perf_counter()
            body = encode_frame(work(frame), limits=WIRE_LIMITS)
            self.metrics.computed(frame.rows, time.perf_counter() - started)
            return body

        self._queued += 1
        task = asyncio.get_running_loop().run_in_executor(self._worker, compute)
        task.add_done_callback(self._done)
        leaving = asyncio.create_task(until_left(request))
        try:
            both: set[asyncio.Future[Any]] = {task, leaving}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                left.set()
                raise Cancelled("cancelled", "the caller left")
            return FrameReply(await task)
        finally:
            leaving.cancel()

    def _done(self, task: asyncio.Future[bytes]) -> None:
        self._queued -= 1
        # where the caller has left, its error is for nobody
        if not task.cancelled():
            task.exception()
