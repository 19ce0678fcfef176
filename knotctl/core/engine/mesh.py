"""The embedding mesh: token ids to every shard that owns some, at once; a shard that fails is never silently zero.

In this order: another replica; the rows straight from the knot; an error, or zeros with the positions named where the
caller asked for `degrade` (DESIGN decision 9). A shard that owns none of a frame's ids is not asked: its answer is
known, and the merge holds every row to have an owner.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from knotctl.core.engine.choose import Ask, Chosen, choose_all
from knotctl.core.engine.hop import RemoteError, send_frame
from knotctl.core.engine.recovery import Replicas
from knotctl.core.errors import Cancelled, FrameError, KnotctlError
from knotctl.core.knot.reader import Knot
from knotctl.core.model.embed import Shard
from knotctl.core.model.shard_head import ShardHead, merge_logits, merge_tops
from knotctl.core.source.http_call import Peer
from knotctl.core.spans import VocabSpan
from knotctl.core.tokens.sampler import Sampled
from knotctl.core.wire.frame import Frame, check_finite, encode_frame
from knotctl.core.wire.layout import WIRE_LIMITS, Kind
from knotctl.core.wire.merge import merge_partials, partial_meta

# A shard reads a few rows: one that takes longer than this is as good as gone.
SHARD_SECONDS = 2.0


class Mesh:
    """The shards of a vocabulary elsewhere, each with its replicas, and the knot behind them."""

    def __init__(
        self, knot: Knot, shards: Sequence[tuple[VocabSpan, Replicas]], peers: Callable[[str], Peer], *,
        degrade: bool = False, direct: bool = True,
    ) -> None:  # fmt: skip
        self._knot = knot
        self._shards = list(shards)
        self._peers = peers
        self._degrade = degrade
        self._direct = direct
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max(1, len(self._shards)), "knotctl-mesh")
        self._heads: dict[int, ShardHead] = {}
        self.failures = [0] * len(self._shards)
        self.direct_reads = 0
        self.degraded_rows = 0

    def embed(self, tokens: Frame, check: Callable[[], None]) -> Frame:
        """Return the hidden states of a frame of ids.

        Raises: the error of the first shard that failed in every way; Cancelled; CheckFailed no-owner.
        """
        ids = tokens.payload[:, 0]
        asked = [i for i, (span, _) in enumerate(self._shards) if ((ids >= span.start) & (ids < span.end)).any()]
        tokens = replace(tokens, meta={})
        if len(asked) == 1:
            outcomes = [self._outcome(asked[0], tokens, check)]
        else:
            outcomes = list(self._pool.map(lambda i: self._outcome(i, tokens, check), asked))
        partials = [o for o in outcomes if isinstance(o, Frame)]
        errors = [o for o in outcomes if not isinstance(o, Frame)]
        for error in errors:
            if isinstance(error, Cancelled) or not self._degrade:
                raise error
        if not partials:
            partials = [_nothing(tokens, self._knot.header.config.hidden_size)]
        merged = merge_partials(partials, degrade=self._degrade and bool(errors))
        self.degraded_rows += sum(end - start for _, start, end in merged.meta.get("zeroed", []))
        return merged

    def choose(self, hidden: Frame, asks: Sequence[Ask], check: Callable[[], None]) -> list[Chosen]:
        """Return the tokens asked for, out of the logits of every shard's own ids: the head without a tail that has it.

        Shapes: hidden [sum of the asks' rows, hidden_size], before the output norm, in the order of the asks.
        Raises: the error of the first shard that failed in every way.
        """
        greedy = all(_is_plain(ask, self._knot.header.config.vocab_size) for ask in asks)
        frame = replace(hidden, meta={"top": 1 if greedy else "all"})

        def top(index: int) -> Frame:
            span = self._shards[index][0]

            def accept(url: str, answer: Frame | None) -> Frame:
                return _checked_top(url, span, frame, answer)

            return self._ask(index, "/cobordism-head", frame, accept, check, lambda: self._head(index).top(frame))

        tops = list(self._pool.map(top, range(len(self._shards))))
        if not greedy:
            return choose_all(merge_logits(tops), asks)
        rows = iter(merge_tops(tops, 1))
        return [_accepted([next(rows)[0][0] for _ in range(ask.rows)], ask) for ask in asks]

    def _head(self, index: int) -> ShardHead:
        with self._lock:
            if index not in self._heads:
                self._heads[index] = ShardHead(self._knot, self._shards[index][0])
            return self._heads[index]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _outcome(self, index: int, tokens: Frame, check: Callable[[], None]) -> Frame | KnotctlError:
        try:
            return self._partial(index, tokens, check)
        except KnotctlError as e:
            return e

    def _partial(self, index: int, tokens: Frame, check: Callable[[], None]) -> Frame:
        span = self._shards[index][0]

        def accept(url: str, frame: Frame | None) -> Frame:
            return self._checked(url, span, tokens, frame)

        return self._ask(
            index, "/cobordism-embed", tokens, accept, check, lambda: Shard(self._knot, span).embed(tokens)
        )

    def _ask(
        self,
        index: int,
        path: str,
        frame: Frame,
        accept: Callable[[str, Frame | None], Frame],
        check: Callable[[], None],
        direct: Callable[[], Frame],
    ) -> Frame:
        """Return the first good answer of a shard's replicas, or what comes straight from the knot."""
        _, replicas = self._shards[index]
        body = encode_frame(frame, limits=WIRE_LIMITS)
        error: KnotctlError | None = None
        # one that failed just now is not waited for again with every token, where the rows can be had otherwise
        for url in replicas.usable() if self._direct else replicas.order():
            try:
                answer = send_frame(self._peers(url), path, body, seconds=SHARD_SECONDS, check=check)
                accepted = accept(url, answer.frame)
            except RemoteError as e:
                if 400 <= e.status < 500 and e.status not in (404, 408, 409, 422, 429):
                    raise  # what this shard says of the request, others would say too
                error = e
                with self._lock:
                    replicas.ban(url)
                    self.failures[index] += 1
            else:
                with self._lock:
                    replicas.restore(url)
                return accepted
        if self._direct:
            with self._lock:
                self.direct_reads += 1
            return direct()
        raise error or KnotctlError("internal", f"shard {index}: no replicas")

    def _checked(self, url: str, span: VocabSpan, tokens: Frame, partial: Frame | None) -> Frame:
        """Return a shard's answer if it is one to these tokens, whatever it says of itself."""
        expected: dict[str, Any] = partial_meta(tokens.payload[:, 0], span)
        width = self._knot.header.config.hidden_size
        if (
            partial is None
            or partial.kind is not Kind.PARTIAL
            or partial.knot_id != tokens.knot_id
            or partial.segments != tokens.segments
            or partial.width != width
            or any(partial.meta.get(key) != value for key, value in expected.items())
        ):
            raise RemoteError(
                "bad-answer", f"{url}: not the partial embedding by shard {span} of what was sent", url=url
            )
        try:
            check_finite(partial)
        except FrameError as e:
            raise RemoteError(e.code, f"{url}: {e.message}", url=url) from e
        return partial


def _checked_top(url: str, span: VocabSpan, asked: Frame, answer: Frame | None) -> Frame:
    """Return a shard's highest logits if they are those of its ids for what was sent."""
    width = len(span) if asked.meta["top"] == "all" else min(int(asked.meta["top"]), len(span))
    if (
        answer is None
        or answer.kind is not Kind.LOGITS
        or answer.segments != asked.segments
        or (answer.knot_id, answer.width) != (asked.knot_id, width)
        or answer.meta.get("vocab") != [span.start, span.end]
    ):
        raise RemoteError("bad-answer", f"{url}: not the logits of shard {span} for what was sent", url=url)
    return answer


def _is_plain(ask: Ask, vocab_size: int) -> bool:
    """Return whether the likeliest token is all that an ask needs to know."""
    p = ask.params
    plain = p.temperature == 0 and not p.logit_bias and p.logprobs is None and not ask.counts_history
    return plain and ask.choices == vocab_size


def _accepted(tokens: Sequence[int], ask: Ask) -> Chosen:
    """Return the likeliest tokens up to the first that is not what the draft went on with."""
    right = next((i for i, d in enumerate(ask.draft) if tokens[i] != d), len(ask.draft))
    return [Sampled(t, None, []) for t in tokens[: right + 1]]


def _nothing(tokens: Frame, width: int) -> Frame:
    """Return the partial embedding of a shard that owns nothing."""
    zeros = np.zeros((tokens.rows, width), np.float32)
    return Frame(Kind.PARTIAL, tokens.knot_id, tokens.segments, zeros, {"vocab": [0, 0], "owned": []})
