"""Drafts from the text so far: what followed the last few tokens before may follow them again.

A draft is verified in the pass that would compute one token anyway: every position's token is sampled from the logits
there, and the draft only decides how many positions the pass holds. So the output is the same with and without, and
only the speed differs: code edits, quotations and lists repeat themselves, and a pass that accepts four tokens reads
the weights once for all of them.

Source: Saxena 2023, prompt lookup decoding; Leviathan et al. 2023 for verification in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

# The longest match wins: three tokens in a row are rarely followed by something else.
_LONGEST, _SHORTEST = 3, 2
# The first draft is short, since a match may be chance; each one wholly accepted doubles the next.
FIRST_DRAFT, MAX_DRAFT = 3, 15
# Passes without drafts after one of which nothing was accepted, doubled each time up to the most.
_FIRST_REST, _MOST_REST = 1, 16


class Drafter:
    """The drafts of one stream, and how they fared."""

    def __init__(self) -> None:
        self.drafted = 0
        self.accepted = 0
        self._tokens: list[int] = []
        # n-gram -> index behind its latest occurrence that something follows
        self._seen: dict[tuple[int, ...], int] = {}
        self._length = FIRST_DRAFT
        self._rest = 0
        self._next_rest = _FIRST_REST

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that may follow; `tokens` are the earlier calls' with more behind them."""
        self._index(tokens)
        if self._rest > 0:
            self._rest -= 1
            return []
        for n in range(_LONGEST, _SHORTEST - 1, -1):
            at = self._seen.get(tuple(self._tokens[-n:]))
            if at is not None:
                return self._tokens[at : at + max(0, min(self._length, most))]
        return []

    def learn(self, drafted: int, accepted: int) -> None:
        """Note that of a draft so many tokens were right: longer drafts where all were, a rest where none was."""
        self.drafted += drafted
        self.accepted += accepted
        if accepted == drafted:
            self._length = min(2 * self._length, MAX_DRAFT)
            self._next_rest = _FIRST_REST
        elif accepted == 0:
            self._length = FIRST_DRAFT
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _MOST_REST)
        else:
            self._length = max(FIRST_DRAFT, accepted)
            self._next_rest = _FIRST_REST

    def _index(self, tokens: Sequence[int]) -> None:
        # An n-gram is entered when the token behind it arrives, so that the latest one never matches itself.
        for at in range(len(self._tokens), len(tokens)):
            for n in range(_SHORTEST, _LONGEST + 1):
                if at >= n:
                    self._seen[tuple(tokens[at - n : at])] = at
            self._tokens.append(tokens[at])
