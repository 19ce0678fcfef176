"""The vocabulary of a model: its tokens, what kind each is, and which of them begin and end a text.

Source: GGUF's `tokenizer.ggml.*` keys; llama.cpp's rules for end of generation, which goes by the tokens' text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from knotctl.core.errors import ModelError, RequestError, printable

# 262,144 is the largest known vocabulary; the cap keeps a hostile file from holding gigabytes of strings twice.
MAX_TOKENS = 1 << 22

_FILL_ENDS = ("fim_pad", "fim_rep", "fim_sep")
_T = TypeVar("_T")


class Kind(IntEnum):
    """What a token is (`tokenizer.ggml.token_type`)."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2  # stands for text that has no token
    CONTROL = 3  # steers the model (<|im_end|>); nothing that a user types becomes one
    USER_DEFINED = 4  # matched in text before all else, also in what users type
    UNUSED = 5  # padding of the vocabulary
    BYTE = 6  # <0x0A>: one byte of a character that has no token


# Tokens known by their text alone, because converters often leave the key out, or the kind at NORMAL: those that end
# a turn, and those of filling in code. Of the latter, pad, rep and sep end it too: the hole is full, a file begins.
_NAMED = """
end <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT]
end [EOS] <|end_of_text|> <end_of_utterance> <eos> <｜end▁of▁sentence｜>
fim_pad <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]
fim_rep <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>
fim_sep <|file_sep|>
fim_pre <|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>
fim_suf <|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>
fim_mid <|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>
"""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id, ids by text, kinds by id as the file says, and the ids with a role.

    `control` are the ids that only special parsing makes of text: of kind control or unknown, or known by their text.
    """

    tokens: list[str]
    ids: dict[str, int]
    kinds: list[int]
    control: frozenset[int]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    stop_ids: frozenset[int]

    def __len__(self) -> int:
        return len(self.tokens)

    def check_id(self, token: int) -> None:
        """Raise RequestError where an id is no token of this vocabulary: rows beyond it are padding."""
        if not 0 <= token < len(self.tokens):
            raise RequestError(
                "bad-token-id", f"token id {token}: expected 0 <= id < {len(self.tokens)}, the vocabulary's size"
            )

    def of_kind(self, *kinds: Kind) -> list[int]:
        """Return the ids of these kinds that have a text, in ascending order."""
        wanted = {*map(int, kinds)}
        return [i for i, kind in enumerate(self.kinds) if kind in wanted and self.tokens[i]]


def load_vocabulary(
    keys: Mapping[str, object], *, bos: int | None = None, eos: int | None = None, unknown: int | None = None
) -> Vocabulary:
    """Return the vocabulary in the `tokenizer.*` keys of a GGUF; bos, eos and unknown are the model's defaults.

    Raises: ModelError bad-tokenizer, where a key is missing, of another type, or two tokens have one text.
    """
    tokens = array_of(keys, "ggml.tokens", str)
    if not tokens:
        raise bad_key("ggml.tokens", "expected the list of tokens, found none")
    _check_text(tokens)
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        # The empty text may repeat: it can neither be written nor read.
        twice = next((i for i, text in enumerate(tokens) if ids[text] != i and text), None)
        if twice is not None:
            raise bad_key(
                "ggml.tokens", f"tokens {twice} and {ids[tokens[twice]]} are both {printable(tokens[twice])!r}"
            )
    kinds = array_of(keys, "ggml.token_type", int) or [int(Kind.NORMAL)] * len(tokens)
    if len(kinds) != len(tokens):
        raise bad_key("ggml.token_type", f"expected {len(tokens)} entries, one a token, found {len(kinds)}")

    def role(name: str, default: int | None = None) -> int | None:
        token = key_of(keys, f"ggml.{name}_token_id", int)
        token = default if token is None else token
        return token if token is not None and 0 <= token < len(tokens) else None

    stops: set[int] = set()
    control: set[int] = set()
    for part, *names in (line.split() for line in _NAMED.strip().splitlines()):
        if part == "end" or role(part) is None:
            found = [ids[name] for name in names if name in ids]
            control.update(found)  # they steer the model whatever the file says of their kind
            stops.update(found if part == "end" else found[:1] if part in _FILL_ENDS else ())
    hidden = {int(Kind.CONTROL), int(Kind.UNKNOWN)}
    control.update(i for i, kind in enumerate(kinds) if kind in hidden and tokens[i])
    eos_id = role("eos", eos)
    stops.update(t for t in (eos_id, *map(role, ("eot", "eom", *_FILL_ENDS))) if t is not None)
    return Vocabulary(
        tokens, ids, kinds, frozenset(control), role("bos", bos), eos_id, role("unknown", unknown), frozenset(stops)
    )


def _check_text(tokens: list[str]) -> None:
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError:
        wrong = next(i for i, text in enumerate(tokens) if any("\ud800" <= c <= "\udfff" for c in text))
        raise bad_key("ggml.tokens", f"token {wrong}: expected Unicode text, found a lone surrogate") from None


def key_of(keys: Mapping[str, object], name: str, kind: type[_T]) -> _T | None:
    """Return the value of `tokenizer.NAME`, None where it is absent. Raises: ModelError where it has another type."""
    value = keys.get(f"tokenizer.{name}")
    if value is None:
        return None
    # not isinstance: to Python a bool is an int, to a tokeniser it is not
    if type(value) is not kind:
        raise bad_key(name, f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def array_of(keys: Mapping[str, object], name: str, kind: type[_T]) -> list[_T] | None:
    """Return the array `tokenizer.NAME`, None where it is absent. Raises: ModelError where it holds another type."""
    value = key_of(keys, name, list)
    if value is None:
        return None
    if len(value) > MAX_TOKENS:
        raise bad_key(name, f"expected at most {MAX_TOKENS} entries, found {len(value)}")
    other = set(map(type, value)) - ({int, float} if kind is float else {kind})
    if other:
        raise bad_key(name, f"expected {kind.__name__} entries, found {', '.join(sorted(t.__name__ for t in other))}")
    return value


def bad_key(name: str, what: str) -> ModelError:
    """Return the error that a tokenizer key is not what it must be."""
    return ModelError("bad-tokenizer", f"tokenizer: tokenizer.{name}: {what}")
