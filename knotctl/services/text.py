"""An engine's steps as text: characters whole, stop strings cut, each token's log-probabilities beside its text.

Streamed and unstreamed replies are made of the same deltas, which is why their texts are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knotctl.core.engine.stream import Step
from knotctl.core.tokens.detokenize import Detokenizer, StopMatcher
from knotctl.core.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token of a reply: its bytes, log-probability, the likeliest ones, and where its text starts in the reply."""

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply, and the tokens (where log-probabilities are wanted) whose text starts in it."""

    text: str
    tokens: tuple[TokenText, ...]


class TextAssembler:
    """Takes the steps of one generation and gives its text, piece by piece."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self._waiting: list[TokenText] = []
        self._made = 0
        self._given = 0
        self.n_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete: what the engine still yields is not part of the reply."""
        return self._matcher.stopped is not None

    def push(self, step: Step) -> Delta:
        """Return what a step adds, often nothing yet."""
        self.n_tokens += 1
        if step.logprob is not None:
            top = tuple((self._bytes(i), logprob) for i, logprob in step.top)
            self._waiting.append(TokenText(self._bytes(step.token), step.logprob, top, self._made))
        text = self._detokenizer.push(step.token)
        self._made += len(text)
        return self._delta(self._matcher.push(text), end=self.stopped)

    def finish(self) -> Delta:
        """Return what was held back, once the engine has ended."""
        text = self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()
        return self._delta(text, end=True)

    def _delta(self, text: str, *, end: bool) -> Delta:
        self._given += len(text)
        # A token of no text of its own belongs to the text before it, unless a stop string cut that off.
        ready = [t for t in self._waiting if t.offset < self._given or (end and not self.stopped)]
        self._waiting = [] if end else self._waiting[len(ready) :]
        return Delta(text, tuple(ready))

    def _bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token, special=True)
