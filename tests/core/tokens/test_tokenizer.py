"""What holds for every tokeniser: special tokens, ids with a role, text that is no text, keys that are no keys."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocabularies import bpe_keys, spm_keys

from knotctl.core.errors import ModelError, RequestError
from knotctl.core.tokens.special import MAX_LENGTH, SpecialMatcher
from knotctl.core.tokens.tokenizer import Tokenizer, load_tokenizer

BPE = load_tokenizer(bpe_keys())
SPM = load_tokenizer(spm_keys())


def ids_of(tokenizer: Tokenizer) -> dict[str, int]:
    return {tokenizer.name(i): i for i in range(tokenizer.vocab_size)}


def test_control_tokens_are_text_unless_asked_for_and_user_defined_ones_never_are() -> None:
    ids = ids_of(BPE)
    text = "<|im_start|>hello<tool>\t\t<|im_end|>"
    special = BPE.encode(text, special=True)
    assert special == [ids[t] for t in ("<|im_start|>", "hello", "<tool>", "\t\t", "<|im_end|>")]
    plain = BPE.encode(text)
    assert [t for t in plain if t in special] == [ids[t] for t in ("hello", "<tool>", "\t\t")]
    assert BPE.decode(plain) == text
    assert BPE.decode(special) == "hello<tool>\t\t" and BPE.decode(special, special=True) == text


def test_a_token_known_by_its_text_is_special_though_the_file_calls_it_normal() -> None:
    ids = ids_of(BPE)
    assert BPE.encode("<|fim_prefix|>", special=True) == [ids["<|fim_prefix|>"]]
    assert ids["<|fim_prefix|>"] not in BPE.encode("<|fim_prefix|>")
    # where a key names the token, its text is not looked for
    by_key = load_tokenizer(bpe_keys(fim_pre_token_id=0))
    assert len(by_key.encode("<|fim_prefix|>", special=True)) > 1


def test_stop_ids_are_those_of_the_keys_and_those_known_by_their_text() -> None:
    ids = ids_of(BPE)
    known = {ids[t] for t in ("<|im_end|>", "<|endoftext|>", "<|fim_pad|>")}
    assert BPE.stop_ids == known
    assert load_tokenizer(bpe_keys(eos_token_id=5)).stop_ids == known | {5}
    assert load_tokenizer(bpe_keys(eot_token_id=7, eom_token_id=8)).stop_ids == known | {7, 8}
    assert load_tokenizer(bpe_keys(fim_pad_token_id=9)).stop_ids == known - {ids["<|fim_pad|>"]} | {9}
    assert load_tokenizer(spm_keys()).stop_ids == {2}
    # of a vocabulary that says nothing, nothing is made up
    assert load_tokenizer(bpe_keys(eos_token_id=None, bos_token_id=None)).eos_id is None


def test_bos_comes_first_where_the_model_asks_and_only_once() -> None:
    assert (SPM.adds_bos, SPM.bos_id, SPM.eos_id) == (True, 1, 2)
    assert SPM.with_bos([9]) == [1, 9] and SPM.with_bos([1, 9]) == [1, 9] and SPM.with_bos([]) == [1]
    assert BPE.with_bos([9]) == [9]
    assert load_tokenizer(bpe_keys("llama-bpe", add_bos_token=None)).adds_bos
    assert not load_tokenizer(bpe_keys("qwen2", add_bos_token=None)).adds_bos
    assert not load_tokenizer(spm_keys(add_bos_token=False)).adds_bos
    with pytest.raises(ModelError, match="bos_token_id: expected an id of the vocabulary"):
        load_tokenizer(bpe_keys(add_bos_token=True, bos_token_id=None))


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
@pytest.mark.parametrize("special", [False, True])
def test_a_lone_surrogate_is_refused_by_its_place(tokenizer: Tokenizer, special: bool) -> None:
    with pytest.raises(RequestError, match=r"character 2: .* lone surrogate U\+D83E") as e:
        tokenizer.encode("ab\ud83e", special=special)
    assert e.value.code == "bad-text" and e.value.status == 400


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
def test_ids_that_are_no_tokens_are_refused(tokenizer: Tokenizer) -> None:
    for token in (-1, tokenizer.vocab_size):
        for use in (tokenizer.token_bytes, tokenizer.piece, tokenizer.name, lambda i: tokenizer.decode([0, i])):
            with pytest.raises(RequestError, match=f"token id {token}: expected 0 <= id < {tokenizer.vocab_size}"):
                use(token)


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
def test_long_and_strange_texts_come_back(tokenizer: Tokenizer) -> None:
    for unit in ("a", " ", "\n", "<|im_", "日本", "\x00", "!", "ab ", "▁x"):
        text = unit * (30_000 // len(unit))
        prefix = " " if tokenizer is SPM and unit != "\n" else ""
        assert tokenizer.decode(tokenizer.encode(text, special=True)) == prefix + text.replace("▁", " ") or (
            tokenizer is BPE and tokenizer.decode(tokenizer.encode(text)) == text
        )


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
@given(st.text(st.sampled_from("hello wrd日a\t<|im_end|>🤖"), max_size=80))
@settings(max_examples=100, deadline=None)
def test_the_least_number_of_tokens_is_no_more_than_there_are(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, special=True))
    assert tokenizer.least_tokens("a" * 10_000) > 10_000 // 20


def test_pieces_show_what_a_token_is() -> None:
    ids = ids_of(BPE)
    assert BPE.piece(ids["Ġwor"]) == " wor"
    assert BPE.piece(ids["æĹ"]) == "\\xe6\\x97"
    assert BPE.piece(ids["<|im_end|>"]) == "<|im_end|>"
    assert (BPE.piece(ids["[PAD0]"]), BPE.token_bytes(ids["[PAD0]"])) == ("", b"")
    assert SPM.piece(ids_of(SPM)["<0x41>"]) == "A"


@pytest.mark.parametrize(
    ("keys", "code", "message"),
    [
        ({}, "unsupported-tokenizer", "expected gpt2 or llama, found None"),
        (bpe_keys(model="bert"), "unsupported-tokenizer", "expected gpt2 or llama, found bert"),
        (bpe_keys(model=3), "bad-tokenizer", "ggml.model: expected str, found int"),
        (bpe_keys(tokens=None), "bad-tokenizer", "expected the list of tokens, found none"),
        (bpe_keys(tokens=[]), "bad-tokenizer", "expected the list of tokens, found none"),
        (bpe_keys(tokens=["a", 1]), "bad-tokenizer", "tokens: expected str entries, found int"),
        (bpe_keys(tokens=["a", "b", "a"], token_type=None, merges=[]), "bad-tokenizer", "tokens 0 and 2 are both 'a'"),
        (bpe_keys(tokens=["a", "\udc80"], token_type=None), "bad-tokenizer", "token 1: .* lone surrogate"),
        (bpe_keys(token_type=[1]), "bad-tokenizer", "token_type: expected 293 entries, one a token, found 1"),
        (bpe_keys(token_type=[True] * 293), "bad-tokenizer", "token_type: expected int entries, found bool"),
        (bpe_keys(bos_token_id="1"), "bad-tokenizer", "bos_token_id: expected int, found str"),
        (bpe_keys(add_bos_token=1), "bad-tokenizer", "add_bos_token: expected bool, found int"),
        ({**bpe_keys(), "tokenizer.chat_template": 7}, "bad-tokenizer", "chat_template: expected str, found int"),
    ],
)
def test_broken_keys_are_named(keys: dict[str, object], code: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as e:
        load_tokenizer(keys)
    assert e.value.code == code


def test_empty_tokens_and_a_vocabulary_without_kinds_load() -> None:
    tokens = [*bpe_keys()["tokenizer.ggml.tokens"], "", ""]
    tokenizer = load_tokenizer(bpe_keys(tokens=tokens, token_type=None))
    assert tokenizer.token_bytes(len(tokens) - 1) == b""
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.stop_ids == BPE.stop_ids


SPECIAL = {"<a>": 0, "<ab>": 1, "<": 2, "xx": 3, "xxxx": 4, "]^-": 5}


@given(st.text(st.sampled_from("<ab>x]^-"), max_size=30))
@settings(max_examples=300, deadline=None)
def test_the_longest_special_token_at_each_place_is_taken_from_the_left(text: str) -> None:
    expected: list[str | int] = []
    i = 0
    while i < len(text):
        found = max((t for t in SPECIAL if text.startswith(t, i)), key=len, default="")
        if found:
            expected.append(SPECIAL[found])
        elif expected and isinstance(expected[-1], str):
            expected[-1] += text[i]
        else:
            expected.append(text[i])
        i += len(found) or 1
    assert SpecialMatcher(SPECIAL).split(text) == expected


@given(st.text(st.sampled_from("<ab>x]^-"), max_size=12))
@settings(max_examples=300, deadline=None)
def test_the_end_that_could_become_a_token_is_found(text: str) -> None:
    ends = [i for i in range(len(text)) if any(t.startswith(text[i:]) and t != text[i:] for t in SPECIAL)]
    assert SpecialMatcher(SPECIAL).partial_end(text) == min(ends, default=len(text))


def test_no_special_tokens_and_too_long_ones_split_nothing() -> None:
    assert SpecialMatcher({}).split("a") == ["a"]
    assert SpecialMatcher({"x" * (MAX_LENGTH + 1): 1, "": 2}).split("x" * 600) == ["x" * 600]
    assert SpecialMatcher({"<a>": 1}).split("") == []


JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(1 << 63), 1 << 64), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


@pytest.mark.parametrize("keys", [bpe_keys(), spm_keys()], ids=["bpe", "spm"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_a_file_says_it_loads_or_is_refused(keys: dict[str, object], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*keys, "tokenizer.ggml.eot_token_id", "tokenizer.chat_template"]))
    good = keys.get(name)
    if isinstance(good, list) and data.draw(st.booleans()):
        i = data.draw(st.integers(0, len(good) - 1))
        value: object = [*good[:i], data.draw(JUNK), *good[i + 1 :]]
    else:
        value = data.draw(JUNK)
    try:
        tokenizer = load_tokenizer({**keys, name: value})
    except ModelError as e:
        assert e.code in ("bad-tokenizer", "unsupported-tokenizer", "unsupported-pre-tokenizer")
    else:
        tokenizer.decode(tokenizer.encode("hello <|im_end|> 日", special=True), special=True)
