"""Shards and stations of the tiny model as services on real sockets, in threads of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from knotctl.core.engine.remote import ClusterSpec, RemoteStages
from knotctl.core.engine.session import Engine, EngineSpec
from knotctl.core.knot.reader import Knot, open_knot
from knotctl.core.model.embed import Shard
from knotctl.core.model.station import Station, StationSpec
from knotctl.core.spans import LayerSpan, VocabSpan
from knotctl.services.edge import EdgeConfig
from knotctl.services.keys import ApiKeys
from knotctl.services.node import Node
from knotctl.services.shard import ShardService
from knotctl.services.station import StationService

TOKEN = "cluster-token-0001"


@dataclass
class Cluster:
    """Nodes that are ready, and what talks to them."""

    knot: Knot
    shards: list[str] = field(default_factory=list)
    stations: list[str] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)

    def spec(self, **options: Any) -> ClusterSpec:
        given = {"shards": [[u] for u in self.shards], "stations": [[u] for u in self.stations], "token": TOKEN}
        return ClusterSpec(**(given | options))

    def engine(self, spec: EngineSpec | None = None, **options: Any) -> Engine:
        cluster = self.spec(**options)
        return Engine.open(self.knot.source.name, spec or EngineSpec(context=512), lambda k: RemoteStages(k, cluster))

    def station(self, index: int) -> StationService:
        node = self.nodes[self.stations[index]]
        assert isinstance(node, StationService)
        return node

    def shard(self, index: int) -> ShardService:
        node = self.nodes[self.shards[index]]
        assert isinstance(node, ShardService)
        return node


@contextmanager
def cluster(
    path: str,
    serve_app: Callable[..., Any],
    *,
    shards: int = 3,
    stations: Sequence[tuple[int, int]] = ((0, 1), (1, 3)),
    batch: int = 128,
    context: int = 512,
) -> Iterator[Cluster]:
    with ExitStack() as stack:
        knot = stack.enter_context(open_knot(path))
        made = Cluster(knot)

        def start(node: Node) -> str:
            app = node.app(EdgeConfig(keys=ApiKeys([TOKEN])))
            url: str = stack.enter_context(serve_app(app, on_drain=node.drain)).url
            made.nodes[url] = node
            return url

        def make(span: LayerSpan) -> Station:
            return Station(knot, StationSpec(span, kv_tokens=context, batch_tokens=batch, logits_rows=64))

        vocab = knot.header.config.vocab_size
        made.shards = [start(ShardService(Shard(knot, VocabSpan.shard(i, shards, vocab)))) for i in range(shards)]
        made.stations = [
            start(StationService(knot, make, LayerSpan(a, b), token=TOKEN, batch_tokens=batch)) for a, b in stations
        ]
        end = time.monotonic() + 60
        for url in made.nodes:
            while (reply := httpx2.get(f"{url}/readyz")).status_code != 200:
                assert reply.json()["status"] == "loading", reply.text
                assert time.monotonic() < end
                time.sleep(0.02)
        yield made
