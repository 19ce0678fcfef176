"""SentencePiece-style merging (`tokenizer.ggml.model` llama): neighbours join while their join is a token.

The pair of the highest score goes first, the leftmost of equals; what is left without a token goes out as bytes.
Source: SentencePiece's BPE model; llama.cpp's `llm_tokenizer_spm_session`, which the ids equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from heapq import heappop, heappush

from knotctl.core.tokens.vocabulary import Kind, Vocabulary, array_of, bad_key, key_of

SPACE = "\u2581"  # what stands for a space in a token
_UNSPOKEN = {int(kind) for kind in (Kind.CONTROL, Kind.UNKNOWN, Kind.BYTE)}
# Text repeats its words; 65,536 of them with their ids take about 15 MB.
_CACHED_WORDS = 1 << 16
_CACHED_LENGTH = 32
# A possible merge is one integer, which sorts as it must: the rank of the score, then where the pair starts, then its
# length. Millions of tuples would be slower to compare, and work for the garbage collector.
_LENGTH_BITS, _START_BITS = 12, 36
_LENGTH, _START = (1 << _LENGTH_BITS) - 1, (1 << _START_BITS) - 1


class SentencePieceEncoder:
    """Encodes plain text with the scores of a vocabulary."""

    def __init__(self, vocabulary: Vocabulary, scores: list[float], *, space_prefix: bool) -> None:
        self._prefix = SPACE if space_prefix else ""
        self._ids = vocabulary.ids
        self._bytes = _byte_ids(vocabulary)
        self._cache: dict[str, list[int]] = {}
        ranks = {score: rank for rank, score in enumerate(sorted(set(scores), reverse=True))}
        # Only what text can say takes part: no spelling of a control or byte token becomes one.
        self._merges = {
            text: ranks[score] << _LENGTH_BITS + _START_BITS | len(text)
            for text, score, kind in zip(vocabulary.tokens, scores, vocabulary.kinds, strict=True)
            if kind not in _UNSPOKEN and 0 < len(text) <= _LENGTH
        }
        # No merge reaches over the start of a word where no token has that character before a space: words part there.
        inner = [text for text in self._merges if text.rfind(SPACE) > 0]
        joined = {m[1] for text in inner for m in re.finditer(f"([^{SPACE}]){SPACE}", text)}
        self._word_start = re.compile(f"(?<=[^{SPACE}{''.join(map(re.escape, sorted(joined)))}])(?={SPACE})")

    @classmethod
    def of(cls, keys: Mapping[str, object], vocabulary: Vocabulary) -> SentencePieceEncoder:
        """Return the encoder that a GGUF's keys describe. Raises: ModelError bad-tokenizer."""
        scores = array_of(keys, "ggml.scores", float)
        if scores is None or len(scores) != len(vocabulary):
            found = "none" if scores is None else len(scores)
            raise bad_key("ggml.scores", f"expected {len(vocabulary)} scores, one a token, found {found}")
        if sum(scores) != sum(scores):
            raise bad_key("ggml.scores", "expected finite scores, found NaN")
        prefix = key_of(keys, "ggml.add_space_prefix", bool)
        return cls(vocabulary, scores, space_prefix=prefix is not False)

    def encode(self, text: str, *, at_start: bool) -> list[int]:
        """Return the ids of plain text; at_start where it begins the text or follows a special token."""
        text = text.replace(" ", SPACE)
        ids: list[int] = []
        cache = self._cache
        for word in self._word_start.split(self._prefix + text if at_start else text):
            found = cache.get(word)
            if found is None:
                found = self._merge(word)
                if len(word) <= _CACHED_LENGTH:
                    if len(cache) >= _CACHED_WORDS:
                        cache.clear()
                    cache[word] = found
            ids += found
        return ids

    def surface(self, token: str) -> bytes:
        """Return the bytes that a normal token stands for."""
        return token.replace(SPACE, " ").encode()

    def _merge(self, word: str) -> list[int]:
        """Return the ids of text that no cut divides. Symbols are known by where they start."""
        n, merge_of = len(word), self._merges.get
        end = list(range(1, n + 1))  # of the symbol that starts here; 0 once it has joined the one before
        before = list(range(-1, n))  # start of the symbol before
        # The first pairs are sorted once, the best last; the heap holds only those that merging brings about.
        pairs = [m + (i << _LENGTH_BITS) for i in range(n - 1) if (m := merge_of(word[i : i + 2]))]
        pairs.sort(reverse=True)
        heap: list[int] = []
        while pairs or heap:
            pair = heappop(heap) if heap and not (pairs and pairs[-1] < heap[0]) else pairs.pop()
            left = pair >> _LENGTH_BITS & _START
            middle, stop = end[left], left + (pair & _LENGTH)
            if not 0 < middle < stop or end[middle] != stop:
                continue  # one of the two has joined another since
            end[left], end[middle], before[stop] = stop, 0, left
            first = before[left]
            if first >= 0 and (m := merge_of(word[first:stop])):
                heappush(heap, m + (first << _LENGTH_BITS))
            if stop < n and (m := merge_of(word[left : end[stop]])):
                heappush(heap, m + (left << _LENGTH_BITS))
        out: list[int] = []
        start = 0
        while start < n:
            symbol = word[start : end[start]]
            out += (self._ids[symbol],) if symbol in self._merges else self._spell(symbol)
            start = end[start]
        return out

    def _spell(self, symbol: str) -> list[int]:
        """Return the byte tokens of a character without a token of its own."""
        return [self._bytes[b] for b in symbol.encode()]


def byte_of(token: str) -> int | None:
    """Return the byte that a token such as <0x0A> stands for, None where it is none."""
    m = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
    return int(m[1], 16) if m else None


def _byte_ids(vocabulary: Vocabulary) -> list[int]:
    """Return the token for each byte: its own, else the unknown token."""
    bytes_ = ((byte_of(vocabulary.tokens[i]), i) for i in vocabulary.of_kind(Kind.BYTE))
    found = {byte: i for byte, i in bytes_ if byte is not None}
    if len(found) < 256 and vocabulary.unknown_id is None:
        lacks = next(b for b in range(256) if b not in found)
        raise bad_key("ggml.tokens", f"expected <0x{lacks:02X}> of kind byte, or an unknown token, found neither")
    return [found.get(b, vocabulary.unknown_id or 0) for b in range(256)]
