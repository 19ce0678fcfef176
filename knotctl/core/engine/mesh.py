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

from knotctl.core.engine.hop import RemoteError, send_frame
from knotctl.core.engine.recovery import Replicas
from knotctl.core.errors import Cancelled, FrameError, KnotctlError
from knotctl.core.knot.reader import Knot
from knotctl.core.model.embed import Shard
from knotctl.core.source.http_call import Peer
from knotctl.core.spans import VocabSpan
from knotctl.core.wire.frame import Frame, check_finite, encode_frame
from knotctl.core.wire.layout import WIRE_LIMITS, Kind
from knotctl.core.wire.merge import merge_partials, partial_meta

# A shard reads a few rows: one that takes longer than this is as good as gone.
SHARD_SECONDS = 2.0


class Mesh:
    """The shards of a vocabulary elsewhere, each with its replicas, and the knot behind them."""

    def __init__(
        self, knot: Knot, shards: Sequence[tuple[VocabSpan, Replicas]], peers: Callable[[str], Peer], *,
        degrade: bool = False, seconds: float = SHARD_SECONDS, direct: bool = True,
    ) -> None:  # fmt: skip
        self._knot = knot
        self._shards = list(shards)
        self._peers = peers
        self._degrade = degrade
        self._seconds = seconds
        self._direct = direct
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max(1, len(self._shards)), "knotctl-mesh")
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

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _outcome(self, index: int, tokens: Frame, check: Callable[[], None]) -> Frame | KnotctlError:
        try:
            return self._partial(index, tokens, check)
        except KnotctlError as e:
            return e

    def _partial(self, index: int, tokens: Frame, check: Callable[[], None]) -> Frame:
        span, replicas = self._shards[index]
        body = encode_frame(tokens, limits=WIRE_LIMITS)
        error: KnotctlError | None = None
        for url in replicas.order():
            try:
                answer = send_frame(self._peers(url), "/cobordism-embed", body, seconds=self._seconds, check=check)
                partial = self._checked(url, span, tokens, answer.frame)
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
                return partial
        if self._direct:
            with self._lock:
                self.direct_reads += 1
            return Shard(self._knot, span).embed(tokens)
        raise error or KnotctlError("internal", f"shard {span}: no replicas")

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


def _nothing(tokens: Frame, width: int) -> Frame:
    """Return the partial embedding of a shard that owns nothing."""
    zeros = np.zeros((tokens.rows, width), np.float32)
    return Frame(Kind.PARTIAL, tokens.knot_id, tokens.segments, zeros, {"vocab": [0, 0], "owned": []})
