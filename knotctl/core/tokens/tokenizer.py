"""The tokeniser of a model: text to ids and ids to text, from the keys of its GGUF alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from knotctl.core.errors import ModelError, RequestError, printable
from knotctl.core.tokens.pretokenizers import find_pretokenizer
from knotctl.core.tokens.special import SpecialMatcher
from knotctl.core.tokens.spm import SentencePieceEncoder, byte_of
from knotctl.core.tokens.vocabulary import Kind, Vocabulary, bad_key, key_of, load_vocabulary


class Encoder(Protocol):
    """One way to cut plain text into tokens."""

    def encode(self, text: str, *, at_start: bool) -> list[int]:
        """Return the ids of plain text; at_start where it begins the text or follows a special token."""

    def surface(self, token: str) -> bytes:
        """Return the bytes that a normal token stands for."""


class Tokenizer:
    """Text to ids and back."""

    def __init__(
        self, vocabulary: Vocabulary, encoder: Encoder, *, adds_bos: bool, chat_template: str | None = None
    ) -> None:
        self.vocab_size = len(vocabulary)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.stop_ids = vocabulary.stop_ids
        self.adds_bos = adds_bos
        self.chat_template = chat_template
        self._vocabulary = vocabulary
        self._encoder = encoder
        tokens = vocabulary.tokens
        # A character takes at least one of a token's, stand-in or not.
        self._longest = max(1, *map(len, tokens))
        self.control = SpecialMatcher({tokens[i]: i for i in vocabulary.control})
        self._user_defined = SpecialMatcher(
            {tokens[i]: i for i in vocabulary.of_kind(Kind.USER_DEFINED) if i not in vocabulary.control}
        )

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of text, nothing added. Without `special` the text of a control token is plain text.

        Raises: RequestError bad-text, where the text holds a lone surrogate.
        """
        return self.encode_parts(self.control.split(text) if special else [text])

    def encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        """Return the ids of stretches of plain text with ids between them. Raises: RequestError bad-text."""
        ids: list[int] = []
        at_start = True
        for part in parts:
            if isinstance(part, str):
                check_text(part)
            for piece in self._user_defined.split(part) if isinstance(part, str) else (part,):
                at_start_here, at_start = at_start, isinstance(piece, int)
                if isinstance(piece, int):
                    ids.append(piece)
                else:
                    ids += self._encoder.encode(piece, at_start=at_start_here)
        return ids

    def least_tokens(self, text: str) -> int:
        """Return how many tokens text has at least, without encoding it: enough to refuse what is far too long.

        Characters that the vocabulary has no bytes for, which encode leaves out, are counted.
        """
        return -(-len(text) // self._longest)

    def with_bos(self, ids: list[int]) -> list[int]:
        """Return the ids with the model's beginning of sequence before them, where it wants one and none is there."""
        if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return what a token adds to the text, part of a character maybe; control tokens only with `special`.

        Raises: RequestError bad-token-id.
        """
        self._vocabulary.check_id(token)
        text, kind = self._vocabulary.tokens[token], self._vocabulary.kinds[token]
        if kind == Kind.NORMAL:
            return self._encoder.surface(text)
        if kind == Kind.USER_DEFINED or (special and kind in (Kind.CONTROL, Kind.UNKNOWN)):
            return text.encode()
        byte = byte_of(text) if kind == Kind.BYTE else None
        return b"" if byte is None else bytes([byte])

    def name(self, token: int) -> str:
        """Return a token as the vocabulary spells it. Raises: RequestError bad-token-id."""
        self._vocabulary.check_id(token)
        return self._vocabulary.tokens[token]

    def piece(self, token: int) -> str:
        """Return a token's text for people: bytes that are no whole character as \\xe6, a control token's name."""
        return self.token_bytes(token, special=True).decode(errors="backslashreplace")

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of ids, as a Detokenizer gives it piece by piece; invalid UTF-8 becomes U+FFFD."""
        return b"".join(self.token_bytes(i, special=special) for i in ids).decode(errors="replace")


def check_text(text: str, param: str | None = None) -> None:
    """Raise RequestError bad-text where text holds a lone surrogate, which no encoding of it can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise RequestError(
            "bad-text",
            f"{param or 'text'}: character {e.start}: expected Unicode text, found the lone surrogate "
            f"U+{ord(text[e.start]):04X}",
            param=param,
        ) from None


def load_tokenizer(keys: Mapping[str, object]) -> Tokenizer:
    """Return the tokeniser that the `tokenizer.*` keys of a GGUF describe.

    Raises: ModelError bad-tokenizer, unsupported-tokenizer, unsupported-pre-tokenizer.
    """
    model = key_of(keys, "ggml.model", str)
    encoder: Encoder
    if model == "gpt2":
        # only this kind needs the library
        from knotctl.core.tokens.bpe import BytePairEncoder

        pre = find_pretokenizer(key_of(keys, "ggml.pre", str) or "")
        vocabulary = load_vocabulary(keys)
        encoder = BytePairEncoder.of(keys, vocabulary, pre)
        adds_bos = pre.adds_bos
    elif model == "llama":
        vocabulary = load_vocabulary(keys, bos=1, eos=2, unknown=0)
        encoder = SentencePieceEncoder.of(keys, vocabulary)
        adds_bos = True
    else:
        raise ModelError(
            "unsupported-tokenizer",
            f"tokenizer: tokenizer.ggml.model: expected gpt2 or llama, found {printable(model)}",
        )
    asked = key_of(keys, "ggml.add_bos_token", bool)
    adds_bos = adds_bos if asked is None else asked
    if adds_bos and vocabulary.bos_id is None:
        raise bad_key("ggml.bos_token_id", "expected an id of the vocabulary, as the model asks for bos; found none")
    return Tokenizer(vocabulary, encoder, adds_bos=adds_bos, chat_template=key_of(keys, "chat_template", str))
