"""The stages of a model in the order of the data path; stages elsewhere (`remote.py`) have the same shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from knotctl.core.engine.choose import Ask, Chosen, choose_all, wanted_rows
from knotctl.core.errors import UsageError
from knotctl.core.knot.reader import Knot
from knotctl.core.model.budget import MAX_CHUNK
from knotctl.core.model.embed import Shard
from knotctl.core.model.station import Station, StationSpec
from knotctl.core.source.cache_counts import CacheCounts
from knotctl.core.spans import LayerSpan, VocabSpan
from knotctl.core.wire.frame import Frame
from knotctl.core.wire.merge import merge_partials


class Stages(Protocol):
    """A model's way from token ids to the next tokens, wherever its parts run.

    Units: tokens; kv_tokens is the room for keys and values of all sessions, pass_tokens the longest batch.
    """

    @property
    def spans(self) -> Sequence[LayerSpan]:
        """The layers of each station, in order."""
        ...

    @property
    def kv_tokens(self) -> int:
        """Tokens of keys and values that every station has room for."""
        ...

    @property
    def pass_tokens(self) -> int:
        """Tokens that one pass takes at the most when a request is alone."""
        ...

    @property
    def zeroed(self) -> Sequence[tuple[bytes, int, int]]:
        """Rows of the last pass that had to be zeros: request id, and positions [start, end)."""
        ...

    def run(self, tokens: Frame, asks: Sequence[Ask], check: Callable[[], None]) -> list[Chosen]:
        """Return the tokens asked for behind a frame of token ids; `check` may raise to abandon the work."""
        ...

    def drop(self, request_id: bytes) -> None:
        """Forget a session everywhere."""
        ...

    def stats(self) -> dict[str, int]:
        """Return bytes held: peak_weight_bytes, weight_bytes, kv_bytes, activation_bytes."""
        ...

    def close(self) -> None:
        """Let go of what the stages hold."""
        ...


class LocalStages:
    """Shards, their merge, and stations in this process, one after the other."""

    def __init__(self, shards: Sequence[Shard], stations: Sequence[Station]) -> None:
        self.stations = list(stations)
        self.spans = [s.span for s in stations]
        self.kv_tokens = min(s.plan.kv_tokens for s in stations)
        self.pass_tokens = MAX_CHUNK
        # rows come from the knot itself here: there is nothing to go on without
        self.zeroed: list[tuple[bytes, int, int]] = []
        self._shards = shards

    @classmethod
    def of(cls, knot: Knot, shards: int, specs: Sequence[StationSpec]) -> LocalStages:
        """Return shards 0/N to N-1/N of a model's vocabulary, and its stations."""
        vocab_size = knot.header.config.vocab_size
        made = [Shard(knot, VocabSpan.shard(i, shards, vocab_size)) for i in range(shards)]
        return cls(made, [Station(knot, spec) for spec in specs])

    def run(self, tokens: Frame, asks: Sequence[Ask], check: Callable[[], None]) -> list[Chosen]:
        """Return the tokens asked for behind a frame of token ids; `check` may raise to abandon the work."""
        frame = merge_partials([shard.embed(tokens) for shard in self._shards])
        frame = replace(frame, meta={"logits": wanted_rows(asks)})
        for station in self.stations:
            frame = station.forward(frame, check)
        return choose_all(frame.payload, asks)

    def drop(self, request_id: bytes) -> None:
        """Forget a session in all stations."""
        for station in self.stations:
            station.drop(request_id)

    def stats(self) -> dict[str, int]:
        """Return bytes held now, and of weights the most at any moment."""
        return {
            "peak_weight_bytes": sum(s.weights.ledger.peak for s in self.stations),
            "weight_bytes": sum(s.weights.ledger.held for s in self.stations),
            "kv_bytes": sum(kv.nbytes for s in self.stations for kv in list(s.sessions.values())),
            "activation_bytes": max(s.plan.activation_bytes + s.plan.frame_bytes for s in self.stations),
        }

    def caches(self) -> list[CacheCounts]:
        """Return the counts of the cache levels of every shard."""
        return [counts for shard in self._shards for counts in shard.source.counts]

    def close(self) -> None:
        """Hold nothing more: weights go with the stations."""


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
