"""The engine: one worker thread that takes every live request one step further in each pass over the weights.

Weights are what a pass costs, so requests share it: the prompt of one, the next token of the others (continuous
batching). A request's tokens do not depend on its company: results are bit-identical for every batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import TracebackType
from typing import Self

from knotctl.core.engine.batch import Piece, asks_of, compose, frame_of
from knotctl.core.engine.pipeline import LocalStages, Stages, layer_spans
from knotctl.core.engine.recovery import Recovery, RouteLost
from knotctl.core.engine.speculate import MAX_DRAFT
from knotctl.core.engine.stream import Step, Stream
from knotctl.core.errors import Cancelled, KnotctlError, RequestError, as_error
from knotctl.core.kernels.threads import set_threads
from knotctl.core.knot.reader import Knot, open_knot
from knotctl.core.model.budget import MAX_CHUNK, RUNTIME_BYTES, Residency
from knotctl.core.model.kv import KvType, kv_step
from knotctl.core.model.station import StationSpec
from knotctl.core.spans import LayerSpan
from knotctl.core.tensor.open_rows import default_budget
from knotctl.core.tensor.passing import Io
from knotctl.core.tokens.chat import ChatTemplate
from knotctl.core.tokens.sampler import Sampled, SamplingParams
from knotctl.core.tokens.tokenizer import Tokenizer, load_tokenizer

MAX_WAITING = 128
# A memory budget may shorten the context, but not to where no conversation fits.
LEAST_CONTEXT = 512
# A stream is let in when it and the others have room for this many more tokens each.
HEADROOM = 64


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How a model is run in this process. Units: memory_budget in bytes, context in tokens of all sessions together."""

    shards: int = 1
    stations: int | Sequence[LayerSpan] = 1
    threads: int | None = None
    memory_budget: int | None = None
    residency: Residency = Residency.AUTO
    context: int = 8192
    max_batch: int = 16
    speculate: bool = True
    kv_type: KvType = KvType.F32
    io: Io = Io.AUTO


