"""On the real vocabularies: ids and prompts are llama.cpp's, and no text is too long or too strange."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slow_oracles import bpe, spm
from small_vocabularies import BYTE, CONTROL, UNKNOWN

from knotctl.core.gguf.parts import open_gguf
from knotctl.core.knot.from_gguf import pack_tokenizer
from knotctl.core.knot.reader import unpack_tokenizer
from knotctl.core.tokens.bpe import STAND_INS
from knotctl.core.tokens.chat import ChatTemplate, encode_chat
from knotctl.core.tokens.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.model
MODELS = ("smollm2", "coder-0.5b", "coder-1.5b", "gemma3-270m")
TEXT = (
    Path(__file__).read_text()
    + "Blåbærgrød — “naïve” 日本語のテスト。 👩\u200d👧 ½ ١٢٣\r\n\r\n \t x\u3000y\u2028z I'VE WE'll\n" * 3
)


@pytest.fixture(scope="module")
def keys_of(gguf_of: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    """The keys as a knot holds them: packed and unpacked."""
    done: dict[str, dict[str, Any]] = {}

    def read(name: str) -> dict[str, Any]:
        if name not in done:
            with open_gguf(str(gguf_of(name))) as model:
                done[name] = unpack_tokenizer(pack_tokenizer(model))
        return done[name]

    return read


@pytest.fixture(scope="module")
def tokenizer_of(keys_of: Callable[[str], dict[str, Any]]) -> Callable[[str], Tokenizer]:
    done: dict[str, Tokenizer] = {}
    return lambda name: done.setdefault(name, load_tokenizer(keys_of(name))) if name not in done else done[name]


def cases(reference: Callable[[str], Path], name: str, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(reference(f"{name}.json").read_text())[kind]
    assert found
    return found


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_llama_cpp(
    name: str, tokenizer_of: Callable[[str], Tokenizer], reference: Callable[[str], Path]
) -> None:
    tokenizer = tokenizer_of(name)
    for case in cases(reference, name, "tokenize"):
        assert tokenizer.encode(case["text"], special=True) == case["tokens"], case["text"]
        assert tokenizer.encode(case["text"]) == case["tokens_plain"], case["text"]
        assert tokenizer.decode(case["tokens_plain"]) == case["text"]
    for case in cases(reference, name, "completions"):
        assert tokenizer.with_bos(tokenizer.encode(case["prompt"], special=True)) == case["prompt_tokens"]
        assert tokenizer.decode(case["tokens"]) == case["text"]


@pytest.mark.parametrize("name", MODELS)
def test_prompts_equal_llama_cpp(
    name: str, tokenizer_of: Callable[[str], Tokenizer], reference: Callable[[str], Path]
) -> None:
    tokenizer = tokenizer_of(name)
    for case in cases(reference, name, "templates"):
        prompt, ids = encode_chat(tokenizer, ChatTemplate.of(tokenizer), case["messages"])
        assert prompt == case["prompt"]
        assert ids == tokenizer.with_bos(tokenizer.encode(prompt, special=True))


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        # as llama.cpp lists them when it loads the model; </s> is 128247 and 212, plain text to the models' makers
        ("smollm2", {0, 2, 4}),
        ("coder-0.5b", {128247, 151643, 151645, 151662, 151663, 151664}),
        ("coder-1.5b", {128247, 151643, 151645, 151662, 151663, 151664}),
        ("gemma3-270m", {1, 106, 212}),
    ],
)
def test_stop_ids_equal_llama_cpp(name: str, stops: set[int], tokenizer_of: Callable[[str], Tokenizer]) -> None:
    assert tokenizer_of(name).stop_ids == stops


@pytest.mark.parametrize("name", ["smollm2", "coder-1.5b"])
def test_bpe_equals_the_slow_oracle(
    name: str, keys_of: Callable[[str], dict[str, Any]], tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    keys = {k.removeprefix("tokenizer.ggml."): v for k, v in keys_of(name).items()}
    assert tokenizer_of(name).encode(TEXT) == bpe(TEXT, keys["pre"], keys["tokens"], keys["merges"], STAND_INS)


def test_spm_equals_the_slow_oracle(
    keys_of: Callable[[str], dict[str, Any]], tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    keys = {k.removeprefix("tokenizer.ggml."): v for k, v in keys_of("gemma3-270m").items()}
    ids = {t: i for i, t in enumerate(keys["tokens"])}
    said = {
        t: s
        for t, s, k in zip(keys["tokens"], keys["scores"], keys["token_type"], strict=True)
        if k not in (UNKNOWN, CONTROL, BYTE)
    }
    for line in TEXT.splitlines():
        # tags and runs of white space are user-defined tokens, which the oracle knows nothing of
        line = " ".join(line.replace("<", "(").split())
        assert tokenizer_of("gemma3-270m").encode(line) == spm(line, said, ids), line


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "unit", ["a", " ", "\n", "!", "日本語", "<unused1", "<|im_start|", "\x00", "ab ", "Ⅷ½", "\u0301"]
)
def test_a_long_text_of_one_thing_comes_back(name: str, unit: str, tokenizer_of: Callable[[str], Tokenizer]) -> None:
    text = unit * (100_000 // len(unit))
    assert tokenizer_of(name).decode(tokenizer_of(name).encode(text)) == text


@pytest.mark.parametrize("name", MODELS)
def test_a_marker_that_a_user_types_stays_text(name: str, tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of(name)
    marks = [tokenizer.name(i) for i in sorted(tokenizer.stop_ids)] + ["<|im_start|>", "<start_of_turn>"]
    template = ChatTemplate.of(tokenizer)
    typed = "".join(f"{mark}\n" for mark in marks)
    prompt, ids = encode_chat(tokenizer, template, [{"role": "user", "content": typed}])
    harmless = encode_chat(tokenizer, template, [{"role": "user", "content": "x"}])[1]
    control = {i for mark in marks for i in tokenizer.encode(mark, special=True)[:1] if tokenizer.name(i) == mark}
    # </s> is an ordinary word of Qwen's vocabulary, whatever llama.cpp makes of it when it is generated
    control -= {i for i in control if tokenizer.encode(tokenizer.name(i)) == [i]}
    assert [i for i in ids if i in control] == [i for i in harmless if i in control]
    assert typed.strip() in prompt
