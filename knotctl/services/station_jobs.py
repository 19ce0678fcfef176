"""Frames on their way through a station: each step computed once, in turn, for as long as somebody waits for it."""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from starlette.responses import Response

from knotctl.core.errors import Cancelled, Conflict, RequestError, UsageError, printable
from knotctl.core.wire.frame import Frame, Segment

# Frames that wait or are worked on; beyond it a caller hears 429.
MAX_JOBS = 64
# Answers kept for callers that did not get theirs and ask again.
MEMO_BYTES = 16 << 20
MEMO_STEPS = 256
_MAX_HOLD_SECONDS = 30.0


class Job:
    """One step: a frame, its answer to come, and who waits for it."""

    def __init__(self, frame: Frame, digest: int, seconds: float) -> None:
        self.frame = frame
        self.digest = digest
        self.end = time.monotonic() + seconds
        self.left = threading.Event()
        self.waiting = 0
        self.size = 0
        self.task: asyncio.Task[Response] | None = None

    def check(self) -> None:
        """Raise Cancelled where nobody waits any more; from any thread."""
        if self.left.is_set():
            raise Cancelled("cancelled", "the caller left")

    @property
    def seconds_left(self) -> float:
        """How long the caller will still wait."""
        return max(0.0, self.end - time.monotonic())


class Jobs:
    """The steps that run, and the answers of the last ones. All on the event loop."""

    def __init__(self, on_duplicate: Callable[[], None]) -> None:
        self._on_duplicate = on_duplicate
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._bytes = 0
        self.running = 0

    async def answer(
        self,
        step: object,
        frame: Frame,
        body: bytes,
        seconds: float,
        work: Callable[[Job], Coroutine[Any, Any, Response]],
        until_left: Callable[[], Coroutine[Any, Any, None]],
    ) -> Response:
        """Return the answer to a step: of this call's work, of an earlier one's that still runs, or from memory.

        Raises: Conflict step-reused where the step was another frame's; RequestError overloaded; Cancelled.
        """
        digest = zlib.crc32(body)
        job = self._find(step, digest)
        if job is None:
            if self.running >= MAX_JOBS:
                raise RequestError("overloaded", "station: too many frames wait", status=429, hint="retry later")
            job = Job(frame, digest, seconds)
            self.running += 1
            job.task = asyncio.create_task(work(job))
            job.task.add_done_callback(lambda task: self._done(step, job, task))
            if isinstance(step, str):
                self._jobs[step] = job
        assert job.task is not None
        job.waiting += 1
        leaving = asyncio.create_task(until_left())
        try:
            await asyncio.wait({job.task, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not job.task.done():
                raise Cancelled("cancelled", "the caller left")
            return job.task.result()
        finally:
            leaving.cancel()
            job.waiting -= 1
            if not job.waiting and not job.task.done():
                job.left.set()

    def _find(self, step: object, digest: int) -> Job | None:
        if step is None:
            return None
        if not isinstance(step, str) or not 1 <= len(step) <= 64:
            raise UsageError("usage", f"frame: step {printable(step)}: expected up to 64 characters")
        job = self._jobs.get(step)
        if job is None or job.left.is_set():
            return None
        if job.digest != digest:
            raise Conflict("step-reused", f"step {printable(step)}: expected the same frame as before")
        self._on_duplicate()
        return job

    def _done(self, step: object, job: Job, task: asyncio.Task[Response]) -> None:
        self.running -= 1
        failed = task.cancelled() or task.exception() is not None
        if not isinstance(step, str) or self._jobs.get(step) is not job:
            return
        if failed:
            # what failed may work the next time
            del self._jobs[step]
            return
        job.frame = None  # type: ignore[assignment]  # its rows are not needed any more
        job.size = len(task.result().body)
        self._bytes += job.size
        finished = [s for s, j in self._jobs.items() if j.task is not None and j.task.done()]
        while finished and (self._bytes > MEMO_BYTES or len(finished) > MEMO_STEPS):
            self._bytes -= self._jobs.pop(finished.pop(0)).size


class Turns:
    """Lets a session's frames in by position, where they may overtake each other on their connections."""

    def __init__(self, length: Callable[[bytes], int]) -> None:
        self._length = length
        self._due: dict[bytes, int] = {}
        self._queued: Counter[bytes] = Counter()
        self._moved = asyncio.Event()

    def busy(self, request_id: bytes) -> bool:
        """Return whether a frame of the session waits or is worked on."""
        return self._queued[request_id] > 0

    async def enter(self, segments: Sequence[Segment], hold: object) -> None:
        """Take the frame's place behind those before it; one that is early waits for them, `hold` ms at most.

        What is early after that too is refused by the station itself, with the position it expected.
        """
        limit = min(hold / 1000, _MAX_HOLD_SECONDS) if isinstance(hold, int | float) and hold > 0 else 0.0
        end = time.monotonic() + limit
        while self._early(segments) and (left := end - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._moved.wait()
            except TimeoutError:
                break
        for s in segments:
            self._due[s.request_id] = s.position + s.n_tokens
            self._queued[s.request_id] += 1
        self._wake()

    def leave(self, segments: Sequence[Segment]) -> None:
        """Note that a frame is done; what comes next is measured by what the station holds once none is queued."""
        for s in segments:
            self._queued[s.request_id] -= 1
            if self._queued[s.request_id] <= 0:
                del self._queued[s.request_id]
                self._due.pop(s.request_id, None)
        self._wake()

    def _early(self, segments: Sequence[Segment]) -> bool:
        return any(s.position > self._due.get(s.request_id, self._length(s.request_id)) for s in segments)

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()
