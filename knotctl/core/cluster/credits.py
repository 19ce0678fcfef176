"""Credits in whole numbers: what a request costs, and how its bill is shared among the nodes that served it.

An amount is a whole number of micro-credits, a millionth of a credit. A bill is rounded once, up; its shares add up to
it exactly, because what whole division leaves over is handed out one micro-credit at a time.
Source: man knot-ledger(7), PRICES and SHARES.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from knotctl.core.errors import UsageError, printable

MICRO = 1_000_000
# A billion credits. Prices are per million tokens, so a product with any count of tokens stays far from MAX_ISSUED.
MAX_AMOUNT = 10**15
# All credits ever issued: any sum of balances fits a signed 64-bit column with room for one more posting.
MAX_ISSUED = 1 << 62
MAX_TOKENS = 1 << 31
_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Price:
    """What a model costs. Units: micro-credits per million tokens, of the prompt and generated."""

    prompt: int
    generated: int

    def __post_init__(self) -> None:
        for name, value in (("prompt", self.prompt), ("generated", self.generated)):
            if not 0 <= value <= MAX_AMOUNT:
                raise UsageError("bad-price", f"price of {name} tokens: expected 0 to {MAX_AMOUNT}, found {value}")

    def bill(self, usage: Usage) -> int:
        """Return what the usage costs, rounded up to a micro-credit once: never less than its exact price.

        Raises: UsageError bad-amount where that passes MAX_AMOUNT.
        """
        exact = self.prompt * usage.prompt + self.generated * usage.generated
        return check_amount(-(-exact // _MILLION), "bill")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. Units: tokens of the prompt, and tokens generated for the client."""

    prompt: int
    generated: int

    def __post_init__(self) -> None:
        if not (0 <= self.prompt <= MAX_TOKENS and 0 <= self.generated <= MAX_TOKENS):
            raise UsageError("bad-usage", f"usage: expected 0 to {MAX_TOKENS} tokens, found {self}")


@dataclass(frozen=True, slots=True)
class Work:
    """What one node did for a request: so many tokens through so many layers; a replay after a fault counts too."""

    node_id: str
    layers: int
    tokens: int

    def __post_init__(self) -> None:
        if not (0 < self.layers <= 1 << 20 and 0 <= self.tokens <= MAX_TOKENS):
            raise UsageError(
                "bad-work", f"work of {printable(self.node_id)}: {self.layers} layers, {self.tokens} tokens"
            )


def layer_tokens(work: Iterable[Work]) -> dict[str, int]:
    """Return each node's layers times tokens, summed over its work, nodes in order of their id."""
    weights: dict[str, int] = {}
    for w in work:
        weights[w.node_id] = weights.get(w.node_id, 0) + w.layers * w.tokens
    return dict(sorted(weights.items()))


def split(amount: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Return the shares of an amount in proportion to the weights; they add up to it, each within one of the exact one.

    What division leaves over goes to the largest remainders, ties to the lowest id: the same weights, the same shares.
    Raises: UsageError no-work where there is an amount and no weight.
    """
    total = sum(weights.values())
    if total == 0:
        if amount:
            raise UsageError("no-work", f"a bill of {amount} micro-credits: expected nodes that served it, found none")
        return dict.fromkeys(weights, 0)
    shares = {node: amount * weight // total for node, weight in weights.items()}
    left = amount - sum(shares.values())
    for node in sorted(weights, key=lambda n: (-(amount * weights[n] % total), n))[:left]:
        shares[node] += 1
    return shares


def check_amount(amount: int, what: str) -> int:
    """Return the amount where it can be booked. Raises: UsageError bad-amount."""
    if not 0 <= amount <= MAX_AMOUNT:
        raise UsageError("bad-amount", f"{what}: expected 0 to {MAX_AMOUNT} micro-credits, found {amount}")
    return amount


def parse_credits(text: str) -> int:
    """Return the micro-credits of credits as people write them: `12`, `0.000001`, `1,250.5`.

    Raises: UsageError bad-amount.
    """
    m = re.fullmatch(r"(\d{1,3}(?:,\d{3})+|\d{1,10})(?:\.(\d{1,6}))?", text.strip(), re.ASCII)
    if m is None:
        raise UsageError(
            "bad-amount",
            f"credits {printable(text, 60)!r}: expected a number such as 12 or 0.25",
            hint="the least amount is a micro-credit, 0.000001",
        )
    return check_amount(int(m[1].replace(",", "")) * MICRO + int((m[2] or "").ljust(6, "0")), "credits")


def format_credits(amount: int) -> str:
    """Return micro-credits as credits, exactly: `-12.5`, `0.000001`, `3`."""
    whole, part = divmod(abs(amount), MICRO)
    return f"{'-' if amount < 0 else ''}{whole:,}" + (f".{part:06d}".rstrip("0") if part else "")
