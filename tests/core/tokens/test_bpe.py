"""Byte-level BPE gives the ids of the slow oracle, on any text, and text comes back from them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_oracles import WORDS, bpe
from small_vocabularies import CONTROL, MERGES, NORMAL, bpe_keys

from knotctl.core.errors import ModelError
from knotctl.core.tokens.bpe import STAND_INS
from knotctl.core.tokens.pretokenizers import PRETOKENIZERS
from knotctl.core.tokens.tokenizer import load_tokenizer

# Of each kind that a pattern tells apart, and those that Unicode tables disagree on most easily.
ALPHABET = (
    "aAhelowrd'sStTreVmlLDd 123½١Ⅷ日本éßªʰ\t\n\r\v\f\x85\xa0\u2003\u2028\u3000\u200d\u0301!?$+<|>_-.,`´€🤖\x00\x7f"
)
TOKENIZERS = {name: load_tokenizer(bpe_keys(name)) for name in PRETOKENIZERS}
TEXTS = st.text(st.one_of(st.sampled_from(ALPHABET), st.characters(codec="utf-8")), max_size=60)


@pytest.mark.parametrize("pre", WORDS)
@given(text=st.text(st.sampled_from(ALPHABET), max_size=60))
@settings(max_examples=150, deadline=None)
def test_ids_equal_the_slow_oracle(pre: str, text: str) -> None:
    text = text.replace("\t\t", "")  # a user-defined token, which the oracle knows nothing of
    tokens = bpe_keys()["tokenizer.ggml.tokens"]
    assert TOKENIZERS[pre].encode(text) == bpe(text, pre, tokens, MERGES, STAND_INS)


@pytest.mark.parametrize("pre", PRETOKENIZERS)
@given(text=TEXTS)
@settings(max_examples=25, deadline=None)
def test_text_comes_back_whatever_cuts_it(pre: str, text: str) -> None:
    assert TOKENIZERS[pre].decode(TOKENIZERS[pre].encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("qwen2", "I'M 1234", ["I", "'M", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "I'M 1234", ["I", "'M", " ", "123", "4"]),
        ("gpt-2", "I'M 1234", ["I", "'", "M", " 1234"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("default", "a+=12345 b", ["a", "+=", "123", "45", " b"]),
        ("falcon", "a`b", ["a", "`", "b"]),
        ("qwen35", "e\u0301a", ["e\u0301a"]),
        ("qwen2", "e\u0301a", ["e", "\u0301a"]),
        ("deepseek-coder", "日本a\n 1", ["日本", "a", "\n", " ", "1"]),
        ("deepseek-v3", "日本a 1234\n", ["日本", "a", " ", "123", "4", "\n"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's", ["Hello", "World's"]),
        ("seed-coder", "a!!\n\nb", ["a", "!!", "\n\n", "b"]),
        ("qwen2", "a!!\n\nb", ["a", "!!\n\n", "b"]),
    ],
)  # fmt: skip
def test_words_are_cut_as_each_model_cuts_them(pre: str, text: str, words: list[str]) -> None:
    pipeline = TOKENIZERS[pre]._encoder._encoder.pre_tokenizer  # type: ignore[attr-defined]
    spelt = [word for word, _ in pipeline.pre_tokenize_str(text)]
    assert spelt == ["".join(STAND_INS[b] for b in word.encode()) for word in words]


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"expected one of .*qwen2.*; found kimi-k2") as e:
        load_tokenizer(bpe_keys("kimi-k2"))
    assert e.value.code == "unsupported-pre-tokenizer"
    assert load_tokenizer(bpe_keys(pre=None)).encode("a+=1") == TOKENIZERS["default"].encode("a+=1")  # type: ignore[arg-type]


def test_a_word_that_is_a_token_skips_the_merges_where_the_model_says_so() -> None:
    # no merge leads to "xyz"; Llama 3 knows it as a whole word all the same
    keys = bpe_keys("llama-bpe")
    tokens = [*keys["tokenizer.ggml.tokens"], "xyz"]
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [*keys["tokenizer.ggml.token_type"], NORMAL]}
    assert load_tokenizer(keys).encode("xyz") == [tokens.index("xyz")]
    assert len(load_tokenizer(keys | {"tokenizer.ggml.pre": "dbrx"}).encode("xyz")) == 3


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_no_plain_text_becomes_a_control_token(pre: str) -> None:
    # a control token that is a word, and one that a merge makes
    keys = bpe_keys(pre)
    tokens = [*keys["tokenizer.ggml.tokens"], "stop", "aa!!"]
    kinds = [*keys["tokenizer.ggml.token_type"], CONTROL, CONTROL]
    merges = [*MERGES, "aa !!"]
    tokenizer = load_tokenizer(
        keys | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": merges}
    )
    for text in ("stop", "aa!!", "<|im_end|>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and not {tokens[i] for i in ids} & {"stop", "aa!!", "<|im_end|>"}
        assert tokenizer.encode(text, special=True) == [tokens.index(text)]


def test_bytes_without_a_token_are_left_out_and_part_their_neighbours() -> None:
    keys = bpe_keys()
    tokens = [t if t != STAND_INS[4] else "[gone]" for t in keys["tokenizer.ggml.tokens"]]
    tokenizer = load_tokenizer(keys | {"tokenizer.ggml.tokens": tokens})
    assert tokenizer.encode("!\x04!") == [tokens.index("!")] * 2  # and not "!!"
    assert tokenizer.encode("!!") == [tokens.index("!!")]


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        (["h e", "he"], "merge 1: expected two parts"),
        (["h e", "he "], "merge 1: expected two parts"),
        (["h e", "he xx"], "merge 1: 'xx' is no token"),
        (["w o"], "merge 0: 'wo' is no token"),
        (["h e", 3], "expected str entries, found int"),
        ("h e", "expected list, found str"),
        (None, "expected the list of merges, found none"),
    ],
)
def test_broken_merges_are_named(merges: object, message: str) -> None:
    with pytest.raises(ModelError, match=message) as e:
        load_tokenizer(bpe_keys(merges=merges))
    assert e.value.code == "bad-tokenizer"
