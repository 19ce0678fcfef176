"""Faults between head, shards and stations: every stream goes on token for token, or ends with an error in words."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from chaos import Chaos, chaos
from cluster_nodes import Cluster, cluster

from knotctl.core.engine import mesh, recovery, remote
from knotctl.core.engine.session import Engine, EngineSpec
from knotctl.core.engine.stream import Step, Stream
from knotctl.core.errors import FrameError, KnotctlError
from knotctl.core.tokens.sampler import SamplingParams
from knotctl.core.wire.frame import Frame
from knotctl.services.station import StationService

PARAMS = SamplingParams(temperature=0.9, seed=5, logprobs=1)
PROMPT = [5, 17, 200, 3, 44, 91]
N = 24


@pytest.fixture(scope="module")
def nodes(tiny_knot: Path, serve_app: Callable[..., Any]) -> Iterator[Cluster]:
    """Two of each station, so that there is another route."""
    with cluster(str(tiny_knot), serve_app, shards=2, stations=((0, 1), (1, 3), (0, 1), (1, 3))) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tiny_knot: Path) -> list[Step]:
    with Engine.open(str(tiny_knot), EngineSpec(context=512)) as engine:
        steps = list(engine.submit(PROMPT, PARAMS, N, ignore_stop=True))
    assert len({s.token for s in steps}) > 5
    return steps


@pytest.fixture
def proxies(nodes: Cluster) -> Iterator[dict[str, Chaos]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(chaos(url))
            for name, url in zip(
                ("shard", "entry", "exit"), (nodes.shards[0], nodes.stations[0], nodes.stations[1]), strict=True
            )
        }


def opened(nodes: Cluster, proxies: dict[str, Chaos], *, replicas: bool = False, **options: Any) -> Engine:
    """An engine whose first shard and stations are behind proxies."""
    return nodes.engine(
        shards=[[proxies["shard"].url], [nodes.shards[1]]],
        stations=[
            [proxies["entry"].url, *([nodes.stations[2]] if replicas else [])],
            [proxies["exit"].url, *([nodes.stations[3]] if replicas else [])],
        ],
        **options,
    )


def stream(engine: Engine, at: int, fault: Callable[[], None], n: int = N) -> tuple[Stream, list[Step]]:
    """The steps of a stream that a fault meets at its token `at`."""
    steps: list[Step] = []
    done = threading.Event()

    def take(step: Step | None) -> None:
        # in the engine's thread, before the next pass
        if step is None:
            done.set()
            return
        steps.append(step)
        if len(steps) == at:
            fault()

    if at == 0:
        fault()
    made = engine.submit(PROMPT, PARAMS, n, ignore_stop=True, notify=take)
    assert done.wait(90)
    return made, steps


FAULTS: dict[str, Callable[[Chaos], None]] = {
    "reset of all connections": lambda p: p.cut(),
    "reset within an answer's head": lambda p: setattr(p, "reset_after", 20),
    "reset within an answer's frame": lambda p: setattr(p, "reset_after", 230),
    "reset within a request": lambda p: setattr(p, "drop_request_after", 300),
    "a bit flipped in an answer": lambda p: setattr(p, "flip_answer_at", 240),
    "a bit flipped in a request": lambda p: setattr(p, "flip_request_at", 600),
}


@pytest.mark.parametrize("at", [0, 9])
@pytest.mark.parametrize("edge", ["shard", "entry", "exit"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_the_way_changes_no_token(
    nodes: Cluster, proxies: dict[str, Chaos], undisturbed: list[Step], fault: str, edge: str, at: int
) -> None:
    with opened(nodes, proxies) as engine:
        made, steps = stream(engine, at, lambda: FAULTS[fault](proxies[edge]))
        assert made.error is None
        assert steps == undisturbed


@pytest.mark.parametrize("edge", ["entry", "exit"])
def test_a_station_that_hangs_is_left_for_its_replica(
    nodes: Cluster, proxies: dict[str, Chaos], undisturbed: list[Step], edge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PROBE_AFTER", 0.2)
    monkeypatch.setattr(remote, "_PROBE_EVERY", 0.1)
    monkeypatch.setattr(remote, "_PROBE_SECONDS", 0.3)
    with opened(nodes, proxies, replicas=True) as engine:
        made, steps = stream(engine, 7, lambda: setattr(proxies[edge], "silent", True))
        assert (made.error, steps) == (None, undisturbed)
        assert engine.stats()["recoveries"] >= 1


@pytest.mark.parametrize("edge", ["entry", "exit"])
def test_a_station_that_is_gone_is_left_for_its_replica(
    nodes: Cluster, proxies: dict[str, Chaos], undisturbed: list[Step], edge: str
) -> None:
    with opened(nodes, proxies, replicas=True) as engine:
        made, steps = stream(engine, 7, proxies[edge].close)
        assert (made.error, steps) == (None, undisturbed)
        assert engine.stats()["recoveries"] >= 1


def test_a_station_that_forgot_its_sessions_gets_them_back(
    nodes: Cluster, proxies: dict[str, Chaos], undisturbed: list[Step]
) -> None:
    def forget() -> None:
        station = nodes.station(1).station
        assert station is not None
        station.sessions.clear()

    with opened(nodes, proxies) as engine:
        made, steps = stream(engine, 11, forget)
        assert (made.error, steps) == (None, undisturbed)
        assert engine.stats()["recoveries"] == 1


def test_without_a_route_streams_end_with_503_after_a_while(
    nodes: Cluster, proxies: dict[str, Chaos], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(nodes, proxies) as engine:
        engine._recovery.patience = 0.5
        made, steps = stream(engine, 5, proxies["exit"].close)
        assert made.error is not None
        assert (made.error.code, getattr(made.error, "status", 0)) == ("no-route", 503)
        assert len(steps) == 5
        assert engine.stats()["running"] == 0


def test_a_shard_that_is_gone_slow_or_wrong_has_its_rows_read_from_the_knot(
    nodes: Cluster, proxies: dict[str, Chaos], undisturbed: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "SHARD_SECONDS", 0.3)
    for fault in (proxies["shard"].cut, lambda: setattr(proxies["shard"], "silent", True), proxies["shard"].close):
        with opened(nodes, proxies) as engine:
            made, steps = stream(engine, 6, fault)
            assert (made.error, steps) == (None, undisturbed)
            proxies["shard"].silent = False
    other = nodes.shard(0).shard
    real = type(other).embed

    def short(self: Any, frame: Frame) -> Frame:
        out = real(self, frame)
        return Frame(out.kind, out.knot_id, out.segments, out.payload[:, :-1], out.meta, out.flags)

    monkeypatch.setattr(other, "embed", short.__get__(other))
    with nodes.engine(shards=[[nodes.shards[0]], [nodes.shards[1]]], stations=[[u] for u in nodes.stations[:2]]) as e:
        assert list(e.submit(PROMPT, PARAMS, N, ignore_stop=True)) == undisturbed
        assert e.stats()["direct_reads"] > 0


def test_a_shard_that_hangs_is_not_waited_for_with_every_token(
    nodes: Cluster, proxies: dict[str, Chaos], undisturbed: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_FIRST_BAN", "_MOST_BAN"):
        monkeypatch.setattr(recovery, name, 1e9)
    with opened(nodes, proxies) as engine:
        made, steps = stream(engine, 2, lambda: setattr(proxies["shard"], "silent", True))
        assert (made.error, steps) == (None, undisturbed)
        stats = engine.stats()
        assert stats["shard_failures"] == 1
        assert stats["direct_reads"] == sum(s.token < nodes.shard(0).shard.span.end for s in undisturbed[1:-1]) > 1


def test_zeros_come_only_where_asked_for_and_are_named(
    nodes: Cluster, proxies: dict[str, Chaos], undisturbed: list[Step]
) -> None:
    with opened(nodes, proxies, direct=False) as engine:
        proxies["shard"].close()
        engine._recovery.patience = 0.3
        with pytest.raises(KnotctlError) as e:
            list(engine.submit(PROMPT, PARAMS, N, ignore_stop=True))
        assert e.value.code == "no-route"
    owned = [i for i, t in enumerate(PROMPT) if t < 200]
    with ExitStack() as stack:
        again = stack.enter_context(chaos(nodes.shards[0]))
        engine = stack.enter_context(opened(nodes, proxies | {"shard": again}, direct=False, degrade=True))
        again.close()
        made = engine.submit(PROMPT, PARAMS, 4, ignore_stop=True)
        assert list(made) != undisturbed[:4]
        assert set(owned) <= made.zeroed
        assert 2 not in made.zeroed, "token 200 is the other shard's"
        assert engine.stats()["degraded_rows"] >= len(owned)


def test_a_request_that_kills_its_stations_stops_after_two(
    nodes: Cluster, proxies: dict[str, Chaos], undisturbed: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both stations die within the pass that holds token 399; the others' streams go on."""
    monkeypatch.setattr(remote.RemoteStages, "_answers", lambda self, url: False)
    poison, deaths = 399, []
    with opened(nodes, proxies, replicas=True) as engine:
        stages = engine.stages
        real = stages.run

        def run(tokens: Frame, asks: Any, check: Any) -> Any:
            if poison in tokens.payload:
                deaths.append(len(tokens.segments))
                raise recovery.RouteLost(KnotctlError("closed-early", "the station died"), crash=True)
            return real(tokens, asks, check)

        monkeypatch.setattr(stages, "run", run)
        innocent = engine.submit(PROMPT, PARAMS, N, ignore_stop=True)
        guilty = engine.submit([poison], PARAMS, N, ignore_stop=True)
        assert list(innocent) == undisturbed
        with pytest.raises(KnotctlError) as e:
            list(guilty)
        assert e.value.code == "poison-request"
        assert len(deaths) <= 1 + recovery.MAX_CRASHES


