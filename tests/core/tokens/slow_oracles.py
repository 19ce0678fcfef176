"""Tokenisers as their papers say it, character by character: what the quick ones are compared with."""

from __future__ import annotations

import itertools
import unicodedata

SPACES = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(c) for c in range(0x2000, 0x200B)}


def kind(c: str) -> str:
    """L letter, N number, S space, O anything else."""
    if c in SPACES:
        return "S"
    return general if (general := unicodedata.category(c)[0]) in "LN" else "O"


def run(text: str, i: int, kinds: str) -> int:
    """Where the run of characters of these kinds that begins at i ends."""
    while i < len(text) and kind(text[i]) in kinds:
        i += 1
    return i


def spaces(text: str, i: int) -> int:
    """Where the word of white space that begins at i ends: its last space belongs to the word after it."""
    end = run(text, i, "S")
    return end if end == len(text) or end == i + 1 else end - 1


def gpt2_words(text: str) -> list[str]:
    words, i = [], 0
    while i < len(text):
        suffix = next((s for s in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if text.startswith(s, i)), "")
        j = i + (text[i] == " ")
        if suffix:
            end = i + len(suffix)
        elif j < len(text) and kind(text[j]) != "S":
            end = run(text, j, kind(text[j]))
        else:
            end = spaces(text, i)
        words.append(text[i:end])
        i = end
    return words


def modern_words(text: str, digits: int) -> list[str]:
    """Words of Llama 3 (three digits) and Qwen 2 (one)."""
    words, i = [], 0
    while i < len(text):
        lower = text[i : i + 3]
        lower = "".join(c.lower() if c.isascii() else c for c in lower)
        suffix = next((s for s in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if lower.startswith(s)), "")
        after_mark = i + (text[i] not in "\r\n" and kind(text[i]) not in "LN")
        j = i + (text[i] == " ")
        if suffix:
            end = i + len(suffix)
        elif after_mark < len(text) and kind(text[after_mark]) == "L":
            end = run(text, after_mark, "L")
        elif kind(text[i]) == "N":
            end = min(run(text, i, "N"), i + digits)
        elif j < len(text) and kind(text[j]) == "O":
            end = run(text, j, "O")
            while end < len(text) and text[end] in "\r\n":
                end += 1
        else:
            space = text[i : run(text, i, "S")]
            newline = max(space.rfind("\n"), space.rfind("\r"))
            end = i + newline + 1 if newline >= 0 else spaces(text, i)
        words.append(text[i:end])
        i = end
    return words


def digit_words(text: str) -> list[str]:
    """Words of SmolLM: every digit on its own, GPT-2's words between."""
    words, start = [], 0
    for i, c in enumerate([*text, "0"]):
        if kind(c) == "N":
            words += gpt2_words(text[start:i])
            words += [c] if i < len(text) else []
            start = i + 1
    return words


WORDS = {
    "gpt-2": gpt2_words,
    "smollm": digit_words,
    "qwen2": lambda text: modern_words(text, 1),
    "deepseek-r1-qwen": lambda text: modern_words(text, 1),
    "llama-bpe": lambda text: modern_words(text, 3),
}


def merged(symbols: list[str], rank: dict[tuple[str, str], float]) -> list[str]:
    """The symbols after merging, again and again, the first pair of the lowest rank."""
    while pairs := [(rank[pair], i) for i, pair in enumerate(itertools.pairwise(symbols)) if pair in rank]:
        _, i = min(pairs)
        symbols = [*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :]]
    return symbols


def bpe(text: str, pre: str, tokens: list[str], merges: list[str], stand_ins: dict[int, str]) -> list[int]:
    ids = {t: i for i, t in enumerate(tokens)}
    rank = {tuple(m.split(" ")): float(i) for i, m in reversed(list(enumerate(merges)))}
    out = []
    for word in WORDS[pre](text):
        spelt = "".join(stand_ins[b] for b in word.encode())
        symbols = [spelt] if pre == "llama-bpe" and spelt in ids else merged(list(spelt), rank)  # type: ignore[arg-type]
        out += [ids[s] for s in symbols if s in ids]
    return out


def spm(text: str, pieces: dict[str, float], ids: dict[str, int]) -> list[int]:
    symbols = list(text.replace(" ", "\u2581"))
    while True:
        pairs = [(-pieces[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in pieces]
        if not pairs:
            break
        _, i = min(pairs)
        symbols = [*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :]]
    out = []
    for s in symbols:
        out += [ids[s]] if s in pieces else [ids[f"<0x{b:02X}>"] for b in s.encode()]
    return out
