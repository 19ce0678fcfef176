"""Text out of steps: pieces join to the whole, characters stay whole, stops cut exactly, logprobs follow the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knotctl.core.engine.stream import Step
from knotctl.core.knot.reader import open_knot
from knotctl.core.tokens.tokenizer import Tokenizer, load_tokenizer
from knotctl.services.openai_events import ReplyFormat
from knotctl.services.text import Delta, TextAssembler


@pytest.fixture(scope="module")
def tokenizer(tiny_knot: Path) -> Tokenizer:
    with open_knot(str(tiny_knot)) as knot:
        return load_tokenizer(knot.tokenizer_keys())


def assemble(tokenizer: Tokenizer, ids: list[int], stops: list[str], *, logprobs: bool = False) -> list[Delta]:
    assembler = TextAssembler(tokenizer, stops)
    deltas = []
    for token in ids:
        top = [(token, -0.5), (0, -1.5)] if logprobs else []
        deltas.append(assembler.push(Step(token, -0.5 if logprobs else None, top)))
        if assembler.stopped:
            return deltas
    return [*deltas, assembler.finish()]


def text_of(deltas: list[Delta]) -> str:
    return "".join(d.text for d in deltas)


IDS = st.lists(st.integers(0, 399), max_size=30)


@given(ids=IDS)
def test_pieces_join_to_the_decoded_whole(tokenizer: Tokenizer, ids: list[int]) -> None:
    deltas = assemble(tokenizer, ids, [])
    assert text_of(deltas) == tokenizer.decode(ids)
    assert "\ufffd" not in text_of(deltas[:-1]) or "\ufffd" in tokenizer.decode(ids)


@given(ids=IDS, data=st.data())
def test_a_stop_cuts_exactly_and_never_leaks(tokenizer: Tokenizer, ids: list[int], data: st.DataObject) -> None:
    whole = tokenizer.decode(ids)
    pieces = [whole[a : a + n] for a in range(len(whole)) for n in (1, 2, 5)] or ["x"]
    stop = data.draw(st.sampled_from(pieces))
    cut = whole.find(stop)
    text = text_of(assemble(tokenizer, ids, [stop], logprobs=True))
    assert text == (whole if cut < 0 else whole[:cut])


@given(ids=IDS)
def test_each_token_s_logprob_comes_once_and_with_its_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    deltas = assemble(tokenizer, ids, [], logprobs=True)
    tokens = [t for d in deltas for t in d.tokens]
    assert b"".join(t.data for t in tokens) == b"".join(tokenizer.token_bytes(i, special=True) for i in ids)
    given_so_far = 0
    for delta in deltas:
        given_so_far += len(delta.text)
        # The last delta holds what has no text of its own.
        assert all(t.offset < given_so_far or delta is deltas[-1] for t in delta.tokens)


def test_an_emoji_cut_by_max_tokens_ends_in_one_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀")
    assert len(ids) > 3
    for end in range(2, len(ids)):
        deltas = assemble(tokenizer, ids[:end], [])
        assert text_of(deltas) == "a\ufffd" == tokenizer.decode(ids[:end])
        assert text_of(deltas[:-1]) == "a"


def test_tokens_after_a_stop_have_no_logprobs(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world")
    deltas = assemble(tokenizer, ids, ["world"], logprobs=True)
    tokens = [t for d in deltas for t in d.tokens]
    assert text_of(deltas) == "hello "
    assert all(t.offset < len("hello ") for t in tokens)
    assert tokens


def test_logprobs_in_openai_s_shapes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")[:1]
    deltas = assemble(tokenizer, ids, [], logprobs=True)
    used = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    chat = ReplyFormat(True, "m", "00" * 16, logprobs=True).whole(deltas, "length", used)["choices"][0]["logprobs"]
    entry = chat["content"][0]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("\\xc3", [0xC3], -0.5)
    assert [t["logprob"] for t in entry["top_logprobs"]] == [-0.5, -1.5]
    plain = ReplyFormat(False, "m", "00" * 16, logprobs=True).whole(deltas, "length", used)["choices"][0]["logprobs"]
    assert (plain["tokens"], plain["token_logprobs"], plain["text_offset"]) == (["\\xc3"], [-0.5], [0])
    none = ReplyFormat(True, "m", "00" * 16, logprobs=False).whole(deltas, "length", used)["choices"][0]
    assert none["logprobs"] is None
