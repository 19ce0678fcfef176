from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from knotctl.core.engine.session import Engine, EngineSpec
from knotctl.core.errors import KnotctlError, RequestError, UsageError
from knotctl.core.model.budget import Residency
from knotctl.core.spans import LayerSpan
from knotctl.core.tokens.sampler import SamplingParams

GREEDY = SamplingParams(temperature=0.0, seed=0)
PROMPT = [5, 17, 200, 3, 44, 91]


@pytest.fixture(scope="module")
def path(tiny: Callable[[str], Path]) -> str:
    return str(tiny("tiny"))


@pytest.fixture(scope="module")
def engine(path: str) -> Iterator[Engine]:
    with Engine.open(path, EngineSpec(context=512)) as e:
        yield e


def tokens(engine: Engine, params: SamplingParams = GREEDY, n: int = 24, prompt: list[int] = PROMPT) -> list[int]:
    return [step.token for step in engine.submit(prompt, params, n, ignore_stop=True)]


@pytest.mark.parametrize(
    "spec",
    [
        EngineSpec(shards=8, stations=2),
        EngineSpec(stations=[LayerSpan(0, 1), LayerSpan(1, 3)]),
        EngineSpec(residency=Residency.FLUID, threads=1),
        EngineSpec(memory_budget=48 << 20, context=256),
    ],
    ids=["8 shards, 2 stations", "given spans", "fluid, one thread", "under a budget"],
)
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=1.0, seed=7, top_k=50, logprobs=3)], ids=["greedy", "sampled"]
)
def test_the_way_a_model_is_split_changes_no_token(
    path: str, engine: Engine, spec: EngineSpec, params: SamplingParams
) -> None:
    with Engine.open(path, spec) as other:
        steps = list(other.submit(PROMPT, params, 24, ignore_stop=True))
        assert steps == list(engine.submit(PROMPT, params, 24, ignore_stop=True))
        assert len({s.token for s in steps}) > 3, "a model that repeats one token proves nothing"


def test_requests_that_run_together_get_what_each_gets_alone(engine: Engine) -> None:
    requests = [([*PROMPT[i:], 100 + i], SamplingParams(temperature=0.8, seed=i)) for i in range(5)]
    alone = [tokens(engine, params, 30, prompt) for prompt, params in requests]
    streams = [engine.submit(prompt, params, 30, ignore_stop=True) for prompt, params in requests]
    assert [[step.token for step in s] for s in streams] == alone
    assert len({tuple(t) for t in alone}) == 5


