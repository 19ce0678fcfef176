"""Ids to text as they come: characters stay whole, stop strings are cut exactly, and nothing is said twice."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from knotctl.core.errors import RequestError
from knotctl.core.tokens.tokenizer import Tokenizer, check_text

MAX_STOPS = 4


class Detokenizer:
    """Turns tokens into text one by one; all it returned, joined, is `tokenizer.decode(ids)`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # It keeps the bytes of a character that may yet be completed, and replaces those that no byte can complete.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that a token completes, empty where it ends within a character. Raises: RequestError."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """Return what is left: U+FFFD where the tokens ended within a character."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class StopMatcher:
    """Passes text on until a stop string is complete, which it cuts off with all that follows.

    The first to be complete counts, the longest of those complete at the same character. Text that may be the
    beginning of a stop is held back. The result does not depend on how the text was divided.
    """

    def __init__(self, stops: Sequence[str], param: str = "stop") -> None:
        if len(stops) > MAX_STOPS:
            raise RequestError("bad-stop", f"stop: expected at most {MAX_STOPS}, found {len(stops)}", param=param)
        for stop in stops:
            if not stop:
                raise RequestError("bad-stop", "stop: expected a text to stop at, found an empty one", param=param)
            check_text(stop, param)
        self.stopped: str | None = None
        self._stops = tuple(stops)
        # For each stop, how many of its characters the text ends with, and where to go on after a mismatch.
        self._matched = [0] * len(stops)
        self._fallback = [_fallbacks(stop) for stop in stops]
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that is certain to come before any stop; nothing once `stopped` is set."""
        if self.stopped is not None:
            return ""
        text = self._held + text
        for i in range(len(self._held), len(text)):
            found = [stop for k, stop in enumerate(self._stops) if self._advance(k, text[i])]
            if found:
                self.stopped = max(found, key=len)
                self._held = ""
                return text[: i + 1 - len(self.stopped)]
        certain = len(text) - max(self._matched, default=0)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Return what was held back, once the text has ended without completing a stop."""
        text, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return text

    def _advance(self, k: int, c: str) -> bool:
        """Take the next character into the match of stop k; returns whether the stop is complete."""
        stop, matched = self._stops[k], self._matched[k]
        while matched and stop[matched] != c:
            matched = self._fallback[k][matched]
        self._matched[k] = matched + (stop[matched] == c)
        return self._matched[k] == len(stop)


def _fallbacks(stop: str) -> list[int]:
    """Return, for each length of a prefix, the longest shorter prefix that it ends with (Knuth, Morris and Pratt)."""
    table = [0, 0]
    for c in stop[1:]:
        k = table[-1]
        while k and stop[k] != c:
            k = table[k]
        table.append(k + (stop[k] == c))
    return table
