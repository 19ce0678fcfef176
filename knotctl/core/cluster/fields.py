"""Fields of JSON objects from outside, each checked as it is taken; a field that nobody takes is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from knotctl.core.errors import FormatError, printable
from knotctl.core.strict_json import parse_json


def parse_document(data: bytes, name: str) -> Any:
    """Return the JSON value of a file of that name, for messages. Raises: FormatError bad-json, duplicate-key."""
    return parse_json(data, lambda code, what: FormatError(code, f"{name}: {what}"))


class Fields:
    """A JSON object whose fields are taken one by one; `done` refuses what is left, which a misspelling would be.

    Raises: FormatError with the reader's code, from every method.
    """

    def __init__(self, document: object, place: str, code: str) -> None:
        self.place, self.code = place, code
        if not isinstance(document, dict):
            self.refuse(f"expected an object, found {_shown(document)}")
        self._left: dict[str, Any] = dict(document)

    def refuse(self, what: str, hint: str | None = None) -> NoReturn:
        """Refuse the object, with its place in the message."""
        raise FormatError(self.code, f"{self.place}: {what}", hint=hint)

    def has(self, name: str) -> bool:
        """Say whether a field is there, not yet taken, and not null."""
        return self._left.get(name) is not None

    def take(self, name: str) -> Any:
        """Return a field that must be there, of any type."""
        if name not in self._left:
            self.refuse(f"{name} is missing")
        return self._left.pop(name)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """Return a whole number from low to high; the default where the field is absent or null."""
        if default is not None and not self.has(name):
            self._left.pop(name, None)
            return default
        value = self.take(name)
        if type(value) is not int or not low <= value <= high:
            self.refuse(f"{name}: expected a whole number from {low:,} to {high:,}, found {_shown(value)}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """Return a number from low to high; the default where the field is absent or null."""
        if default is not None and not self.has(name):
            self._left.pop(name, None)
            return default
        value = self.take(name)
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            self.refuse(f"{name}: expected a number from {low:g} to {high:g}, found {_shown(value)}")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text of 1 to 128 printable characters; the default where the field is absent or null."""
        if default is not None and not self.has(name):
            self._left.pop(name, None)
            return default
        value = self.take(name)
        if type(value) is not str or not 0 < len(value) <= 128 or not value.isprintable() or value != value.strip():
            self.refuse(f"{name}: expected 1 to 128 printable characters, found {_shown(value)}")
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a text as `text` does, None where the field is absent or null."""
        return self.text(name) if self.has(name) else self._left.pop(name, None)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._left.pop(name, default)
        if type(value) is not bool:
            self.refuse(f"{name}: expected true or false, found {_shown(value)}")
        return value

    def choice(self, name: str, words: Iterable[str], default: str) -> str:
        """Return one of the words."""
        value = self._left.pop(name, default)
        if value not in (known := tuple(words)):
            self.refuse(f"{name}: expected one of {', '.join(known)}, found {_shown(value)}")
        return str(value)

    def items(self, name: str, most: int, default: list[Any] | None = None) -> list[Any]:
        """Return a list of at most so many items."""
        if default is not None and not self.has(name):
            self._left.pop(name, None)
            return default
        value = self.take(name)
        if type(value) is not list or len(value) > most:
            found = f"{len(value):,} items" if type(value) is list else _shown(value)
            self.refuse(f"{name}: expected a list of at most {most:,} items, found {found}")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an object, empty where the field is absent."""
        value = self._left.pop(name, {})
        if type(value) is not dict:
            self.refuse(f"{name}: expected an object, found {_shown(value)}")
        return value

    def drop(self, names: Iterable[str]) -> None:
        """Take fields that may be there and do not matter."""
        for name in names:
            self._left.pop(name, None)

    def done(self, known: Iterable[str] = ()) -> None:
        """Refuse fields that were not taken; what is ignored in silence would be a misspelling that changes a plan."""
        if self._left:
            hint = f"known fields: {', '.join(known)}" if known else None
            self.refuse(f"unknown field {printable(next(iter(self._left)), 60)!r}", hint=hint)


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return printable(repr(value), 60)
