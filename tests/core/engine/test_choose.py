"""What a tail is asked and answers survives the wire, and what is no such thing is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knotctl.core.engine.choose import Ask, choose_all, parse_asks, parse_sampled, sampled_frame, wanted_rows
from knotctl.core.errors import FrameError, KnotctlError, UsageError
from knotctl.core.tokens.sampler import Sampled, SamplingParams
from knotctl.core.wire.frame import Frame, Segment, encode_frame, parse_frame
from knotctl.core.wire.layout import Kind

VOCAB = 40
SEGMENTS = (Segment(b"a" * 16, 3, 6), Segment(b"b" * 16, 0, 5))
FRAME = Frame(Kind.HIDDEN, bytes(16), SEGMENTS, np.zeros((11, 4), np.float32))

ids = st.integers(0, VOCAB - 1)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    top_k=st.integers(0, 9),
    top_p=st.floats(0.1, 1.0),
    min_p=st.floats(0.0, 0.5),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    logit_bias=st.dictionaries(st.integers(0, 29), st.floats(-100, 100), max_size=3),
    seed=st.integers(-(1 << 63), (1 << 64) - 1),
    logprobs=st.none() | st.integers(0, 5),
)
history = st.lists(ids, max_size=9)
asks = st.tuples(
    st.builds(Ask, st.just(0), st.integers(0, 99), st.just(VOCAB), params, st.lists(ids, max_size=5), history),
    st.builds(Ask, st.just(1), st.integers(0, 99), st.just(30), params, st.lists(ids, max_size=4), history),
)  # fmt: skip


@given(asks, st.integers(0, 1 << 30))
def test_a_tail_across_the_wire_chooses_what_this_process_would(asked: tuple[Ask, ...], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (sum(a.rows for a in asked), VOCAB)).astype(np.float32)
    here = choose_all(logits, asked)
    sent = parse_frame(encode_frame(replace(FRAME, meta={"sample": [a.to_json() for a in asked]})))
    there = parse_asks(sent)
    assert there is not None
    assert wanted_rows(there) == wanted_rows(asked)
    answer = parse_frame(encode_frame(sampled_frame(sent, choose_all(logits, there), there)))
    got = parse_sampled(answer, asked, SEGMENTS)
    as_lists = [[Sampled(c.token, c.logprob, [tuple(t) for t in c.top]) for c in tokens] for tokens in got]  # type: ignore[union-attr,misc]
    assert as_lists == here
    assert all(c.token < 30 for c in here[1])  # type: ignore[union-attr]


def plain(**changes: Any) -> Ask:
    return Ask(**({"segment": 0, "position": 9, "choices": VOCAB, "params": SamplingParams(seed=1)} | changes))


@pytest.mark.parametrize(
    "sample",
    [
        "all", [7], [{}], [plain().to_json() | {"segment": 2}], [plain().to_json() | {"segment": -1}],
        [plain().to_json() | {"position": -1}], [plain().to_json() | {"choices": 0}],
        [plain().to_json() | {"params": {}}], [plain().to_json() | {"params": {"seed": 1, "stop": "x"}}],
        [plain().to_json() | {"draft": [1] * 6}], [plain().to_json() | {"draft": [-1]}],
        [plain().to_json() | {"history": "x"}], [plain().to_json() | {"draft": [True]}],
    ],
    ids=lambda s: json.dumps(s)[:50],
)  # fmt: skip
def test_what_asks_for_nothing_sensible_is_refused(sample: Any) -> None:
    with pytest.raises(UsageError) as e:
        parse_asks(replace(FRAME, meta={"sample": sample}))
    assert e.value.code == "bad-sample"


def test_parameters_out_of_their_ranges_are_refused_by_name() -> None:
    entry = plain().to_json()
    entry["params"]["temperature"] = -1
    with pytest.raises(UsageError) as e:
        parse_asks(replace(FRAME, meta={"sample": [entry]}))
    assert e.value.code == "bad-parameter"


def test_one_ask_that_fails_takes_no_other_with_it() -> None:
    asked = [plain(params=SamplingParams(seed=1, logit_bias={99: 1.0})), plain(segment=1)]
    logits = np.zeros((2, VOCAB), np.float32)
    answer = sampled_frame(FRAME, choose_all(logits, asked), asked)
    bad, good = parse_sampled(parse_frame(encode_frame(answer)), asked, SEGMENTS)
    assert isinstance(bad, KnotctlError)
    assert bad.code == "bad-token-id"
    assert isinstance(good, list)
    with pytest.raises(KnotctlError):
        sampled_frame(FRAME, choose_all(logits, asked[:1]), asked[:1])


def test_an_answer_to_something_else_is_refused() -> None:
    asked = [plain(draft=[4, 5])]
    right = Frame(Kind.SAMPLED, bytes(16), (Segment(b"a" * 16, 9, 2),), np.asarray([[4], [7]], np.int32))
    assert [c.token for c in parse_sampled(right, asked, SEGMENTS)[0]] == [4, 7]  # type: ignore[union-attr]
    for wrong in (
        replace(right, segments=(Segment(b"b" * 16, 9, 2),)),
        replace(right, segments=(Segment(b"a" * 16, 8, 2),)),
        replace(right, payload=np.asarray([[4], [VOCAB]], np.int32)),
        replace(right, payload=np.asarray([[7], [7]], np.int32)),  # the draft was wrong at once: one token follows
        replace(right, segments=(Segment(b"a" * 16, 9, 1),), payload=np.asarray([[4]], np.int32)),
        replace(right, segments=(right.segments[0], SEGMENTS[1]), payload=np.zeros((7, 1), np.int32)),
        replace(right, meta={"logprobs": [[0.5, []]]}),
        replace(right, meta={"logprobs": [[0.5, []], ["x", []]]}),
        replace(right, meta={"failed": [[3, "a", "b"]]}),
    ):  # fmt: skip
        with pytest.raises(FrameError) as e:
            parse_sampled(wrong, asked, SEGMENTS)
        assert e.value.code == "bad-answer"
