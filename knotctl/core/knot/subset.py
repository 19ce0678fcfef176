"""Which part of a knot's data a run looks at: a slice of every run's own, or a random sample."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from knotctl.core.errors import UsageError
from knotctl.core.sizes import parse_size


@dataclass(frozen=True, slots=True)
class Subset:
    """`2/10` is the second of ten slices, which together are the whole; `10%` and `1GiB` are drawn anew each time."""

    text: str
    slice: tuple[int, int] | None = None  # 1-based number, count
    share: float | None = None
    size: int | None = None

    @classmethod
    def parse(cls, text: str) -> Subset:
        """Return the subset that a user writes as N/T, P% or a size. Raises: UsageError `bad-subset`."""
        if m := re.fullmatch(r"(\d{1,9})/(\d{1,9})", text):
            number, count = int(m[1]), int(m[2])
            if 1 <= number <= count:
                return cls(text, slice=(number, count))
        elif m := re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)%", text):
            if 0 < float(m[1]) <= 100:
                return cls(text, share=float(m[1]) / 100)
        elif "/" not in text and "%" not in text and (size := parse_size(text)) > 0:
            return cls(text, size=size)
        raise UsageError("bad-subset", f"subset {text!r}: expected N/T with 1 <= N <= T, a percentage, or a size")

    def expected(self, total: int) -> int:
        """Return about how many of so many bytes are looked at."""
        if self.slice is not None:
            return total // self.slice[1]
        return min(total, self.size if self.size is not None else int(total * (self.share or 0)))

    def choose(self, sizes: list[int]) -> list[int]:
        """Return the indices of the pieces to look at, in order, of pieces of these sizes in bytes."""
        count = len(sizes)
        if self.slice is not None:
            number, slices = self.slice
            return list(range((number - 1) * count // slices, number * count // slices))
        wanted = self.size if self.size is not None else (self.share or 0) * sum(sizes)
        order = random.sample(range(count), count)
        chosen, got = [], 0
        for i in order:
            if got >= wanted:
                break
            chosen.append(i)
            got += sizes[i]
        return sorted(chosen)
