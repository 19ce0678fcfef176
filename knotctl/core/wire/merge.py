"""Partial embeddings into hidden states: each row comes from the one shard that owns its token.

A shard's frame says which rows it owns, so that a missing owner is found by name and never taken for a row of zeros.
Source: man knot-frame(5), PARTIAL EMBEDDINGS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knotctl.core.errors import CheckFailed, FrameError, UsageError, WrongIdentity
from knotctl.core.spans import VocabSpan
from knotctl.core.wire.frame import Frame
from knotctl.core.wire.layout import Flags, Kind

Mask = NDArray[np.bool_]


def partial_meta(tokens: Sequence[int] | NDArray[np.int32], vocab: VocabSpan) -> dict[str, Any]:
    """Return the metadata of the partial embedding of these tokens by the shard that owns `vocab`."""
    ids = np.asarray(tokens)
    owned = (ids >= vocab.start) & (ids < vocab.end)
    return {"vocab": [vocab.start, vocab.end], "owned": [list(run) for run in _runs(owned)]}


def merge_partials(frames: Sequence[Frame], *, degrade: bool = False) -> Frame:
    """Return the hidden states of which the frames are partial embeddings, bit for bit the rows that the owners sent.

    With `degrade`, rows without an owner stay zero: the frame is flagged and its metadata lists the positions under
    "zeroed" as [request id, start, end].

    Raises: WrongIdentity where frames speak of different models or tokens, CheckFailed "no-owner" and "two-owners".
    """
    if not frames:
        raise UsageError("no-frames", "merge: no frames given; expected the partial embeddings of all shards")
    first = frames[0]
    owners = np.zeros(first.rows, np.int32)
    out = np.zeros_like(first.payload)
    flags = Flags.NONE
    zeroed: list[list[Any]] = []
    for i, frame in enumerate(frames):
        _check_same_batch(i, frame, first)
        owned = _owned_rows(i, frame)
        owners += owned
        # Copied, not added: 0 + x is x for every x but -0.0.
        out[owned] = frame.payload[owned]
        flags |= frame.flags
        zeroed += frame.meta.get("zeroed", [])
    if (owners > 1).any():
        raise CheckFailed(
            "two-owners",
            f"merge: {_describe(first, owners > 1)}: more than one frame owns them",
            hint="give each shard's frame once, all of one --shard I/N division",
        )
    missing = owners == 0
    if missing.any():
        if not degrade:
            raise CheckFailed(
                "no-owner",
                f"merge: {_describe(first, missing)}: no frame owns them",
                hint="add the frame of the missing shard, or --degrade to go on with zero rows and a flag",
            )
        flags |= Flags.DEGRADED
        zeroed += [[request.hex(), start, end] for request, start, end in _positions(first, missing)]
    meta = {k: v for k, v in first.meta.items() if k not in ("vocab", "owned", "zeroed")}
    if zeroed:
        meta["zeroed"] = zeroed
    return replace(first, kind=Kind.HIDDEN, payload=out, meta=meta, flags=flags)


def _check_same_batch(i: int, frame: Frame, first: Frame) -> None:
    if frame.kind is not Kind.PARTIAL:
        raise UsageError("wrong-kind", f"merge: frame {i}: {frame.kind.name.lower()}; expected a partial embedding")
    for what, found, expected in (
        ("knot id", frame.knot_id.hex(), first.knot_id.hex()),
        ("segments", frame.segments, first.segments),
        ("width", frame.width, first.width),
    ):
        if found != expected:
            raise WrongIdentity(
                "wrong-identity", f"merge: frame {i}: {what}: expected frame 0's {expected}, found {found}"
            )


def _owned_rows(i: int, frame: Frame) -> Mask:
    """Return which rows the frame's shard owns; all others must be zero."""
    owned = np.zeros(frame.rows, np.bool_)
    runs = frame.meta.get("owned")
    end = 0
    for run in runs if isinstance(runs, list) else [None]:
        match run:
            case [int(a), int(b)] if end <= a < b <= frame.rows:
                owned[a:b] = True
                end = b
            case _:
                raise FrameError(
                    "bad-owned",
                    f"merge: frame {i}: metadata 'owned': expected rising [start, end) runs of rows below {frame.rows}",
                )
    if frame.payload[~owned].any():
        row = int(np.nonzero(frame.payload.any(axis=1) & ~owned)[0][0])
        raise FrameError("bad-owned", f"merge: frame {i}: row {row}: expected zeros in a row that is not owned")
    return owned


def _runs(mask: Mask) -> Iterator[tuple[int, int]]:
    """Yield the [start, end) runs of true values."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    for start, end in edges.reshape(-1, 2):
        yield int(start), int(end)


def _positions(frame: Frame, mask: Mask) -> Iterator[tuple[bytes, int, int]]:
    """Yield the marked rows as (request id, first position, end position)."""
    row = 0
    for s in frame.segments:
        for start, end in _runs(mask[row : row + s.n_tokens]):
            yield s.request_id, s.position + start, s.position + end
        row += s.n_tokens


def _describe(frame: Frame, mask: Mask) -> str:
    spans = [f"{a}" if b == a + 1 else f"{a}:{b}" for _, a, b in _positions(frame, mask)]
    shown = " ".join(spans[:20]) + (" …" if len(spans) > 20 else "")
    return f"{int(mask.sum())} of {frame.rows} tokens (positions {shown})"
