"""Replies of OpenAI's chat and completion endpoints: whole documents, and the chunks of a stream.

Source: OpenAI API reference, chat and completions; WHATWG HTML, server-sent events.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from knotctl.services.text import Delta, TokenText

DONE = b"data: [DONE]\n\n"
# A comment, which clients skip; proxies see that the connection lives.
PING = b": ping\n\n"


def event(document: dict[str, Any]) -> bytes:
    """Return a document as one event of a stream."""
    return b"data: " + json.dumps(document, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


def usage(n_prompt: int, n_tokens: int) -> dict[str, int]:
    """Return the tokens that a request has used."""
    return {"prompt_tokens": n_prompt, "completion_tokens": n_tokens, "total_tokens": n_prompt + n_tokens}


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How one reply is written: a chat's or a completion's."""

    chat: bool
    model: str
    knot_id: str
    logprobs: bool
    reply_id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, deltas: Sequence[Delta], finish_reason: str, used: dict[str, int]) -> dict[str, Any]:
        """Return the document of a reply that is not streamed."""
        text = "".join(d.text for d in deltas)
        content = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        tokens = [t for d in deltas for t in d.tokens]
        choice = {"index": 0, **content, "logprobs": self._logprobs(tokens), "finish_reason": finish_reason}
        return self._document("chat.completion" if self.chat else "text_completion", [choice]) | {"usage": used}

    def opening(self) -> dict[str, Any] | None:
        """Return the chunk that begins a stream; a completion has none."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, (), None) if self.chat else None

    def piece(self, delta: Delta) -> dict[str, Any]:
        """Return the chunk of one delta."""
        content = {"delta": {"content": delta.text}} if self.chat else {"text": delta.text}
        return self._chunk(content, delta.tokens, None)

    def closing(self, finish_reason: str) -> dict[str, Any]:
        """Return the chunk that says why the text ended."""
        return self._chunk({"delta": {}} if self.chat else {"text": ""}, (), finish_reason)

    def total(self, used: dict[str, int]) -> dict[str, Any]:
        """Return the chunk of no choices that states the usage."""
        return self._document(self._chunk_object, []) | {"usage": used}

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, content: dict[str, Any], tokens: Sequence[TokenText], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": self._logprobs(tokens), "finish_reason": finish_reason}
        return self._document(self._chunk_object, [choice])

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.reply_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            # the same for the same model bytes: with a seed, the same answer
            "system_fingerprint": f"knot-{self.knot_id[:16]}",
            "choices": choices,
        }

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if not self.logprobs or not tokens:
            return None
        if self.chat:
            content = [
                _token(t.data, t.logprob) | {"top_logprobs": [_token(data, logprob) for data, logprob in t.top]}
                for t in tokens
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [_text(t.data) for t in tokens],
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [{_text(data): logprob for data, logprob in t.top} for t in tokens],
            "text_offset": [t.offset for t in tokens],
        }


def _token(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(data), "logprob": logprob, "bytes": list(data)}


def _text(data: bytes) -> str:
    """Return a token's text; bytes that are no whole character as \\xe6, so that tokens stay apart."""
    return data.decode(errors="backslashreplace")
