"""The stages of a model in the order of the data path; a stage elsewhere has the same shape as one in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from knotctl.core.errors import UsageError
from knotctl.core.knot.reader import Knot
from knotctl.core.model.embed import Shard
from knotctl.core.model.station import Station
from knotctl.core.spans import LayerSpan, VocabSpan
from knotctl.core.wire.frame import Frame
from knotctl.core.wire.merge import merge_partials


class ShardStage(Protocol):
    """Token ids in, partial embedding out."""

    def embed(self, frame: Frame) -> Frame:
        """Return the partial embedding of a frame of token ids."""
        ...


class StationStage(Protocol):
    """Hidden states in, hidden states (or logits) out; keeps the sessions' keys and values."""

    def forward(self, frame: Frame, check: Callable[[], None]) -> Frame:
        """Return the frame after the station's layers."""
        ...

    def drop(self, request_id: bytes) -> bool:
        """Forget a session."""
        ...


class Pipeline:
    """Shards, their merge, and stations, one after the other."""

    def __init__(self, shards: Sequence[ShardStage], stations: Sequence[StationStage]) -> None:
        self._shards = shards
        self._stations = stations

    def run(self, tokens: Frame, check: Callable[[], None]) -> Frame:
        """Return what the last station makes of a frame of token ids; `check` may raise to abandon the work."""
        frame = merge_partials([shard.embed(tokens) for shard in self._shards])
        frame = replace(frame, meta=tokens.meta)
        for station in self._stations:
            frame = station.forward(frame, check)
        return frame

    def drop(self, request_id: bytes) -> None:
        """Forget a session everywhere."""
        for station in self._stations:
            station.drop(request_id)


def vocab_shards(knot: Knot, count: int) -> list[Shard]:
    """Return shards 0/N to N-1/N of a model's vocabulary."""
    vocab_size = knot.header.config.vocab_size
    return [Shard(knot, VocabSpan.shard(i, count, vocab_size)) for i in range(count)]


def layer_spans(stations: int | Sequence[LayerSpan], n_layers: int) -> list[LayerSpan]:
    """Return the spans of so many stations of equal length, or the given ones if they cover all layers in order.

    Raises: UsageError bad-stations.
    """
    if isinstance(stations, int):
        if not 1 <= stations <= n_layers:
            raise UsageError("bad-stations", f"stations {stations}: expected 1 to {n_layers}, the number of layers")
        return [LayerSpan(i * n_layers // stations, (i + 1) * n_layers // stations) for i in range(stations)]
    edges = [0, *(span.end for span in stations)]
    if [span.start for span in stations] != edges[:-1] or edges[-1] != n_layers:
        raise UsageError(
            "bad-stations",
            f"stations {','.join(map(str, stations))}: expected spans that meet end to end from 0 to {n_layers}",
        )
    return list(stations)


__all__ = ["Pipeline", "ShardStage", "Station", "StationStage", "layer_spans", "vocab_shards"]
