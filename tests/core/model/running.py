"""Ways to run a tiny model: whole, in pieces, and split over stations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from knotctl.core.knot.reader import Knot
from knotctl.core.model.budget import Residency
from knotctl.core.model.embed import Shard, token_frame
from knotctl.core.model.kv import KvType
from knotctl.core.model.station import Station, StationSpec
from knotctl.core.spans import LayerSpan, VocabSpan
from knotctl.core.wire.frame import Frame
from knotctl.core.wire.merge import merge_partials

REQUEST = bytes(16)
TOKENS = [5, 17, 200, 3, 44, 44, 91, 120, 7, 63, 301, 12, 88, 250, 31, 9, 270, 56, 140, 2]


def embed(knot: Knot, tokens: Sequence[int], position: int = 0, shards: int = 1) -> Frame:
    ids = token_frame(knot.id, tokens, position, REQUEST)
    vocab = knot.header.config.vocab_size
    return merge_partials([Shard(knot, VocabSpan.shard(i, shards, vocab)).embed(ids) for i in range(shards)])


def run(
    knot: Knot,
    tokens: Sequence[int] = tuple(TOKENS),
    *,
    cuts: Sequence[int] = (),
    chunks: Sequence[int] | None = None,
    shards: int = 1,
    budget: int | None = None,
    residency: Residency = Residency.FLUID,
    kv_type: KvType = KvType.F32,
) -> np.ndarray:
    """Logits of every token, with the layers cut into stations at `cuts` and the prompt fed in chunks."""
    edges = [0, *cuts, knot.header.config.n_layers]
    n = len(tokens)
    stations = [
        Station(
            knot, StationSpec(LayerSpan(a, b), residency, budget, 64, None, len(tokens), len(tokens), kv_type=kv_type)
        )
        for a, b in itertools.pairwise(edges)
    ]
    out, at = [], 0
    for n in chunks or [len(tokens)]:
        frame = embed(knot, tokens[at : at + n], at, shards)
        frame = Frame(frame.kind, frame.knot_id, frame.segments, frame.payload, {"logits": "all"})
        for station in stations:
            frame = station.forward(frame)
        out.append(frame.payload)
        at += n
    assert at == len(tokens)
    return np.concatenate(out)
