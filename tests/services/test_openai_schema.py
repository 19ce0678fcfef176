"""Requests: what can be run passes, whatever else is refused with the name of the field, and nothing is ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knotctl.core.errors import RequestError
from knotctl.services.openai_schema import COMPLETION_TOKENS, parse_body, parse_chat, parse_completion
from knotctl.services.replies import error_document

VOCAB = 1000
HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> Any:
    return parse_chat({"model": "m", "messages": HELLO} | fields, VOCAB)


def completion(**fields: Any) -> Any:
    return parse_completion({"model": "m", "prompt": "hello"} | fields, VOCAB)


CHAT_REFUSED = [
    # field, value, code, param (the field itself where None)
    ("model", None, "missing_required_parameter", None),
    ("model", 5, "invalid_type", None),
    ("messages", None, "missing_required_parameter", None),
    ("messages", "hello", "invalid_type", None),
    ("messages", [], "invalid_value", None),
    ("messages", HELLO * 2049, "invalid_value", None),
    ("messages", ["hello"], "invalid_type", "messages[0]"),
    ("messages", [{"content": "a"}], "invalid_value", "messages[0].role"),
    ("messages", [{"role": "wizard", "content": "a"}], "invalid_value", "messages[0].role"),
    ("messages", [{"role": ["user"], "content": "a"}], "invalid_value", "messages[0].role"),
    ("messages", [{"role": "tool", "content": "a"}], "unsupported_value", "messages[0].role"),
    ("messages", [*HELLO, {"role": "assistant", "tool_calls": [{}]}], "unsupported_value", "messages[1].role"),
    ("messages", [{"role": "user"}], "invalid_type", "messages[0].content"),
    ("messages", [{"role": "user", "content": None}], "invalid_type", "messages[0].content"),
    ("messages", [{"role": "user", "content": 5}], "invalid_type", "messages[0].content"),
    ("messages", [{"role": "user", "content": []}], "invalid_type", "messages[0].content"),
    ("messages", [{"role": "user", "content": ["a"]}], "unsupported_value", "messages[0].content[0]"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
        "unsupported_value",
        "messages[0].content[1]",
    ),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "invalid_type", "messages[0].content[0].text"),
    ("messages", [{"role": "user", "content": "a", "name": 5}], "invalid_type", "messages[0].name"),
    ("messages", [{"role": "user", "content": "a", "cache": 1}], "unknown_parameter", "messages[0].cache"),
    *[("max_tokens", v, "invalid_value", None) for v in (-1, 0)],
    *[("max_tokens", v, "invalid_type", None) for v in (1.5, True, "5", [])],
    *[("max_completion_tokens", v, "invalid_value", None) for v in (-1, 0)],
    *[("n", v, "unsupported_parameter", None) for v in (0, 2, 1_000_000, True, 1.0, "1")],
    *[("temperature", v, "invalid_value", None) for v in (-1, 2.001, 1e300)],
    *[("temperature", v, "invalid_type", None) for v in ("hot", True, [])],
    *[("top_p", v, "invalid_value", None) for v in (0, 2, -0.1)],
    *[("min_p", v, "invalid_value", None) for v in (-0.1, 1.1)],
    *[("top_k", v, "invalid_value", None) for v in (-1, 1 << 40)],
    ("top_k", 1.0, "invalid_type", None),
    *[("repetition_penalty", v, "invalid_value", None) for v in (0, 3)],
    *[("presence_penalty", v, "invalid_value", None) for v in (-2.1, 2.1)],
    *[("frequency_penalty", v, "invalid_value", None) for v in (-2.1, 2.1)],
    ("seed", 1 << 63, "invalid_value", None),
    ("seed", 1.0, "invalid_type", None),
    *[("stop", v, "invalid_value", None) for v in ("", ["a", ""], ["a"] * 5, "a" * 10_240)],
    *[("stop", v, "invalid_type", None) for v in (5, [5], {"a": 1}, True)],
    *[("stream", v, "invalid_type", None) for v in (1, "true")],
    ("stream_options", {"include_usage": True}, "invalid_value", None),
    ("stream_options", "usage", "invalid_type", None),
    ("logprobs", 1, "invalid_type", None),
    ("top_logprobs", 1, "invalid_value", None),
    *[("logit_bias", v, "invalid_value", None) for v in ({"1000": 1}, {"-1": 1}, {"a": 1}, {"1": 101}, {"1": "x"})],
    ("logit_bias", {"٣": 1}, "invalid_value", None),
    ("logit_bias", {str(i): 1 for i in range(301)}, "invalid_value", None),
    ("logit_bias", [1], "invalid_type", None),
    ("tools", [{"type": "function"}], "unsupported_parameter", None),
    ("tool_choice", "required", "unsupported_parameter", None),
    ("functions", [{}], "unsupported_parameter", None),
    ("response_format", {"type": "json_object"}, "unsupported_parameter", None),
    ("response_format", {"type": "text", "x": 1}, "unsupported_parameter", None),
    ("grammar", "root ::= x", "unsupported_parameter", None),
    ("modalities", ["audio"], "unsupported_parameter", None),
    ("prediction", {}, "unsupported_parameter", None),
    ("store", True, "unsupported_parameter", None),
    ("store", 0, "unsupported_parameter", None),
    ("chat_template_kwargs", {"tokenize": True}, "unknown_parameter", None),
    ("bogus\x1b[31m", 1, "unknown_parameter", "bogus\\x1b[31m"),
]


@pytest.mark.parametrize(("field", "value", "code", "param"), CHAT_REFUSED)
def test_refused_with_the_field_s_name(field: str, value: Any, code: str, param: str | None) -> None:
    with pytest.raises(RequestError) as e:
        chat(**{field: value})
    assert (e.value.code, e.value.param, e.value.status) == (code, param or field, 400)
    document = error_document("/v1/chat/completions", e.value)["error"]
    assert document["type"] == "invalid_request_error"
    assert document["message"].isprintable()
    assert len(document["message"]) < 400


CHAT_ACCEPTED = [
    {"n": 1},
    {"max_tokens": 1_000_000_000},
    {"max_tokens": 5, "max_completion_tokens": 5},
    {"temperature": 0},
    {"temperature": 2},
    {"top_p": 1, "min_p": 1.0},
    {"top_k": 0},
    {"seed": -(1 << 63)},
    {"stop": []},
    {"stop": ["a", "b", "c", "d"]},
    {"stop": "a" * 256},
    {"logit_bias": {}},
    {"logit_bias": {"999": -100, "0": 100.0}},
    {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False},
    {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto"},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"logprobs": False},
    dict.fromkeys(("tools", "n", "stop", "temperature", "logit_bias", "bogus", "stream", "max_tokens", "seed")),
]


@pytest.mark.parametrize("fields", CHAT_ACCEPTED)
def test_the_almost_same_and_valid_passes(fields: dict[str, Any]) -> None:
    assert chat(**fields).messages == HELLO


def test_max_tokens_of_two_minds_is_refused() -> None:
    with pytest.raises(RequestError, match="max_completion_tokens"):
        chat(max_tokens=5, max_completion_tokens=6)


def test_fields_reach_the_sampler() -> None:
    request = chat(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=-1,
        frequency_penalty=1, logit_bias={"3": -1}, seed=9, logprobs=True, top_logprobs=4, stop="x", max_tokens=3,
    )  # fmt: skip
    p = request.params
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty) == (0.5, 7, 0.9, 0.1, 1.1)
    assert (p.presence_penalty, p.frequency_penalty, dict(p.logit_bias), p.seed, p.logprobs) == (-1, 1, {3: -1}, 9, 4)
    assert (request.stops, request.max_tokens, request.logprobs) == (("x",), 3, 4)


def test_defaults_are_openai_s() -> None:
    p = chat().params
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty, p.logprobs) == (1, 0, 1, 0, 1, None)
    assert chat().max_tokens is None
    assert completion().max_tokens == COMPLETION_TOKENS
    assert chat().params.seed != chat().params.seed


def test_content_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": parts, "name": "n", "tool_calls": []}, *HELLO])
    assert request.messages == [{"role": "system", "content": "ab", "name": "n"}, *HELLO]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("", ""), ("a", "a"), (["a"], "a"), ([1, 999], [1, 999]), ([[1]], [1])],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (None, "missing_required_parameter"),
        (5, "invalid_type"),
        ([], "invalid_type"),
        ([[]], "invalid_type"),
        (["a", "b"], "unsupported_value"),
        ([[1], [2]], "unsupported_value"),
        ([1, "a"], "invalid_type"),
        ([1, True], "invalid_type"),
        ([1.0], "invalid_type"),
        ([1000], "invalid_value"),
        ([-1], "invalid_value"),
        ([1 << 40], "invalid_value"),
    ],
)
def test_prompts_refused(prompt: Any, code: str) -> None:
    with pytest.raises(RequestError) as e:
        completion(prompt=prompt)
    assert (e.value.code, e.value.param) == (code, "prompt")


@pytest.mark.parametrize(
    ("field", "value"),
    [("echo", True), ("suffix", "x"), ("best_of", 2), ("logprobs", 21), ("logprobs", True), ("messages", HELLO)],
)
def test_what_completions_do_not_take(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as e:
        completion(**{field: value})
    assert e.value.param == field


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"{}", "text/plain"),
        (b"{}", ""),
        (b"{}", "application/x-www-form-urlencoded"),
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b"null", "application/json"),
        (b'{"a":1,"a":2}', "application/json"),
        (b'{"a":NaN}', "application/json"),
        (b'{"a":"\\ud800"}', "application/json"),
        (b'{"seed":1180591620717411303424}', "application/json"),
        (b'{"a":"\xff"}', "application/json"),
        (b"[" * 100_000, "application/json"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, content_type: str) -> None:
    with pytest.raises(RequestError) as e:
        parse_body(body, content_type)
    assert e.value.status == 400


def test_a_content_type_may_have_parameters() -> None:
    assert parse_body(b"{}", "Application/JSON; charset=utf-8") == {}


TEXT = st.text("ab \0é😀", max_size=4)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({field for field, *_ in CHAT_REFUSED} | {"prompt", "echo", "role"})


@given(st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=5))
def test_any_document_gives_a_request_or_our_error(fields: dict[str, Any]) -> None:
    for make in (chat, completion):
        try:
            make(**fields)
        except RequestError as e:
            json.dumps(error_document("/v1", e)).encode()
