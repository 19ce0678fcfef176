"""At a tracker's cluster: a request that kills, a node that becomes slow, a way between two nodes that is broken."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from chaos import Chaos
from poisoned_worker import TOKENS
from tracker_cluster import Process, TrackedCluster, wait_until

from knotctl.core.engine.session import Engine, EngineSpec
from knotctl.core.knot.reader import open_knot
from knotctl.core.model.budget import Residency
from knotctl.core.model.station import Station, StationSpec
from knotctl.core.spans import LayerSpan
from knotctl.core.tokens.detokenize import Detokenizer
from knotctl.core.tokens.sampler import SamplingParams
from knotctl.services.agent import Agent
from knotctl.services.edge import EdgeConfig
from knotctl.services.keys import ApiKeys
from knotctl.services.tracker_client import Trackers
from knotctl.services.worker import WorkerService

PROMPT = [5, 17, 200, 3, 44, 91]
POISONED = [str(Path(__file__).with_name("poisoned_worker.py"))]
LENGTH = 200


def body(most: int) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": most, "temperature": 0.9, "seed": 5}


@pytest.fixture(scope="module")
def text(tiny_knot: Path) -> str:
    """What one process makes of the request."""
    with Engine.open(str(tiny_knot), EngineSpec(context=512)) as engine:
        words = Detokenizer(engine.tokenizer)
        stream = engine.submit(PROMPT, SamplingParams(temperature=0.9, seed=5), LENGTH)
        return "".join(words.push(s.token) for s in stream) + words.flush()


@pytest.fixture
def cluster(tiny_knot: Path) -> Iterator[TrackedCluster]:
    with TrackedCluster(tiny_knot) as made:
        made.tracker()
        yield made


def wait_for(cluster: TrackedCluster, **layers: tuple[int, int]) -> None:
    """Until every one of these nodes holds its layers."""
    wait_until(lambda: all(cluster.node(name).get("layers") == [list(span)] for name, span in layers.items()))


@pytest.mark.parametrize("deadly", ["first", "last"])
def test_a_poison_request_stops_after_two_stations(tiny_knot: Path, text: str, deadly: str) -> None:
    harmless = body(TOKENS - len(PROMPT))
    with TrackedCluster(tiny_knot, env={"DEADLY": deadly}) as cluster:
        cluster.tracker()
        for name in "abc":
            cluster.worker(name, (0, 2), program=POISONED)
        for name in "xyz":
            cluster.worker(name, (2, 3), program=POISONED)
        wait_until(lambda: len([n for n in cluster.coverage()["nodes"] if n["layers"]]) == 6)
        before = cluster.post(harmless).json()["choices"]
        wanted = body(LENGTH) | {"stream": True}
        with cluster.client.stream("POST", f"{cluster.url}/v1/completions", json=wanted) as reply:
            said = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
        # What came before the deadly place was delivered; then the stream ended with a reason.
        assert said[-1]["error"]["code"] == "poison-request"
        assert text.startswith("".join(s["choices"][0]["text"] for s in said[:-1]))
        assert len(said) > 10
        assert sum(not worker.is_running for worker in cluster.workers.values()) == 2
        # and others are served
        wait_until(lambda: cluster.coverage()["covered"])
        assert cluster.post(harmless).json()["choices"] == before


class SlowWorker:
    """A worker in this process that does its work, and takes its time where it is told to."""

    def __init__(self, cluster: TrackedCluster, knot: Path, name: str, serve_app: Callable[..., Any]) -> None:
        self.seconds = 0.0
        self.frames = 0
        self._open = ExitStack()
        opened = self._open.enter_context(open_knot(str(knot)))
        token = cluster.node_headers["authorization"].removeprefix("Bearer ")

        def make(span: LayerSpan) -> Station:
            station = Station(opened, StationSpec(span, Residency.RESIDENT, kv_tokens=512, logits_rows=64))
            forward = station.forward

            def slowly(*args: Any) -> Any:
                self.frames += 1
                time.sleep(self.seconds)
                return forward(*args)

            station.forward = slowly  # type: ignore[method-assign]
            return station

        service = WorkerService(opened, make, token=token)
        server = self._open.enter_context(serve_app(service.app(EdgeConfig(keys=ApiKeys([token])))))
        sizes = cluster.model.sizes_at(cluster.model.native or "")
        assert sizes is not None
        document = {
            "node_id": name, "vram_bytes": int(sizes.span_bytes(2, 3) / 0.8) + 16, "overhead_bytes": 0,
            "quantizations": [sizes.quantization], "benchmark_tokens_per_sec": 1000.0,
            "benchmark_model": cluster.model.name,
        }  # fmt: skip
        trackers = Trackers([cluster.url], token=token)
        self._open.callback(trackers.close)
        self._agent = Agent(service, trackers, document, server.url)
        self._agent.start()

    def __enter__(self) -> SlowWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self._agent.leave()
        self._agent.join()
        self._open.close()


def test_a_stream_leaves_a_node_that_becomes_slow(
    cluster: TrackedCluster, text: str, tiny_knot: Path, serve_app: Callable[..., Any]
) -> None:
    cluster.worker("head", (0, 2))
    wait_for(cluster, head=(0, 2))
    with SlowWorker(cluster, tiny_knot, "slow", serve_app) as slow:
        wait_for(cluster, slow=(2, 3))
        cluster.worker("quick", (2, 3))
        wait_for(cluster, quick=(2, 3))
        wait_until(lambda: cluster.node("slow").get("measured_tokens_per_sec"))
        seen: list[int] = []

        def fault() -> None:
            # it was at work until here; three seconds a token from now on
            seen.append(slow.frames)
            slow.seconds = 3.0

        began = time.monotonic()
        assert cluster.streamed(body(LENGTH), 100, fault) == text
        assert seen[0] > 30
        # Whoever stays with it takes five minutes for what is left.
        assert time.monotonic() - began < 60
        assert not cluster.node("slow")["quarantine"]


def owns(process: Process, port: int, to: int) -> bool:
    """Whether a connection of this machine, from one port to another, is one of the process's."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = {tuple(int(end.rsplit(":", 1)[1], 16) for end in line[1:3]): line[9] for line in lines}
    if (port, to) not in ends:
        return False
    wanted = f"socket:[{ends[port, to]}]"
    for fd in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            if str(fd.readlink()) == wanted:
                return True
        except OSError:
            continue
    return False