class Engine:
    """A model ready to generate. Submit from any thread; close it, or use it with `with`."""

    def __init__(
        self, knot: Knot, spec: EngineSpec, stages: Stages | None = None, *,
        tokenizer: Tokenizer | None = None, owns_knot: bool = True,
    ) -> None:  # fmt: skip
        config = knot.header.config
        self.knot = knot
        self._owns_knot = owns_knot
        self.tokenizer = tokenizer or load_tokenizer(knot.tokenizer_keys())
        self.template = ChatTemplate.of(self.tokenizer)
        self.model_name = PurePosixPath(knot.source.name).name.removesuffix(".knot")
        self._spec = spec
        self.stages = local_stages(knot, spec) if stages is None else stages
        self._room = min(spec.context, self.stages.kv_tokens)
        self.context_length = min(config.context_length, self._room)
        # ids that the tokenizer has no text for are never sampled
        self._choices = min(config.vocab_size, self.tokenizer.vocab_size)
        self._waiting: list[Stream] = []
        self._active: list[Stream] = []
        self._wake = threading.Condition()
        self._closed = False
        self._kv_peak = 0
        self._recovery = Recovery(time.monotonic)
        self._worker = threading.Thread(target=self._work, name="knotctl-engine", daemon=True)
        self._worker.start()

    @classmethod
    def open(cls, ref: str, spec: EngineSpec | None = None, stages: Callable[[Knot], Stages] | None = None) -> Self:
        """Return an engine over the knot at a path or URL, which it closes; stages are here, or as `stages` says."""
        knot, made = open_knot(ref), None
        try:
            made = None if stages is None else stages(knot)
            return cls(knot, spec or EngineSpec(), made)
        except BaseException:
            if made is not None:
                made.close()
            knot.close()
            raise

    @property
    def knot_id(self) -> str:
        """Identity of the model, in hex."""
        return self.knot.id

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        *,
        ignore_stop: bool = False,
        notify: Callable[[Step | None], None] | None = None,
        crashes: int = 0,
    ) -> Stream:
        """Return the stream of a new request; its max_tokens are cut to what the context has room for.

        crashes are the nodes that died over it elsewhere, at the end of this prompt.

        Raises: RequestError context_length_exceeded, empty-prompt, token-out-of-range, overloaded (429).
        """
        room = self.context_length - len(prompt)
        if not prompt:
            raise RequestError("empty-prompt", "the prompt has no tokens", param="prompt")
        if room < 1:
            raise context_exceeded(len(prompt), self.context_length, "messages")
        vocab_size = self.knot.header.config.vocab_size
        wrong = next((t for t in prompt if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise RequestError(
                "token-out-of-range", f"token id {wrong}: expected 0 <= id < {vocab_size}", param="prompt"
            )
        params.check_ids(self._choices)
        stop_ids = frozenset() if ignore_stop else self.tokenizer.stop_ids
        stream = Stream(list(prompt), params, max(0, min(max_tokens, room)), stop_ids, notify)
        stream.crashes = crashes
        with self._wake:
            if self._closed or len(self._waiting) >= MAX_WAITING:
                raise RequestError("overloaded", "too many requests are waiting", status=429, hint="retry later")
            self._waiting.append(stream)
            self._wake.notify()
        return stream

    def stats(self) -> dict[str, int]:
        """Return what is held and running now, and the peaks so far. Units: bytes; counts of requests."""
        return {
            "running": len(self._active),
            "waiting": len(self._waiting),
            "peak_kv_bytes": self._kv_peak,
            "recoveries": self._recovery.recoveries,
            **self.stages.stats(),
        }

    def streams(self) -> list[Stream]:
        """Return the requests that run, then those that wait, as of now."""
        return [*self._active, *self._waiting]

    def close(self) -> None:
        """Cancel what runs, stop the worker and close the knot, where it is this engine's own."""
        with self._wake:
            self._closed = True
            for stream in (*self._waiting, *self._active):
                stream.cancel()
            self._wake.notify()
        self._worker.join()
        self.stages.close()
        if self._owns_knot:
            self.knot.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._waiting or self._active)
                self._admit()
                if self._closed and not self._active:
                    return
            for stream in self._active:
                if stream.cancelled:
                    self._leave(stream, "cancelled")
            self._make_room()
            if self._active:
                self._step()

    def _admit(self) -> None:
        """Let waiting streams in, in order of arrival, while there is room for them to start; the lock is held."""
        for stream in self._waiting:
            if stream.cancelled or stream.max_tokens == 0:
                stream.end("cancelled" if stream.cancelled else "length")
        self._waiting = [s for s in self._waiting if s.finish_reason is None]
        while self._waiting and len(self._active) < self._spec.max_batch:
            stream = self._waiting[0]
            if self._active and self._kv_need([*self._active, stream], HEADROOM) > self._room:
                return
            stream.timings.started = stream.timings.started or time.perf_counter()
            self._active = [*self._active, self._waiting.pop(0)]

    def _kv_need(self, streams: Sequence[Stream], more: int) -> int:
        """Return the tokens of keys and values that the streams take when each has so many more."""
        step = kv_step(self._room)
        return sum(-(-(len(s.history) + min(more, s.left)) // step) * step for s in streams)

    def _make_room(self) -> None:
        # What a stream will come to need is not known, so more are let in than can end here together. When their keys
        # and values fill the room the youngest waits for the others and replays its tokens then: they are the same.
        while len(self._active) > 1 and self._kv_need(self._active, MAX_DRAFT + 1) > self._room:
            youngest = self._active[-1]
            self.stages.drop(youngest.request_id)
            youngest.restart()
            with self._wake:
                self._active = self._active[:-1]
                self._waiting.insert(0, youngest)

    def _step(self) -> None:
        """Take every active stream one step further: a piece of its prompt, or one token and what its draft gives."""
        pieces = compose(self._recovery.turn(self._active), self.stages.pass_tokens, speculate=self._spec.speculate)

        def check() -> None:
            if all(p.stream.cancelled for p in pieces):
                raise Cancelled("cancelled", "every request of the batch was cancelled")

        try:
            chosen = iter(self.stages.run(frame_of(pieces, self.knot_id), asks_of(pieces, self._choices), check))
            self._kv_peak = max(self._kv_peak, self.stats()["kv_bytes"])
        except Cancelled:
            for piece in pieces:
                self._leave(piece.stream, "cancelled")
            return
        except RouteLost as e:
            self._recover([(p.stream, p.stream.in_kv + len(p.tokens)) for p in pieces], e)
            return
        except Exception as e:
            # Whatever broke, nobody may wait for ever on a worker that has died.
            for piece in pieces:
                self._leave(piece.stream, "error", as_error(e))
            return
        self._note_zeroed(pieces)
        for piece in pieces:
            piece.stream.in_kv += len(piece.tokens)
            if piece.wanted:
                tokens = next(chosen)
                if isinstance(tokens, KnotctlError):
                    self._leave(piece.stream, "error", tokens)
                else:
                    self._take(piece.stream, tokens, piece.wanted - 1)
        self._recovery.passed([p.stream for p in pieces])

    def _note_zeroed(self, pieces: Sequence[Piece]) -> None:
        """Tell the streams which of their positions were computed from zeros, which only --degrade allows."""
        for request_id, start, end in self.stages.zeroed:
            for piece in pieces:
                if piece.stream.request_id == request_id:
                    piece.stream.zeroed.update(range(start, end))

    def _recover(self, pieces: Sequence[tuple[Stream, int]], error: RouteLost) -> None:
        """Have every stream replay its tokens over whatever route there is next; its client does not notice."""
        for stream, why in self._recovery.lost(pieces, error):
            self._leave(stream, "error", why)
        for stream in self._active:
            self.stages.drop(stream.request_id)
            stream.restart()
        with self._wake:
            self._wake.wait_for(lambda: self._closed, self._recovery.pause())

    def _take(self, stream: Stream, chosen: Sequence[Sampled], drafted: int) -> None:
        """Hand a stream its tokens: one, and one more behind each token of its draft that was right."""
        for choice in chosen:
            if not stream.emit(Step(choice.token, choice.logprob, choice.top)):
                self._leave(stream, "stop")
                break
        if drafted:
            accepted = len(chosen) - 1
            stream.drafter.learn(drafted, accepted)
            # what the stations hold beyond the accepted tokens is overwritten by the next pass
            stream.in_kv -= drafted - accepted

    def _leave(self, stream: Stream, reason: str, error: KnotctlError | None = None) -> None:
        self.stages.drop(stream.request_id)
        self._recovery.left(stream)
        self._active = [s for s in self._active if s is not stream]
        stream.end(reason, error)


def local_stages(knot: Knot, spec: EngineSpec) -> LocalStages:
    """Return the stages of a model that runs in this process."""
    if spec.threads is not None:
        set_threads(spec.threads)
    n_layers = knot.header.config.n_layers
    budget = spec.memory_budget if spec.memory_budget is None else max(1, spec.memory_budget - default_budget(knot))
    specs = [
        StationSpec(
            span,
            spec.residency,
            # each station's part of what the shards leave follows from its layers; the last one's head is always tiled
            None if budget is None else budget * len(span) // n_layers,
            kv_tokens=spec.context,
            least_kv_tokens=min(LEAST_CONTEXT, spec.context),
            batch_tokens=min(MAX_CHUNK, spec.context),
            logits_rows=spec.max_batch,
            kv_type=spec.kv_type,
            io=spec.io,
            runtime_bytes=RUNTIME_BYTES * len(span) // n_layers,
        )
        for span in layer_spans(spec.stations, n_layers)
    ]
    return LocalStages.of(knot, spec.shards, specs)


def context_exceeded(tokens: int, context: int, param: str) -> RequestError:
    """Return the refusal of a prompt of at least so many tokens."""
    return RequestError(
        "context_length_exceeded",
        f"the prompt has {tokens} tokens; the context of {context} must hold one more",
        param=param,
        hint="shorten the prompt",
    )
