"""Half-open ranges with a meaning: bytes of a file, layers of a model, ids of a vocabulary."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from knotctl.core.errors import UsageError


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The half-open range [start, end) over indices from zero; empty where start == end."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise UsageError("bad-span", f"range {self.start}:{self.end}: expected 0 <= start <= end")

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and self.start <= index < self.end

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    @classmethod
    def parse(cls, text: str, limit: int | None = None) -> Self:
        """Return the range written as START:END; either side may be left out where a limit is known."""
        m = re.fullmatch(r"(\d{0,12}):(\d{0,12})", text.strip())
        if m is None or (not m[2] and limit is None):
            raise UsageError("bad-span", f"range {text!r}: expected START:END, as in 0:14")
        start = int(m[1] or 0)
        end = int(m[2]) if m[2] else (limit or 0)
        if start >= end or (limit is not None and end > limit):
            within = "" if limit is None else f" within 0:{limit}"
            raise UsageError("bad-span", f"range {text!r}: expected START below END{within}")
        return cls(start, end)


class ByteRange(Span):
    """Bytes [start, end) of a file or object."""

    __slots__ = ()


class LayerSpan(Span):
    """Layers [start, end) of a model."""

    __slots__ = ()


class VocabSpan(Span):
    """Token ids [start, end) of a vocabulary."""

    __slots__ = ()

    @classmethod
    def shard(cls, index: int, count: int, vocab_size: int) -> VocabSpan:
        """Return the ids that shard `index` of `count` owns: [I*V//N, (I+1)*V//N) of vocabulary V."""
        if not 0 <= index < count <= vocab_size:
            raise UsageError(
                "bad-shard", f"shard {index}/{count} of vocabulary {vocab_size}: expected 0 <= I < N <= vocabulary size"
            )
        return cls(index * vocab_size // count, (index + 1) * vocab_size // count)