def test_a_replay_of_the_tokens_so_far_continues_as_the_first_run(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    whole = tokens(engine, params, 20)
    assert tokens(engine, params, 12, PROMPT + whole[:8]) == whole[8:]


def test_a_stream_ends_at_the_models_end_of_text_without_yielding_it(engine: Engine) -> None:
    first = tokens(engine, n=1)[0]
    before = engine.tokenizer.stop_ids
    engine.tokenizer.stop_ids = frozenset([first])
    try:
        stream = engine.submit(PROMPT, GREEDY, 8)
        assert list(stream) == []
        assert stream.finish_reason == "stop"
    finally:
        engine.tokenizer.stop_ids = before


def test_a_stream_ends_when_it_is_long_enough_or_the_context_is_full(engine: Engine) -> None:
    stream = engine.submit(PROMPT, GREEDY, 3, ignore_stop=True)
    assert len(list(stream)) == 3
    assert stream.finish_reason == "length"
    stream = engine.submit([7] * (engine.context_length - 2), GREEDY, 1000, ignore_stop=True)
    assert len(list(stream)) == 2
    assert stream.finish_reason == "length"
    stream = engine.submit(PROMPT, GREEDY, 0)
    assert list(stream) == []
    assert stream.finish_reason == "length"


def test_a_cancelled_stream_ends_and_its_room_is_free_again(engine: Engine) -> None:
    seen = threading.Event()
    stream = engine.submit(PROMPT, GREEDY, 400, ignore_stop=True, notify=lambda _: seen.set())
    assert seen.wait(30)
    stream.cancel()
    assert tokens(engine, n=1)
    assert stream.finish_reason == "cancelled"
    assert len(stream.tokens) < 400
    assert engine.stats()["kv_bytes"] == engine.stats()["running"] == 0


def test_requests_that_outgrow_the_room_wait_and_replay_the_youngest_first(engine: Engine) -> None:
    # each comes to need more than half of the context of 512, and none says so when it begins
    prompts = [[*PROMPT, 100 + i] for i in range(3)]
    alone = [tokens(engine, GREEDY, 300, prompt) for prompt in prompts]
    order: list[int] = []
    done = threading.Event()

    def ended(i: int) -> None:
        order.append(i)
        if len(order) == 3:
            done.set()

    streams = [
        engine.submit(prompt, GREEDY, 300, ignore_stop=True, notify=lambda s, i=i: None if s else ended(i))
        for i, prompt in enumerate(prompts)
    ]
    assert done.wait(60)
    assert [s.tokens for s in streams] == alone
    assert order == [0, 1, 2]
    assert engine.stats()["kv_bytes"] == 0


def test_a_request_that_left_while_it_waited_waits_no_more(path: str) -> None:
    with Engine.open(path, EngineSpec(context=512, max_batch=1)) as engine:
        running = engine.submit(PROMPT, GREEDY, 400, ignore_stop=True)
        waiting = [engine.submit(PROMPT, GREEDY, 400, ignore_stop=True) for _ in range(3)]
        waiting[1].cancel()
        list(waiting[1])
        assert waiting[1].finish_reason == "cancelled"
        for stream in (running, waiting[0], waiting[2]):
            stream.cancel()


def test_a_request_whose_sampling_fails_takes_no_other_with_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from knotctl.core.engine import choose

    real, bad = choose.sample, SamplingParams(temperature=0.5, seed=666)

    def sample(scores: object, params: SamplingParams, *rest: object) -> object:
        return 1 / 0 if params is bad else real(scores, params, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(choose, "sample", sample)
    streams = [engine.submit(PROMPT, params, 20, ignore_stop=True) for params in (GREEDY, bad, GREEDY)]
    assert len(list(streams[0])) == len(list(streams[2])) == 20
    with pytest.raises(KnotctlError, match="ZeroDivisionError"):
        list(streams[1])


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "empty-prompt"),
        ([-1], "token-out-of-range"),
        ([10**6], "token-out-of-range"),
        ([1] * 512, "context_length_exceeded"),
    ],
)
def test_requests_that_cannot_work_are_refused_at_once(engine: Engine, prompt: list[int], code: str) -> None:
    with pytest.raises(RequestError) as e:
        engine.submit(prompt, GREEDY, 4)
    assert e.value.code == code


def test_stations_must_cover_all_layers_in_order(path: str) -> None:
    for stations in (0, 4, [LayerSpan(0, 2)], [LayerSpan(0, 1), LayerSpan(2, 3)], [LayerSpan(2, 3), LayerSpan(0, 2)]):
        with pytest.raises(UsageError) as e:
            Engine.open(path, EngineSpec(stations=stations))
        assert e.value.code == "bad-stations"


def test_an_error_ends_the_streams_it_struck_and_no_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        m.setattr(engine.stages, "run", lambda frame, asks, check: 1 / 0)
        with pytest.raises(Exception, match="ZeroDivisionError"):
            tokens(engine, n=2)
    assert len(tokens(engine, n=2)) == 2


def test_closing_ends_what_runs(path: str) -> None:
    engine = Engine.open(path)
    stream = engine.submit(PROMPT, GREEDY, 100_000, ignore_stop=True)
    engine.close()
    list(stream)
    assert stream.finish_reason == "cancelled"
    with pytest.raises(RequestError):
        engine.submit(PROMPT, GREEDY, 1)
