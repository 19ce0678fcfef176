"""A model on shards and stations behind HTTP: the same tokens as in one process, whatever the route does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_nodes import Cluster, cluster

from knotctl.core.engine.remote import RemoteStages
from knotctl.core.engine.session import Engine, EngineSpec
from knotctl.core.errors import KnotctlError, SourceError, UsageError, WrongIdentity
from knotctl.core.tokens.sampler import SamplingParams
from knotctl.core.wire.frame import Frame

GREEDY = SamplingParams(temperature=0.0, seed=0)
PROMPT = [5, 17, 200, 3, 44, 91]
PENALISED = SamplingParams(temperature=0.9, seed=11, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=2)
BIASED = SamplingParams(temperature=0.8, seed=(1 << 63) + 5, top_k=40, top_p=0.9, logit_bias={7: 4.0, 9: -100.0})


@pytest.fixture(scope="module")
def nodes(tiny_knot: Path, serve_app: Callable[..., Any]) -> Iterator[Cluster]:
    with cluster(str(tiny_knot), serve_app) as made:
        yield made


@pytest.fixture(scope="module")
def local(tiny_knot: Path) -> Iterator[Engine]:
    with Engine.open(str(tiny_knot), EngineSpec(context=512)) as engine:
        yield engine


@pytest.fixture(scope="module")
def remote(nodes: Cluster) -> Iterator[Engine]:
    with nodes.engine() as engine:
        yield engine


@pytest.mark.parametrize("params", [GREEDY, PENALISED, BIASED], ids=["greedy", "penalised, logprobs", "biased"])
def test_a_route_of_stations_gives_the_steps_of_one_process(
    local: Engine, remote: Engine, params: SamplingParams
) -> None:
    steps = list(remote.submit(PROMPT, params, 40, ignore_stop=True))
    assert steps == list(local.submit(PROMPT, params, 40, ignore_stop=True))
    assert len({s.token for s in steps}) > 3


@pytest.mark.parametrize("params", [GREEDY, PENALISED, BIASED], ids=["greedy", "penalised, logprobs", "biased"])
def test_the_shards_heads_give_the_steps_of_the_tails(nodes: Cluster, local: Engine, params: SamplingParams) -> None:
    with nodes.engine(head_on_shards=True) as engine:
        for prompt in (PROMPT, [(i * 37) % 390 for i in range(200)], [*range(20, 40), *range(20, 40), 20, 21]):
            streams = [engine.submit(prompt, params, 20, ignore_stop=True) for _ in range(2)]
            expected = list(local.submit(prompt, params, 20, ignore_stop=True))
            assert [list(s) for s in streams] == [expected, expected]


def test_drafts_are_verified_at_the_tail_as_here(local: Engine, remote: Engine) -> None:
    prompt = [*range(20, 40), *range(20, 40), *range(20, 26)]
    for params in (GREEDY, SamplingParams(temperature=0.3, seed=2, presence_penalty=0.5)):
        stream = remote.submit(prompt, params, 60, ignore_stop=True)
        assert list(stream) == list(local.submit(prompt, params, 60, ignore_stop=True))
        assert stream.drafter.drafted > 0


def test_a_long_prompt_goes_in_chunks_several_at_once_and_gives_the_same(
    nodes: Cluster, local: Engine, remote: Engine
) -> None:
    prompt = [(i * 37) % 390 for i in range(400)]
    assert isinstance(remote.stages, RemoteStages)
    before = [nodes.station(i).metrics.exposition() for i in (0, 1)]
    steps = list(remote.submit(prompt, GREEDY, 5, ignore_stop=True))
    assert steps == list(local.submit(prompt, GREEDY, 5, ignore_stop=True))
    assert before != [nodes.station(i).metrics.exposition() for i in (0, 1)]


def test_unpipelined_a_station_begins_when_the_one_before_has_nothing_left_to_do(
    nodes: Cluster, local: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    for i in (0, 1):
        station = nodes.station(i).station
        assert station is not None
        real = station.forward

        def forward(frame: Frame, check: Callable[[], None], i: int = i, real: Any = real) -> Frame:
            events.append(f"begin {i}")
            out: Frame = real(frame, check)
            events.append(f"end {i}")
            return out

        monkeypatch.setattr(station, "forward", forward)
    prompt = [(i * 29) % 390 for i in range(300)]
    with nodes.engine(pipelined=False) as engine:
        assert list(engine.submit(prompt, GREEDY, 1, ignore_stop=True)) == list(
            local.submit(prompt, GREEDY, 1, ignore_stop=True)
        )
    assert events == ["begin 0", "end 0", "begin 1", "end 1"] * 3, "frames of 128 tokens, the most that they take"


def test_stations_work_on_different_chunks_at_once(
    nodes: Cluster, remote: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second station begins before the first one has ended its last chunk, and neither changes the order."""
    events: list[tuple[str, int, int]] = []
    for i in (0, 1):
        station = nodes.station(i).station
        assert station is not None
        real = station.forward

        def forward(frame: Frame, check: Callable[[], None], i: int = i, real: Any = real) -> Frame:
            events.append(("begin", i, frame.segments[0].position))
            time.sleep(0.05)
            out: Frame = real(frame, check)
            events.append(("end", i, frame.segments[0].position))
            return out

        monkeypatch.setattr(station, "forward", forward)
    list(remote.submit([(i * 31) % 390 for i in range(400)], GREEDY, 1, ignore_stop=True))
    for i in (0, 1):
        starts = [p for what, who, p in events if (what, who) == ("begin", i)]
        assert starts == sorted(starts)
        assert len(starts) >= 6
    assert events.index(("begin", 1, 0)) < events.index(("end", 0, 384))


