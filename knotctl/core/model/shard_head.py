"""The output head of one vocabulary shard: the logits of its own rows, the highest of them, and their exact merge.

An alternative to the last station's own head where that has no memory for it (seed 000 section 4). A row's logit has
the same bits as in the whole head, and equals go to the lower id, so the merge of all shards is the whole head's top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from knotctl.core.errors import CheckFailed, FrameError, UsageError, WrongIdentity
from knotctl.core.knot.reader import Knot
from knotctl.core.model.budget import GOOD_TILE_BYTES, activation_bytes
from knotctl.core.model.config import model_config
from knotctl.core.model.forward import head
from knotctl.core.model.phases import head_phase
from knotctl.core.spans import VocabSpan
from knotctl.core.tensor.arena import Arena, Floats
from knotctl.core.tensor.residency import Phase, Weights
from knotctl.core.wire.frame import Frame, check_finite
from knotctl.core.wire.layout import Flags, Kind

MAX_TOP = 1024
# Tokens of one call: the whole slice's logits are held for each.
MAX_ROWS = 64


class ShardHead:
    """The rows [start, end) of the output matrix; one thread at a time. Its weights pass through one tile's memory."""

    def __init__(self, knot: Knot, span: VocabSpan, *, resident: bool = False) -> None:
        self.knot = knot
        self.span = span
        self.config = model_config(knot.source.name, knot.header.config)
        tensors = dict(head_phase(knot, self.config).tensors)
        whole = tensors["output_weight"]
        part = replace(whole, rows=len(span), range=whole.row_range(span.start, span.end))
        self._phase = Phase(None, "output", tensors | {"output_weight": part})
        self._arena = Arena(activation_bytes(self.config, [self._phase], MAX_ROWS))
        size = self._phase.bytes
        buffer = 0 if resident else max(self._phase.smallest_tile, min(size, GOOD_TILE_BYTES))
        self.weights = Weights(knot.source, [self._phase], buffer_bytes=buffer, pinned_bytes=size if resident else 0)

    def logits(self, hidden: Floats) -> Floats:
        """Return the logits of the shard's own ids. Shapes: float32 [tokens, hidden_size] to [tokens, len(span)]."""
        out = np.empty((len(hidden), len(self.span)), np.float32)
        head(hidden, self._phase, self.weights, self.config, self._arena, out)
        return out

    def top(self, frame: Frame) -> Frame:
        """Return the highest logits of a frame's hidden states among the shard's ids, in order, ties by lowest id.

        The frame's `top` metadata says how many, "all" for every id in the order of ids. The answer is a frame of
        logits whose metadata has `vocab`, and, but for "all", `ids` for each row.
        Raises: WrongIdentity, UsageError, FrameError bad-activation.
        """
        if frame.knot_id.hex() != self.knot.id:
            raise WrongIdentity("wrong-identity", f"frame: expected knot {self.knot.id}, found {frame.knot_id.hex()}")
        if frame.kind is not Kind.HIDDEN or frame.width != self.config.hidden_size or frame.rows > MAX_ROWS:
            raise UsageError(
                "wrong-frame", f"frame: expected hidden states of width {self.config.hidden_size} for at most "
                f"{MAX_ROWS} tokens, found {frame.kind.name.lower()} of width {frame.width} for {frame.rows}",
            )  # fmt: skip
        top = frame.meta.get("top", 1)
        if top != "all" and (type(top) is not int or not 1 <= top <= MAX_TOP):
            raise UsageError("usage", f"frame: top: expected 1 to {MAX_TOP}, or all")
        check_finite(frame)
        scores = self.logits(frame.payload)
        meta: dict[str, Any] = {"vocab": [self.span.start, self.span.end]}
        if top != "all":
            order = np.stack([highest(row, min(top, len(row))) for row in scores])
            scores = np.take_along_axis(scores, order, axis=1)
            meta["ids"] = (order + self.span.start).tolist()
        out = Frame(Kind.LOGITS, frame.knot_id, frame.segments, scores, meta, frame.flags & Flags.DEGRADED)
        check_finite(out)
        return out


def highest(scores: Floats, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the indices of so many highest scores, in that order, the lower index first among equals."""
    edge = len(scores) - count
    floor = np.partition(scores, edge)[edge]
    above = np.flatnonzero(scores > floor)
    ids = np.concatenate((above, np.flatnonzero(scores == floor)[: count - len(above)]))
    return ids[np.lexsort((ids, -scores[ids]))]


def merge_tops(frames: Sequence[Frame], count: int) -> list[list[tuple[int, float]]]:
    """Return each row's `count` highest (id, logit) among all shards' answers, ties by lowest id.

    Raises: CheckFailed no-owner where the answers do not cover one vocabulary without overlap, FrameError.
    """
    _check_cover(frames)
    rows: list[list[tuple[int, float]]] = []
    for r in range(frames[0].rows):
        pairs = [
            (int(i), float(score))
            for f in frames
            for i, score in zip(_ids(f, r), f.payload[r], strict=True)
        ]  # fmt: skip
        rows.append(sorted(pairs, key=lambda p: (-p[1], p[0]))[:count])
    return rows


def merge_logits(frames: Sequence[Frame]) -> Floats:
    """Return the logits of the whole vocabulary out of the answers to "all" of every shard.

    Shapes: float32 [tokens, vocab_size]. Raises: as merge_tops.
    """
    ordered = _check_cover(frames)
    for f in ordered:
        start, end = f.meta["vocab"]
        if f.width != end - start:
            raise FrameError("bad-answer", f"logits of shard {start}:{end}: expected {end - start} a row")
    return np.concatenate([f.payload for f in ordered], axis=1)


def _ids(frame: Frame, row: int) -> list[int]:
    ids = frame.meta.get("ids")
    start, end = frame.meta["vocab"]
    if not isinstance(ids, list) or len(ids) != frame.rows or not all(
        isinstance(r, list) and len(r) == frame.width and all(type(i) is int and start <= i < end for i in r)
        for r in ids
    ):  # fmt: skip
        raise FrameError("bad-answer", f"logits of shard {start}:{end}: expected `ids` of its own for every number")
    mine: list[int] = ids[row]
    return mine


def _check_cover(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames in the order of their ids; they must meet end to end from 0 and speak of the same rows."""
    for f in frames:
        match f.meta.get("vocab"):
            case [int(start), int(end)] if 0 <= start < end:
                pass
            case _:
                raise FrameError("bad-answer", "logits of a shard: expected `vocab`: [start, end]")
        if f.kind is not Kind.LOGITS or f.segments != frames[0].segments or f.knot_id != frames[0].knot_id:
            raise WrongIdentity("wrong-identity", "logits of shards: expected the same model and rows of all")
    ordered = sorted(frames, key=lambda f: int(f.meta["vocab"][0]))
    edges = [0, *(f.meta["vocab"][1] for f in ordered)]
    if not frames or [f.meta["vocab"][0] for f in ordered] != edges[:-1]:
        raise CheckFailed("no-owner", "logits of shards: expected spans that meet end to end from 0")
    return ordered
