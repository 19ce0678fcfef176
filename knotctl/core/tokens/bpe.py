"""Byte-level BPE (`tokenizer.ggml.model` gpt2): words as printable stand-ins for their bytes, merged by rank.

Source: GPT-2's encoder; llama.cpp's `llm_tokenizer_bpe_session`, which the ids equal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# One text at a time is encoded here: without this the library starts a thread for every CPU to share it among.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from knotctl.core.errors import ModelError, printable
from knotctl.core.tokens.pretokenizers import PreTokenizer
from knotctl.core.tokens.vocabulary import Kind, Vocabulary, array_of, bad_key


def _stand_ins() -> dict[int, str]:
    """Return the character that stands for each byte: itself where it prints, else the next one from U+0100 on."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printing)
    return {b: chr(b) for b in printing} | {b: chr(0x100 + i) for i, b in enumerate(others)}


STAND_INS = _stand_ins()
_BYTES = {c: bytes([b]) for b, c in STAND_INS.items()}


class BytePairEncoder:
    """Encodes plain text with the merges of a vocabulary."""

    def __init__(self, vocabulary: Vocabulary, merges: list[str], pre: PreTokenizer) -> None:
        self._size = len(vocabulary)
        # Control tokens stay out: no text may merge into one, nor be one as a whole word.
        ids = dict(vocabulary.ids)
        for token in vocabulary.of_kind(Kind.CONTROL, Kind.UNKNOWN):
            ids.pop(vocabulary.tokens[token], None)
        ids.pop("", None)
        # A byte without a token still parts its neighbours; it gets an id past the end, which encode drops.
        missing = [c for c in STAND_INS.values() if c not in ids]
        ids |= {c: self._size + i for i, c in enumerate(missing)}
        self._drops = bool(missing)
        pairs = [_pair(merge, rank) for rank, merge in enumerate(merges)]
        self._encoder = tokenizers.Tokenizer(_model(ids, pairs, vocabulary, pre.ignore_merges))
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        to_stand_ins = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._encoder.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_stand_ins])

    @classmethod
    def of(cls, keys: Mapping[str, object], vocabulary: Vocabulary, pre: PreTokenizer) -> BytePairEncoder:
        """Return the encoder that a GGUF's keys describe. Raises: ModelError bad-tokenizer."""
        merges = array_of(keys, "ggml.merges", str)
        if merges is None:
            raise bad_key("ggml.merges", "expected the list of merges, found none")
        return cls(vocabulary, merges, pre)

    def encode(self, text: str, *, at_start: bool) -> list[int]:
        """Return the ids of plain text. Bytes that the vocabulary has no token for are left out, as in llama.cpp."""
        ids: list[int] = self._encoder.encode_batch_fast([text])[0].ids
        return [i for i in ids if i < self._size] if self._drops else ids

    def surface(self, token: str) -> bytes:
        """Return the bytes that a normal token stands for; characters that are no stand-in stand for themselves."""
        return b"".join(_BYTES.get(c) or c.encode() for c in token)


def _pair(merge: str, rank: int) -> tuple[str, str]:
    # From the second character on: the first part may itself be a space.
    cut = merge.find(" ", 1)
    if cut < 0 or cut == len(merge) - 1:
        raise bad_key(
            "ggml.merges", f"merge {rank}: expected two parts with a space between, found {printable(merge)!r}"
        )
    return merge[:cut], merge[cut + 1 :]


def _model(
    ids: dict[str, int], pairs: list[tuple[str, str]], vocabulary: Vocabulary, ignore_merges: bool
) -> models.BPE:
    try:
        return models.BPE(ids, pairs, ignore_merges=ignore_merges)
    except Exception:
        # The library names no merge: look for it, and leave out those that would make a control token.
        kept = []
        for rank, (left, right) in enumerate(pairs):
            unknown = next((t for t in (left, right, left + right) if t not in vocabulary.ids), None)
            if unknown is not None:
                raise bad_key("ggml.merges", f"merge {rank}: {printable(unknown)!r} is no token") from None
            if left in ids and right in ids and left + right in ids:
                kept.append((left, right))
        try:
            return models.BPE(ids, kept, ignore_merges=ignore_merges)
        except Exception as e:
            raise ModelError("bad-tokenizer", f"tokenizer: {printable(e)}") from None
