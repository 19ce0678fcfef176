from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from knotctl.core.engine.session import Engine, EngineSpec
from knotctl.core.engine.speculate import FIRST_DRAFT, MAX_DRAFT, Drafter
from knotctl.core.tokens.sampler import SamplingParams


def test_a_draft_is_what_followed_the_last_tokens_before() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    assert Drafter().draft(text, 8) == [4, 5, 6][:FIRST_DRAFT]
    assert Drafter().draft(text, 2) == [4, 5]
    assert Drafter().draft(text, 0) == []
    assert Drafter().draft(text, -1) == []
    assert Drafter().draft([1, 2, 3, 4], 8) == []


def test_the_longer_match_wins_and_the_later_one() -> None:
    assert Drafter().draft([9, 2, 3, 50, 1, 2, 3, 60, 8, 2, 3, 70, 1, 2, 3], 1) == [60]
    assert Drafter().draft([1, 2, 3, 60, 1, 2, 3, 61, 0, 1, 2, 3], 1) == [61]


def test_drafts_grow_while_they_are_right_and_rest_when_they_are_wrong() -> None:
    d, text = Drafter(), list(range(40)) * 2
    assert len(d.draft(text, 99)) == FIRST_DRAFT
    for _ in range(4):
        d.learn(3, 3)
    assert len(d.draft(text, 99)) == MAX_DRAFT
    d.learn(15, 0)
    assert d.draft(text, 99) == []
    assert len(d.draft(text, 99)) == FIRST_DRAFT
    d.learn(3, 0)
    assert [len(d.draft(text, 99)) for _ in range(3)] == [0, 0, FIRST_DRAFT]
    assert (d.drafted, d.accepted) == (30, 12)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, seed=0, logprobs=2),
        # a low temperature repeats itself often enough for drafts, and still draws
        SamplingParams(temperature=0.3, seed=5),
        SamplingParams(temperature=0.0, seed=0, frequency_penalty=0.5),
    ],
    ids=["greedy", "sampled", "penalised"],
)
def test_the_output_is_the_same_with_and_without_drafts(tiny: Callable[[str], Path], params: SamplingParams) -> None:
    path = str(tiny("tiny-llama"))
    prompt = [5, 17, 200, 3, 44, 91, 5, 17, 200, 3, 44, 91, 5, 17]
    with Engine.open(path, EngineSpec(speculate=False, context=512)) as plain:
        expected = [list(plain.submit(prompt, params, n, ignore_stop=True)) for n in (1, 2, 120)]
    with Engine.open(path, EngineSpec(context=512, stations=2)) as drafting:
        streams = [drafting.submit(prompt, params, n, ignore_stop=True) for n in (1, 2, 120)]
        assert [list(s) for s in streams] == expected
        assert drafting.stats()["kv_bytes"] == 0
    assert streams[2].drafter.drafted > 0
