"""Text comes out of ids whole and once: characters are not split, stops are cut exactly, however it is divided."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocabularies import bpe_keys, spm_keys

from knotctl.core.errors import RequestError
from knotctl.core.tokens.detokenize import Detokenizer, StopMatcher
from knotctl.core.tokens.tokenizer import Tokenizer, load_tokenizer

BPE = load_tokenizer(bpe_keys())
SPM = load_tokenizer(spm_keys())


def byte(b: int) -> int:
    """The token of a byte: the vocabulary holds them after five special ones."""
    return 5 + b


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_the_pieces_joined_are_the_decoded_ids_whatever_they_are(tokenizer: Tokenizer, data: st.DataObject) -> None:
    # bytes of UTF-8's every role are likelier than words, so that characters break in all ways
    tricky = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    ids = data.draw(st.lists(st.one_of(st.sampled_from(tricky), st.integers(0, tokenizer.vocab_size - 1)), max_size=20))
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["é", "日", "🤖", "a🤖日é", "👩\u200d👧"])
def test_a_character_comes_when_its_last_byte_does(text: str) -> None:
    detokenizer = Detokenizer(SPM)
    pieces = [detokenizer.push(byte(b)) for b in text.encode()]
    assert [p for p in pieces if p] == list(text) and detokenizer.flush() == ""


def test_a_broken_character_is_replaced_once_it_is_certain() -> None:
    detokenizer = Detokenizer(SPM)
    assert [detokenizer.push(byte(b)) for b in (0xE6, 0x97)] == ["", ""]
    assert detokenizer.push(byte(0x41)) == "\ufffdA"  # the byte after it proves it
    assert detokenizer.push(byte(0xFF)) == "\ufffd"  # no byte could mend it
    assert detokenizer.push(byte(0xF0)) == "" and detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == "" and detokenizer.push(byte(0x42)) == "B"


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What is said before the first stop to be complete, read character by character."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text(st.sampled_from("ab日\n"), min_size=1, max_size=5), max_size=4)


@given(pieces=st.lists(st.text(st.sampled_from("ab日\n"), max_size=4), max_size=12), stops=STOPS)
@settings(max_examples=800, deadline=None)
def test_the_cut_does_not_depend_on_the_division(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    said = "".join(map(matcher.push, pieces))
    text, stop = expected("".join(pieces), stops)
    assert matcher.stopped == stop
    assert said + matcher.flush() == text
    assert matcher.push("more") == ("" if stop else "more")


@given(text=st.text(st.sampled_from("ab"), max_size=20), stops=STOPS)
@settings(max_examples=300, deadline=None)
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    said = matcher.push(text)
    if matcher.stopped is None:
        held = text[len(said) :]
        proper = {s[:n] for s in stops for n in range(1, len(s))}
        assert held == max((p for p in proper if text.endswith(p)), key=len, default="")


def test_a_stop_that_overlaps_itself_and_one_within_another() -> None:
    assert [StopMatcher(["aab"]).push("aaab"), StopMatcher(["abcd", "bc"]).push("xabcd")] == ["a", "xa"]
    assert StopMatcher(["bc", "abc"]).push("abc") == ""  # complete at once: the longest counts


def test_a_long_stop_costs_no_more_than_its_text() -> None:
    matcher = StopMatcher(["a" * 10_000 + "b"])
    said = "".join(matcher.push("a") for _ in range(12_000))
    assert len(said) == 2_000 and len(matcher.flush()) == 10_000


@pytest.mark.parametrize(
    ("stops", "message"),
    [([""], "found an empty one"), (["a"] * 5, "at most 4, found 5"), (["\ud800"], "lone surrogate")],
)
def test_stops_that_make_no_sense_are_refused(stops: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message) as e:
        StopMatcher(stops)
    assert e.value.param == "stop"


def test_without_stops_everything_passes() -> None:
    matcher = StopMatcher([])
    assert "".join(map(matcher.push, itertools.repeat("ab", 3))) + matcher.flush() == "ababab"
