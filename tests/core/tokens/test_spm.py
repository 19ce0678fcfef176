"""SentencePiece-style merging gives the ids of the slow oracle, falls back to bytes, and takes any text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_oracles import spm
from small_vocabularies import CONTROL, PIECES, spm_keys

from knotctl.core.errors import ModelError
from knotctl.core.tokens.spm import SPACE
from knotctl.core.tokens.tokenizer import load_tokenizer

PLAIN = load_tokenizer(spm_keys(add_space_prefix=False))
IDS = {t: i for i, t in enumerate(spm_keys()["tokenizer.ggml.tokens"])}


def pieces(text: str) -> list[str]:
    return [PLAIN.name(i) for i in PLAIN.encode(text)]


@given(st.text(st.sampled_from("hellowrdaxy日本é </s>▁🤖\n\x00"), max_size=60))
@settings(max_examples=500, deadline=None)
def test_ids_equal_the_slow_oracle(text: str) -> None:
    text = text.replace("\n\n", "").replace("<b>", "")  # user-defined, which the oracle knows nothing of
    assert PLAIN.encode(text) == spm(text, PIECES, IDS)


@given(st.text(st.characters(codec="utf-8"), max_size=60))
@settings(max_examples=200, deadline=None)
def test_text_comes_back(text: str) -> None:
    assert PLAIN.decode(PLAIN.encode(text)) == text.replace(SPACE, " ")


def test_merges_follow_the_scores_and_the_leftmost_of_equals() -> None:
    assert pieces("hello world") == ["hello", "▁world"]
    assert pieces("    ") == ["▁▁▁▁"]
    assert pieces("aaaaaaa") == ["aaaa", "aaa"]  # equal scores: from the left
    assert pieces("x y") == ["x▁y"]  # a token that reaches over the start of a word
    assert pieces("wx yx") == ["w", "x▁y", "x"]


def test_characters_without_a_token_go_out_as_bytes() -> None:
    assert pieces("日🤖本") == ["日", "<0xF0>", "<0x9F>", "<0xA4>", "<0x96>", "本"]
    assert pieces("\x00\n") == ["<0x00>", "<0x0A>"]


def test_the_spelling_of_a_byte_or_control_token_is_text() -> None:
    assert PLAIN.decode(PLAIN.encode("<0x41></s>")) == "<0x41></s>"
    # "</" + "s>" and "<" + "/s>" would both join to the end of the text
    assert IDS["</s>"] not in PLAIN.encode("</s>")
    assert PLAIN.encode("</s>", special=True) == [IDS["</s>"]]


def test_a_space_goes_before_text_at_the_start_and_after_special_tokens() -> None:
    prefixed = load_tokenizer(spm_keys(add_space_prefix=None))
    names = [prefixed.name(i) for i in prefixed.encode("hello<b>hello<s>hello", special=True)]
    assert names == ["▁hello", "<b>", "▁hello", "<s>", "▁hello"]
    assert PLAIN.encode("hello") == [IDS["hello"]]
    assert prefixed.encode("") == []


def test_without_byte_tokens_the_unknown_token_stands_in() -> None:
    keys = spm_keys(add_space_prefix=False)
    kinds = [1 if k == 6 else k for k in keys["tokenizer.ggml.token_type"]]
    tokenizer = load_tokenizer(keys | {"tokenizer.ggml.token_type": kinds})
    assert tokenizer.encode("🤖") == [IDS["<unk>"]] * 4
    # a byte token that names no byte is none
    odd = ["<0x0G>" if t == "<0x41>" else t for t in keys["tokenizer.ggml.tokens"]]
    assert load_tokenizer(keys | {"tokenizer.ggml.tokens": odd}).encode("A") == [IDS["<unk>"]]
    # an id out of range is as none, also where this kind of model has a default
    keys |= {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.unknown_token_id": 1 << 20}
    with pytest.raises(ModelError, match="<0x00> of kind byte, or an unknown token, found neither"):
        load_tokenizer(keys)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "scores: expected 300 scores, one a token, found none"),
        ({"scores": [1.0]}, "scores: expected 300 scores, one a token, found 1"),
        ({"scores": ["1"] * 300}, "scores: expected float entries, found str"),
        ({"scores": [float("nan")] * 300}, "scores: expected finite scores, found NaN"),
        ({"add_space_prefix": 1}, "add_space_prefix: expected bool, found int"),
    ],
)
def test_broken_keys_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message) as e:
        load_tokenizer(spm_keys(**changes))
    assert e.value.code == "bad-tokenizer"


def test_integer_scores_are_scores() -> None:
    keys = spm_keys(add_space_prefix=False)
    whole = [int(s) for s in keys["tokenizer.ggml.scores"]]
    assert load_tokenizer(keys | {"tokenizer.ggml.scores": whole}).encode("hello") == [IDS["hello"]]


def test_a_control_token_never_takes_part_in_a_merge() -> None:
    keys = spm_keys(add_space_prefix=False)
    kinds = [CONTROL if i == IDS["he"] else k for i, k in enumerate(keys["tokenizer.ggml.token_type"])]
    tokenizer = load_tokenizer(keys | {"tokenizer.ggml.token_type": kinds})
    assert [tokenizer.name(i) for i in tokenizer.encode("hello")] == ["h", "e", "ll", "o"]