class Wall(Chaos):
    """Passes on every connection but those of one process."""

    shut_out: Process | None = None

    def lets_in(self, near: socket.socket) -> bool:
        return self.shut_out is None or not owns(self.shut_out, near.getpeername()[1], near.getsockname()[1])


def test_a_way_between_two_nodes_that_is_broken_is_gone_around(cluster: TrackedCluster, text: str) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    wall = Wall(f"http://127.0.0.1:{port}")
    try:
        # One after the other: the first two cover, and of the others each copies what is slowest.
        cluster.worker("a", (0, 2))
        wall.shut_out = cluster.workers["a"]
        wait_for(cluster, a=(0, 2))
        cluster.worker("y", (2, 3), claim=100.0)
        wait_for(cluster, y=(2, 3))
        cluster.worker("b", (0, 2))
        wait_for(cluster, b=(0, 2))
        cluster.worker("x", (2, 3), "--listen", f"127.0.0.1:{port}", "--advertise", wall.url, claim=200.0)
        wait_for(cluster, x=(2, 3))
        # a and x are the quickest by what they claim, and cannot reach each other
        assert cluster.streamed(body(LENGTH)) == text
        assert cluster.route(body(LENGTH)) != ["a", "x"]
        about = {n["node_id"]: n for n in cluster.coverage()["nodes"]}
        assert set(about) == set("abxy")
        assert not any(n["quarantine"] for n in about.values())
        # Without y all that is left is from b to x.
        cluster.workers["y"].kill()
        assert cluster.streamed(body(LENGTH)) == text
        assert cluster.route(body(LENGTH)) == ["b", "x"]
    finally:
        wall.close()