def test_requests_that_run_together_get_what_each_gets_alone(local: Engine, remote: Engine) -> None:
    requests = [([*PROMPT[i:], 100 + i], SamplingParams(temperature=0.8, seed=i)) for i in range(5)]
    streams = [remote.submit(prompt, params, 20, ignore_stop=True) for prompt, params in requests]
    for stream, (prompt, params) in zip(streams, requests, strict=True):
        assert list(stream) == list(local.submit(prompt, params, 20, ignore_stop=True))


def test_a_session_is_forgotten_by_all_stations_when_its_stream_ends(nodes: Cluster, remote: Engine) -> None:
    list(remote.submit(PROMPT, GREEDY, 3, ignore_stop=True))
    cancelled = remote.submit(PROMPT, GREEDY, 300, ignore_stop=True)
    next(iter(cancelled))
    cancelled.cancel()
    end = time.monotonic() + 10
    while any(node.stats().get("knot_sessions") for node in nodes.nodes.values()):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_sampling_that_cannot_work_is_refused_before_it_leaves(remote: Engine) -> None:
    with pytest.raises(KnotctlError) as e:
        remote.submit(PROMPT, SamplingParams(seed=1, logit_bias={399_999: 1.0}), 3)
    assert e.value.code == "bad-token-id"


def test_a_node_that_loads_is_waited_for_longer_than_one_that_failed(
    nodes: Cluster, local: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a slow store a model takes minutes to load."""
    station = nodes.station(1)
    station.ready = False
    threading.Timer(1.0, setattr, (station, "ready", True)).start()
    with nodes.engine(wait_seconds=0.0) as engine:
        assert station.ready
        assert list(engine.submit(PROMPT, GREEDY, 3)) == list(local.submit(PROMPT, GREEDY, 3))
    monkeypatch.setattr(station, "ready", False)
    monkeypatch.setattr(station, "failure", KnotctlError("broken", "its memory is bad"))
    with pytest.raises(SourceError, match="did not get ready"):
        nodes.engine(wait_seconds=0.0)


def test_nodes_that_are_not_this_model_whole_are_refused(
    nodes: Cluster, tiny: Callable[[str], Path], serve_app: Callable[..., Any]
) -> None:
    a, b = nodes.stations
    for shards, stations, code in (
        (nodes.shards[:2], [a, b], "bad-shards"),
        (nodes.shards, [b], "bad-stations"),
        (nodes.shards, [b, a], "bad-stations"),
        (nodes.shards, [a, a, b], "bad-stations"),
    ):
        with pytest.raises(UsageError) as e:
            nodes.engine(shards=[[u] for u in shards], stations=[[u] for u in stations])
        assert e.value.code == code
    small = cluster(str(nodes.knot.source.name), serve_app, shards=1, stations=((0, 3),), batch=127)
    with small as own, pytest.raises(UsageError, match="frames of 127 tokens"):
        own.engine()
    from knotctl.core.knot.reader import open_knot

    with open_knot(str(tiny("tiny-llama"))) as other, pytest.raises(WrongIdentity):
        RemoteStages(other, nodes.spec())


def test_without_the_token_nobody_is_let_in(nodes: Cluster) -> None:
    for token in (None, "another-token-0002"):
        with pytest.raises(KnotctlError) as e:
            nodes.engine(token=token)
        assert e.value.code == "invalid_api_key"
