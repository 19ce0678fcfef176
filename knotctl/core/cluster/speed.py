"""From what a node says of its speed to the time that a part of a model takes on it."""

from __future__ import annotations

import re

# One second in the unit of all planned times: whole numbers, so that sums are exact and equal plans compare equal.
SECOND = 10**21

_COUNT = re.compile(r"(?<![0-9a-z.])(\d{1,6}(?:\.\d{1,4})?)([bm])(?![0-9a-z])")


def parameters_in(name: str) -> int | None:
    """Return the parameters that a model's name states (`Llama-3-8B`: 8e9; `SmolLM2-135M`), None where it is silent."""
    found = _COUNT.findall(name.lower())
    if not found:
        return None
    number, unit = found[-1]
    return int(float(number) * (10**9 if unit == "b" else 10**6)) or None


def token_time(tokens_per_s: float, parameters: int, benchmark_parameters: int | None) -> int:
    """Return the time of one token through the whole of a model of so many parameters.

    tokens_per_s was measured on a model of benchmark_parameters, None meaning on this one: decoding reads every
    weight once a token, so time goes with parameters. Units: of SECOND.
    """
    ratio = parameters / benchmark_parameters if benchmark_parameters else 1.0
    return max(1, round(SECOND * ratio / tokens_per_s))


def time_text(time: int) -> str:
    """Return a planned time for people: `12.3 ms`, `1.46 s`."""
    ms = time * 1000 / SECOND
    return f"{ms:.3g} ms" if ms < 999.5 else f"{ms / 1000:.3g} s" if ms < 1e6 else f"{ms / 1000:,.0f} s"


def milliseconds(time: int) -> float:
    """Return a planned time in milliseconds, to the nanosecond, as documents show it."""
    return round(time * 1000 / SECOND, 6)
