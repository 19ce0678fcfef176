"""How a byte-level BPE cuts text into words before it merges: one entry a `tokenizer.ggml.pre` name.

Each pattern in turn cuts what the ones before it left whole; a match is a word, and so is the text between two.
Source: the models' published tokenizer.json, and llama.cpp's names for them (`LLAMA_VOCAB_PRE_TYPE_*`).
"""

from __future__ import annotations

from dataclasses import dataclass

from knotctl.core.errors import ModelError, printable


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The patterns (Oniguruma), whether a word that is a token skips the merges, and the default of adding bos."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


_SUFFIX = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)


def _modern(number: str, letter: str = r"\p{L}") -> str:
    """Return the pattern that Llama 3 and Qwen share; they differ in how many digits make a word."""
    letters = f"[{letter}]" if letter != r"\p{L}" else letter
    return rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{number}| ?[^\s{letter}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(number: str, suffix: str = "") -> str:
    """Return the pattern of Tekken and GPT-4o, which starts a word at a capital letter."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}"
        rf"|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_FAMILIES: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum": PreTokenizer((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        (_modern(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe glm4": PreTokenizer((_modern(r"\p{N}{1,3}"),)),
    "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan kormo f2llmv2 solar-open grok-2": PreTokenizer(
        (_modern(r"\p{N}"),)
    ),
    "qwen35": PreTokenizer((_modern(r"\p{N}", r"\p{L}\p{M}"),)),
    "tekken": PreTokenizer((_cased(r"\p{N}"),), ignore_merges=True, adds_bos=True),
    "gpt-4o llama4 kanana2": PreTokenizer((_cased(r"\p{N}{1,3}", f"(?:{_SUFFIX})?"),)),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "deepseek-v3 hunyuan-dense joyai-llm": PreTokenizer(
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK)
    ),
    "seed-coder": PreTokenizer(
        (rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ),
}
PRETOKENIZERS: dict[str, PreTokenizer] = {
    name: entry for names, entry in _FAMILIES.items() for name in names.split()
}  # fmt: skip


def find_pretokenizer(name: str) -> PreTokenizer:
    """Return the entry of a `tokenizer.ggml.pre` name; a file without one gets llama.cpp's default.

    Raises: ModelError where the name is unknown: wrong words give wrong tokens, which nobody would notice.
    """
    entry = PRETOKENIZERS.get(name or "default")
    if entry is None:
        raise ModelError(
            "unsupported-pre-tokenizer",
            f"tokenizer: tokenizer.ggml.pre: expected one of {', '.join(sorted(PRETOKENIZERS))}; "
            f"found {printable(name)}",
        )
    return entry
