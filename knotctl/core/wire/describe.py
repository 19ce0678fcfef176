"""What `inspect` tells of a frame: its header, segments, the numbers' statistics, the best logits of each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from knotctl.core.wire.frame import Frame, Segment, parse_frame
from knotctl.core.wire.header import FrameHeader, parse_header
from knotctl.core.wire.layout import FILE_LIMITS, ID_KINDS, Kind, Limits


@dataclass(frozen=True, slots=True)
class Statistics:
    """Summary of a payload's finite numbers, in float64; `not_finite` counts the others."""

    minimum: float
    maximum: float
    mean: float
    rms: float
    zero_rows: int
    not_finite: int


@dataclass(frozen=True, slots=True)
class FrameReport:
    """A frame described; `top` holds, for logits, each row's best (token id, logit), best first."""

    header: FrameHeader
    segments: tuple[Segment, ...]
    meta: Mapping[str, Any]
    tokens: tuple[int, ...] | None
    statistics: Statistics | None
    top: tuple[tuple[tuple[int, float], ...], ...] | None

    def to_json(self) -> dict[str, Any]:
        """Return the document of `inspect --json`."""
        h = self.header
        return {
            "format": "frame",
            "kind": h.kind.name.lower(),
            "dtype": h.dtype.name.lower(),
            "flags": [f.name.lower() for f in h.flags if f.name],
            "knot_id": h.knot_id.hex(),
            "rows": h.rows,
            "width": h.width,
            "stored_bytes": h.stored,
            "unpacked_bytes": h.unpacked,
            "segments": [
                {
                    "request_id": s.request_id.hex(),
                    "position": s.position,
                    "n_tokens": s.n_tokens,
                    "mode": s.mode.name.lower(),
                }
                for s in self.segments
            ],
            "meta": dict(self.meta),
            "tokens": None if self.tokens is None else list(self.tokens),
            "statistics": None
            if self.statistics is None
            else {f: getattr(self.statistics, f) for f in Statistics.__dataclass_fields__},
            "top": None if self.top is None else [[list(pair) for pair in row] for row in self.top],
        }


def describe_frame(data: bytes, *, top: int = 0, limits: Limits = FILE_LIMITS) -> FrameReport:
    """Return the report on the frame that the bytes hold, with the `top` best logits of each row of a logits frame.

    Raises: FrameError, as parse_frame.
    """
    frame = parse_frame(data, limits=limits)
    return FrameReport(
        header=parse_header(data, limits),
        segments=frame.segments,
        meta=frame.meta,
        tokens=tuple(frame.payload.ravel().tolist()) if frame.kind in ID_KINDS else None,
        statistics=None if frame.kind in ID_KINDS or not frame.rows else _statistics(frame),
        top=_top(frame, top) if frame.kind is Kind.LOGITS and top > 0 else None,
    )


def _statistics(frame: Frame) -> Statistics:
    x = frame.payload
    finite = x[np.isfinite(x)].astype(np.float64)
    bad = int(x.size - finite.size)
    zero_rows = int(np.count_nonzero(~x.any(axis=1)))
    if not finite.size:
        return Statistics(0.0, 0.0, 0.0, 0.0, zero_rows, bad)
    rms = float(np.sqrt(np.mean(finite * finite)))
    return Statistics(float(finite.min()), float(finite.max()), float(finite.mean()), rms, zero_rows, bad)


def _top(frame: Frame, count: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    rows = []
    for row in np.where(np.isfinite(frame.payload), frame.payload, -np.inf):
        # Of equal logits the lower id comes first, as in greedy sampling.
        best = np.argsort(-row, kind="stable")[:count]
        rows.append(tuple((int(i), float(row[i])) for i in best if np.isfinite(row[i])))
    return tuple(rows)
