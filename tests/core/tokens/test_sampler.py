"""The next token: each filter leaves what its definition says, ties and draws are decided, garbage is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knotctl.core.errors import CheckFailed, RequestError
from knotctl.core.tokens.sampler import SamplingParams, sample, uniform

GREEDY = SamplingParams(temperature=0)
RNG = np.random.default_rng(7)
LARGE = (RNG.standard_normal(152_000) * 3).astype(np.float32)


def logits(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, np.float32)


def reachable(values: np.ndarray[Any, Any], params: SamplingParams, history: list[int] | None = None) -> set[int]:
    return {sample(values, dataclasses.replace(params, seed=s), 0, history or []).token for s in range(400)}


def candidates(values: np.ndarray[Any, Any], params: SamplingParams) -> list[tuple[int, float]]:
    """What the filters leave and each one's share, by their definitions and nothing quick."""
    scores = [float(v) / params.temperature for v in values]
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: params.top_k or None]
    weights = {i: math.exp(scores[i] - scores[order[0]]) for i in order}
    total = sum(weights.values())
    kept, mass = [], 0.0
    for i in order:
        if weights[i] >= params.min_p and (mass < params.top_p * total or params.top_p == 1):
            kept.append(i)
        mass += weights[i]
    left = sum(weights[i] for i in kept)
    return [(i, weights[i] / left) for i in kept]


@given(
    values=st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 1.0, 1.0, 2.0, 4.0]), min_size=1, max_size=12),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.1, 0.35, 0.7, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.31, 1.0]),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=600, deadline=None)
def test_the_draw_is_the_definition_s(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    left = candidates(logits(*values), params)
    if (params.top_k == 0 or params.top_k >= len(values)) and top_p == 1 and len(left) == len(values):
        left.sort()  # where nothing is left out, the order is that of the ids
    u, mass = uniform(seed, 3), 0.0
    token = sample(logits(*values), params, 3).token
    for i, share in left:
        mass += share
        if abs(u - mass) < 1e-9:
            return  # on the edge rounding decides
        if u < mass:
            assert token == i
            return
    raise AssertionError("the shares do not reach 1")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.999),
        SamplingParams(top_k=300, top_p=0.9),
        SamplingParams(top_k=5000, min_p=0.01),
        SamplingParams(min_p=1e-4, temperature=2.0),
        SamplingParams(top_p=0.5, temperature=0.3, min_p=0.001),
    ],
    ids=lambda p: f"{p.temperature},{p.top_k},{p.top_p},{p.min_p}",
)
def test_a_large_vocabulary_gives_the_same_as_the_definition(params: SamplingParams) -> None:
    left = candidates(LARGE, params)
    edges = np.cumsum([share for _, share in left])
    for seed in range(20):
        drawn = sample(LARGE, dataclasses.replace(params, seed=seed), 0).token
        assert drawn == left[int(np.searchsorted(edges, uniform(seed, 0), side="right"))][0]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert sample(logits(1, 3, 3, 2), GREEDY, 0).token == 1
    assert reachable(logits(1, 3, 3, 2), SamplingParams(top_k=1)) == {1}
    assert reachable(logits(2, 1, 2, 2), SamplingParams(top_k=2)) == {0, 2}


def test_each_filter_leaves_its_part() -> None:
    values = np.log(logits(0.5, 0.25, 0.15, 0.1))
    assert reachable(values, SamplingParams()) == {0, 1, 2, 3}
    assert reachable(values, SamplingParams(top_k=3)) == {0, 1, 2}
    assert reachable(values, SamplingParams(top_p=0.6)) == {0, 1}
    assert reachable(values, SamplingParams(min_p=0.4)) == {0, 1}
    assert reachable(values, SamplingParams(top_p=1e-9)) == {0}
    assert reachable(values, SamplingParams(temperature=1e-300)) == {0}
    # top-p counts from what top-k left: of 0.5 and 0.25 the first holds two thirds
    assert reachable(values, SamplingParams(top_k=2, top_p=0.6)) == {0}


def test_the_shares_are_those_of_the_softmax() -> None:
    values = np.log(logits(0.5, 0.25, 0.15, 0.1))
    counts = np.bincount([sample(values, SamplingParams(seed=s), 9).token for s in range(4000)], minlength=4)
    assert np.abs(counts / 4000 - [0.5, 0.25, 0.15, 0.1]).max() < 0.03


def test_penalties_and_bias_come_before_the_draw() -> None:
    values = logits(2, 2.5, -1, 1)
    assert sample(values, GREEDY, 0, [1]).token == 1
    assert sample(values, SamplingParams(temperature=0, repetition_penalty=1.3), 0, [1]).token == 0
    # a negative logit is multiplied, so that it falls too
    assert sample(logits(-1, -1.2), SamplingParams(temperature=0, repetition_penalty=1.3), 0, [0]).token == 1
    assert sample(values, SamplingParams(temperature=0, presence_penalty=0.6), 0, [1, 1, 0]).token == 1
    assert sample(values, SamplingParams(temperature=0, frequency_penalty=0.6), 0, [1, 1, 0]).token == 0
    assert sample(values, SamplingParams(temperature=0, logit_bias={3: 2}), 0).token == 3
    # the bias goes on after the penalties: 2.5 / 2 + 1 > 2
    biased = SamplingParams(temperature=0, repetition_penalty=2.0, logit_bias={1: 1.0})
    assert sample(values, biased, 0, [1]).token == 1
    assert sample(values, GREEDY, 0, [1, 99, -5]).token == 1  # ids beyond the vocabulary weigh nothing
    penalised = SamplingParams(temperature=0, presence_penalty=0.6)
    assert sample(values, penalised, 0, [99, -3]).token == 1