def test_activations_that_are_no_numbers_go_nowhere(
    nodes: Cluster, proxies: dict[str, Chaos], undisturbed: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A station with bad memory is left for its replica; without one the stream ends and says so."""
    station = nodes.station(0).station
    assert station is not None
    real, calls = station.forward, []

    def forward(frame: Frame, check: Callable[[], None]) -> Frame:
        calls.append(1)
        if len(calls) > 5:
            raise FrameError("bad-activation", "row 0 column 0: nan")
        return real(frame, check)

    monkeypatch.setattr(station, "forward", forward)
    with opened(nodes, proxies, replicas=True) as engine:
        assert list(engine.submit(PROMPT, PARAMS, N, ignore_stop=True)) == undisturbed
        assert len(calls) == 6
    with opened(nodes, proxies) as engine:
        calls.clear()
        with pytest.raises(KnotctlError) as e:
            list(engine.submit(PROMPT, PARAMS, N, ignore_stop=True))
        assert e.value.code == "bad-activation"


@pytest.mark.parametrize("edge", ["entry", "exit"])
def test_a_station_that_becomes_slow_is_left_for_its_replica_and_not_taken_back(
    nodes: Cluster, proxies: dict[str, Chaos], undisturbed: list[Step], edge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_USUAL", 4)
    with opened(nodes, proxies, replicas=True) as engine:
        made, steps = stream(engine, 12, lambda: setattr(proxies[edge], "latency", 1.3))
        assert (made.error, steps) == (None, undisturbed)
        assert engine.stats()["recoveries"] >= 1
        time.sleep(recovery._FIRST_BAN)
        assert isinstance(engine.stages, remote.RemoteStages)
        assert proxies[edge].url not in [stage.order()[0] for stage in engine.stages._stages]


def test_a_slow_edge_slows_its_stream_only(nodes: Cluster, proxies: dict[str, Chaos], undisturbed: list[Step]) -> None:
    proxies["exit"].latency = 0.02
    proxies["entry"].bandwidth = 200_000
    with opened(nodes, proxies) as slow, nodes.engine(
        shards=[[u] for u in nodes.shards], stations=[[u] for u in nodes.stations[2:]]
    ) as quick:  # fmt: skip
        late = slow.submit(PROMPT, PARAMS, N, ignore_stop=True)
        assert list(quick.submit(PROMPT, PARAMS, N, ignore_stop=True)) == undisturbed
        assert list(late) == undisturbed


def test_after_many_faults_nothing_is_left_behind(
    nodes: Cluster, proxies: dict[str, Chaos], undisturbed: list[Step]
) -> None:

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    for node in nodes.nodes.values():
        # of the tests before, whose nodes could not be told any more: these end by themselves, much later
        if isinstance(node, StationService) and node.station is not None:
            node.station.sessions.clear()
    with opened(nodes, proxies) as engine:
        list(engine.submit(PROMPT, PARAMS, 3, ignore_stop=True))
        threads, files = threading.active_count(), open_files()
        for i in range(12):
            streams = [engine.submit(PROMPT, PARAMS, N, ignore_stop=True) for _ in range(6)]
            streams[1].cancel()
            next(iter(streams[2]))
            streams[2].cancel()
            if i % 3 == 0:
                proxies["exit"].cut()
            for s in (streams[0], streams[3], streams[4], streams[5]):
                assert list(s) == undisturbed
        end = time.monotonic() + 20
        while left := [n for n in [engine.stats(), *(n.stats() for n in nodes.nodes.values())] if _busy(n)]:
            assert time.monotonic() < end, left
            time.sleep(0.05)
        assert open_files() <= files + 20
        assert threading.active_count() <= threads + 20


def _busy(stats: Any) -> bool:
    return any(stats.get(k) for k in ("running", "waiting", "knot_sessions", "knot_frames_queued"))
