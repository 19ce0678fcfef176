"""`serve --processes` with real processes: SIGKILL, SIGSTOP, and a parent that is killed itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from knotctl.core.engine.remote import ClusterSpec, RemoteStages
from knotctl.core.engine.session import Engine, EngineSpec
from knotctl.core.engine.stream import Step
from knotctl.core.errors import SourceError
from knotctl.core.tokens.sampler import SamplingParams
from knotctl.services import supervisor as supervisor_module
from knotctl.services.supervisor import Supervisor

PARAMS = SamplingParams(temperature=0.9, seed=5)
PROMPT = [5, 17, 200, 3, 44, 91]
N = 40


def commands(knot: str) -> dict[str, list[str]]:
    return {
        "shard 0": ["shard-embed", knot, "--shard", "0/2", "--serve"],
        "shard 1": ["shard-embed", knot, "--shard", "1/2", "--serve"],
        "station 0": ["run-station", knot, "--layers", "0:1", "--serve", "-c", "512"],
        "station 1": ["run-station", knot, "--layers", "1:3", "--serve", "-c", "512"],
    }


@pytest.fixture(scope="module")
def supervisor(tiny_knot: Path) -> Iterator[Supervisor]:
    with Supervisor(commands(str(tiny_knot))) as made:
        yield made


@pytest.fixture(scope="module")
def engine(supervisor: Supervisor, tiny_knot: Path) -> Iterator[Engine]:
    urls = [[c.url] for c in supervisor.children]
    spec = ClusterSpec(urls[:2], urls[2:])
    with Engine.open(str(tiny_knot), EngineSpec(context=512), lambda k: RemoteStages(k, spec)) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tiny_knot: Path) -> list[Step]:
    with Engine.open(str(tiny_knot), EngineSpec(context=512)) as engine:
        return list(engine.submit(PROMPT, PARAMS, N, ignore_stop=True))


def streamed(engine: Engine, at: int, fault: Callable[[], None]) -> list[Step]:
    """The steps of a stream; the fault comes in the pass behind token `at`."""
    steps: list[Step] = []
    done = threading.Event()

    def take(step: Step | None) -> None:
        if step is None:
            done.set()
        else:
            steps.append(step)
            if len(steps) == at:
                fault()

    if at == 0:
        fault()
    stream = engine.submit(PROMPT, PARAMS, N, ignore_stop=True, notify=take)
    assert done.wait(100)
    assert stream.error is None, stream.error
    return steps


@pytest.mark.parametrize("at", [0, 1, 17])
@pytest.mark.parametrize("child", [0, 2, 3], ids=["shard", "entry", "exit"])
def test_a_process_killed_anywhere_is_started_again_and_the_stream_goes_on(
    supervisor: Supervisor, engine: Engine, undisturbed: list[Step], child: int, at: int
) -> None:
    victim, url = supervisor.children[child], supervisor.children[child].url
    restarts = victim.restarts
    assert streamed(engine, at, lambda: os.kill(victim.pid, signal.SIGKILL)) == undisturbed
    end = time.monotonic() + 60
    while victim.restarts == restarts or not _answers(url):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("watched", [True, False], ids=["started again", "left alone"])
def test_processes_that_stop_for_20_seconds_cost_at_most_that_and_no_token(
    supervisor: Supervisor, engine: Engine, undisturbed: list[Step], watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard and the last station; what they work off when they go on belongs to sessions that are no more."""
    if not watched:
        monkeypatch.setattr(supervisor_module, "_PROBE_MISSES", 1000)
    victims = [supervisor.children[0], supervisor.children[3]]
    before = [(v.restarts, v.pid) for v in victims]

    def go_on() -> None:
        for _, pid in before:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def stop() -> None:
        for _, pid in before:
            os.kill(pid, signal.SIGSTOP)
        threading.Timer(20.0, go_on).start()

    assert streamed(engine, 9, stop) == undisturbed
    assert [v.restarts - n for v, (n, _) in zip(victims, before, strict=True)] == [int(watched)] * 2


def test_a_process_that_hangs_for_good_is_killed_and_started_again(tiny_knot: Path) -> None:
    module = supervisor_module
    every, seconds = module._PROBE_EVERY, module._PROBE_SECONDS
    module._PROBE_EVERY, module._PROBE_SECONDS = 0.2, 0.3
    try:
        with Supervisor({"shard": commands(str(tiny_knot))["shard 0"]}) as made:
            (child,) = made.children
            pid = child.pid
            os.kill(pid, signal.SIGSTOP)
            end = time.monotonic() + 60
            while child.restarts == 0 or child.process is None or child.pid == pid:
                assert time.monotonic() < end
                time.sleep(0.05)
    finally:
        module._PROBE_EVERY, module._PROBE_SECONDS = every, seconds


def test_a_process_that_cannot_start_says_so_and_none_is_left(tiny_knot: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as e:
        Supervisor(
            {"shard 0": commands(str(tiny_knot))["shard 0"], "bad": ["shard-embed", "none", "--serve"]}
        ).__enter__()
    assert e.value.code == "child-failed"
    assert "bad: did not start: ended with status 4" in e.value.message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_serve_runs_its_processes_and_none_outlives_it(tiny_knot: Path, number: int) -> None:
    command = [sys.executable, "-m", "knotctl", "serve", str(tiny_knot), "--processes", "--shards", "2"]
    command += ["--stations", "0:1,1:3", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        about: dict[str, Any] = json.loads(head.stdout.readline())
        end = time.monotonic() + 60
        while httpx2.get(f"{about['url']}/readyz").status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.05)
        children = [int(p) for p in Path(f"/proc/{head.pid}/task/{head.pid}/children").read_text().split()]
        assert len(children) == 4
        reply = httpx2.post(
            f"{about['url']}/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 5}, timeout=30
        )
        assert reply.status_code == 200
        health = httpx2.get(f"{about['url']}/health").json()
        assert health["spans"] == [[0, 1], [1, 3]]
        head.send_signal(number)
        head.communicate(timeout=45)
        assert head.returncode == (0 if number == signal.SIGTERM else -number)
    end = time.monotonic() + 20
    while any(_runs(pid) for pid in children):
        assert time.monotonic() < end, "a process outlived the one that started it"
        time.sleep(0.05)


@pytest.mark.model
def test_a_real_model_over_eight_shards_and_two_stations_says_what_it_says_in_one_process(
    knot_of: Callable[[str], Path],
) -> None:
    knot = str(knot_of("smollm2"))
    shards = {f"shard {i}": ["shard-embed", knot, "--shard", f"{i}/8", "--serve"] for i in range(8)}
    spans = {f"station {s}": ["run-station", knot, "--layers", s, "--serve"] for s in ("0:15", "15:30")}
    with Engine.open(knot, EngineSpec(context=1024)) as local:
        prompt = local.tokenizer.encode("The capital of France is " * 40)
        requests = [(prompt[:5], PARAMS), (prompt, SamplingParams(temperature=0, seed=0, logprobs=3))]
        expected = [list(local.submit(p, params, 24, ignore_stop=True)) for p, params in requests]
    with Supervisor(shards | spans) as made:
        urls = [[c.url] for c in made.children]
        spec = ClusterSpec(urls[:8], urls[8:])
        with Engine.open(knot, EngineSpec(context=1024), lambda k: RemoteStages(k, spec)) as engine:
            streams = [engine.submit(p, params, 24, ignore_stop=True) for p, params in requests]
            assert [list(s) for s in streams] == expected


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/livez").status_code == 200
    except httpx2.TransportError:
        return False


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