def test_the_draw_depends_on_seed_and_position_alone() -> None:
    params = SamplingParams(seed=5)
    first = [sample(LARGE, params, p, [1, 2]).token for p in range(12)]
    assert first == [sample(LARGE, params, p).token for p in reversed(range(12))][::-1]
    assert first != [sample(LARGE, SamplingParams(seed=6), p).token for p in range(12)]
    assert len(set(first)) > 6
    assert SamplingParams().seed != SamplingParams().seed


def test_the_random_numbers_are_fixed_for_ever() -> None:
    # A change here would make every stored seed give another text.
    assert uniform(0, 0) == 0.7542787996446465
    assert uniform(-1, 2**40) == 0.587246171551758
    numbers = [uniform(1, p) for p in range(2000)]
    assert all(0 <= u < 1 for u in numbers) and abs(sum(numbers) / 2000 - 0.5) < 0.02


def test_log_probabilities_are_of_the_raw_logits_with_ties_by_id() -> None:
    values = logits(1, 3, 3, 2)
    sampled = sample(values, SamplingParams(temperature=0, logit_bias={0: 100}, logprobs=3), 0)
    norm = math.log(sum(math.exp(v) for v in values))
    assert sampled.token == 0 and sampled.logprob == pytest.approx(1 - norm)
    assert [i for i, _ in sampled.top] == [1, 2, 3]
    assert [p for _, p in sampled.top] == pytest.approx([3 - norm, 3 - norm, 2 - norm])
    assert sample(values, SamplingParams(logprobs=0), 0).top == []
    assert sample(values, SamplingParams(), 0).logprob is None
    assert len(sample(values, SamplingParams(logprobs=1000), 0).top) == 4
    large = sample(LARGE, SamplingParams(temperature=0, logprobs=20), 0)
    assert [i for i, _ in large.top] == np.argsort(-LARGE, kind="stable")[:20].tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(logprobs=1)], ids=["greedy", "draw", "lp"])
def test_garbage_is_refused_by_its_place(bad: float, params: SamplingParams) -> None:
    with pytest.raises(CheckFailed, match="token 2: expected a finite number") as e:
        sample(logits(1, 2, bad, 4, bad), params, 0)
    assert (e.value.code, e.value.http_status) == ("bad-activation", 422)


def test_the_largest_numbers_are_no_garbage() -> None:
    big = float(np.finfo(np.float32).max)
    assert sample(logits(-big, big, big), GREEDY, 0).token == 1
    assert reachable(logits(-big, big, big), SamplingParams()) == {1, 2}
    assert reachable(logits(-big, big, big), SamplingParams(temperature=0.01, repetition_penalty=10), [1, 2]) == {1, 2}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, 101, "hot", True, None]),
        ("top_k", [-1, 1.0, 1 << 40, True, "4", None]),
        ("top_p", [0, -1, 2, 1.0001, math.nan, "1", None]),
        ("min_p", [-0.1, 1.1, math.nan, []]),
        ("repetition_penalty", [0, -1, 11, math.nan]),
        ("presence_penalty", [-2.1, 2.1, math.nan, "0"]),
        ("frequency_penalty", [-2.1, 2.1, 10**400]),
        ("seed", [1 << 70, -(1 << 63) - 1, 1.5, "0", True, 10**5000]),
        ("logprobs", [-1, 1025, 1.0, True]),
        ("logit_bias", [[], {"x": 1}, {-1: 1}, {1.0: 1}, {True: 1}, {1: 101}, {1: "a"}, {1: math.nan}, {1 << 40: 1}]),
        ("logit_bias", [dict.fromkeys(range(1025), 0.0), {"1" * 12: 1}, {"١": 1}, None]),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError) as e:
            SamplingParams(**{field: value})
        assert (e.value.param, e.value.code, e.value.status) == (field, "bad-parameter", 400)
        assert e.value.message.startswith(f"{field}: expected ") and len(e.value.message) < 200


def test_the_ends_of_the_ranges_are_allowed() -> None:
    SamplingParams(temperature=100, top_k=(1 << 31) - 1, top_p=1, min_p=1, repetition_penalty=10, logprobs=1024)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, seed=(1 << 64) - 1)
    assert SamplingParams(logit_bias={"12": -100, 3: 100}).logit_bias == {12: -100.0, 3: 100.0}


def test_a_bias_for_what_is_no_token_is_refused() -> None:
    with pytest.raises(RequestError, match="token id 4: expected 0 <= id < 4") as e:
        sample(logits(1, 2, 3, 4), SamplingParams(logit_bias={4: 1}), 0)
    assert e.value.param == "logit_bias"
