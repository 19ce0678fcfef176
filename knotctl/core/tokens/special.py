"""Finds the special tokens in a text, in one pass however many there are and whatever the text is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# No real special token is longer; without a cap a hostile vocabulary makes every position of a text cost its length.
MAX_LENGTH = 256


class SpecialMatcher:
    """Splits text at the tokens it was made with, from the left, the longest first at each place.

    llama.cpp takes the longest of the whole text first, which differs only where two special tokens cross in it.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        # A trie of nested dicts; the key "" holds the id of the token that ends there.
        self._trie: dict[str, Any] = {}
        for text, token in tokens.items():
            if 0 < len(text) <= MAX_LENGTH:
                node = self._trie
                for c in text:
                    node = node.setdefault(c, {})
                node[""] = token
        # Two characters tell nearly every place where none begins: the trie is walked at the few others.
        starts = (
            re.escape(c) if "" in node else f"{re.escape(c)}[{''.join(map(re.escape, node))}]"
            for c, node in self._trie.items()
        )
        self._starts = re.compile("|".join(starts)) if self._trie else None

    def split(self, text: str) -> list[str | int]:
        """Return the text as its plain stretches, none empty, and the ids of the tokens between them."""
        parts: list[str | int] = []
        done = 0
        place = self._starts and self._starts.search(text)
        while place and self._starts:
            start = place.start()
            token, end, _ = self._walk(text, start)
            if token is None:
                place = self._starts.search(text, start + 1)
                continue
            if done < start:
                parts.append(text[done:start])
            parts.append(token)
            done = end
            place = self._starts.search(text, end)
        if done < len(text):
            parts.append(text[done:])
        return parts

    def partial_end(self, text: str) -> int:
        """Return where the longest end of the text begins that more text could complete to a token, else its length."""
        places = range(max(0, len(text) - MAX_LENGTH), len(text))
        return next((start for start in places if self._walk(text, start)[2]), len(text))

    def _walk(self, text: str, start: int) -> tuple[int | None, int, bool]:
        """Return the longest token that begins at a place, where it ends, and whether more text could lengthen it."""
        node, token, end = self._trie, None, start
        for i in range(start, len(text)):
            if text[i] not in node:
                return token, end, False
            node = node[text[i]]
            if "" in node:
                token, end = node[""], i + 1
        return token, end, node.keys() != {""}
