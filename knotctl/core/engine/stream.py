"""One request on its way through the engine: its tokens so far, what is asked of it, and the steps it yields."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from knotctl.core.engine.speculate import Drafter
from knotctl.core.errors import KnotctlError
from knotctl.core.tokens.sampler import SamplingParams


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token; where log-probabilities were asked for, its own and the likeliest (id, log-probability)."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Timings:
    """When things happened, on the monotonic clock. Units: seconds."""

    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first: float | None = None
    last: float | None = None

    def report(self, n_prompt: int, n_tokens: int) -> dict[str, float | None]:
        """Return time to the first token and the rates of prompt and generated tokens, for JSON."""
        if self.started is None or self.first is None or self.last is None:
            return {"ttft_ms": None, "prompt_tokens_per_s": None, "decode_tokens_per_s": None}
        decode = (n_tokens - 1) / (self.last - self.first) if n_tokens > 1 and self.last > self.first else None
        return {
            "ttft_ms": (self.first - self.submitted) * 1e3,
            "prompt_tokens_per_s": n_prompt / (self.first - self.started),
            "decode_tokens_per_s": decode,
        }


class Stream:
    """A generation: iterate it for its steps. It ends with `finish_reason` "stop", "length" or "cancelled".

    Iterating raises the error that ended the generation, where one did. With `notify` every step, and None at the end,
    is handed to that function in the engine's thread instead; it must not block.
    """

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        max_tokens: int,
        stop_ids: frozenset[int],
        notify: Callable[[Step | None], None] | None = None,
    ) -> None:
        self.request_id = uuid.uuid4().bytes
        self.prompt = prompt
        self.params = params
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.tokens: list[int] = []
        self.history = list(prompt)
        self.drafter = Drafter()
        self.in_kv = 0
        # nodes that died over it at the place where it is, here and at the heads before (recovery.py)
        self.crashes = 0
        # positions whose embedding no shard could give, so that zeros took its place (--degrade)
        self.zeroed: set[int] = set()
        self.finish_reason: str | None = None
        self.error: KnotctlError | None = None
        self.timings = Timings()
        self._cancelled = threading.Event()
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._deliver = notify or self._steps.put

    def __iter__(self) -> Iterator[Step]:
        while (step := self._steps.get()) is not None:
            yield step
        if self.error is not None:
            raise self.error

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - len(self.tokens)

    @property
    def pending(self) -> list[int]:
        """Tokens that no station has seen yet."""
        return self.history[self.in_kv :]

    def restart(self) -> None:
        """Have all tokens go through the stations again, as another session: a late frame of the old one is void."""
        self.request_id = uuid.uuid4().bytes
        self.in_kv = 0

    def draft(self, most: int) -> list[int]:
        """Return tokens that may follow the history, no more than can still be wanted of it."""
        return self.drafter.draft(self.history, min(most, self.left - 1))

    @property
    def cancelled(self) -> bool:
        """Whether whoever asked has left."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ask the engine to stop; it does within one phase of a layer."""
        self._cancelled.set()

    def emit(self, step: Step) -> bool:
        """Take a sampled token; returns whether more are wanted. A stop id ends the stream and is not part of it."""
        now = time.perf_counter()
        self.timings.first = self.timings.first or now
        self.timings.last = now
        if step.token in self.stop_ids:
            self.end("stop")
            return False
        self.tokens.append(step.token)
        self.history.append(step.token)
        self._deliver(step)
        if len(self.tokens) >= self.max_tokens:
            self.end("length")
            return False
        return True

    def end(self, reason: str, error: KnotctlError | None = None) -> None:
        """End the stream, once."""
        if self.finish_reason is None:
            self.finish_reason, self.error = reason, error
            self._deliver(None)
