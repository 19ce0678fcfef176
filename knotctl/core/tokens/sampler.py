"""From logits to the next token: what a request may ask for, and the draw.

In this order: repetition, presence and frequency penalties over the history; logit bias; temperature; top-k; top-p;
min-p. At temperature 0 the likeliest token is taken after the first two. Equal logits go to the lower id. The draw
depends on the seed and the position alone, so a replay of the tokens so far continues as the first run would have.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from knotctl.core.errors import CheckFailed, RequestError, printable

Logits = npt.NDArray[np.float32]
MAX_BIASED = 1024
MAX_LOGPROBS = 1024
# The likeliest tokens are ordered in steps of this many, eight times more each time: nearly always the first holds all
# that top-p leaves, and ordering a vocabulary whole costs ten times the rest.
_FIRST_STEP = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; every field is checked.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 leave all tokens; repetition_penalty 1 and the other
    penalties 0 change nothing; without a seed one is drawn. logprobs is how many likeliest tokens to report, None none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = field(default_factory=lambda: secrets.randbits(53))
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raise RequestError bad-parameter, whose `param` is the first field that is out of its range."""
        _check_real("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0, (1 << 31) - 1)
        _check_real("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        _check_real("repetition_penalty", self.repetition_penalty, 0.0, 10.0, above=True)
        _check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_int("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    def check_ids(self, vocab_size: int) -> None:
        """Raise RequestError bad-token-id where the bias names an id that is no token."""
        for token in self.logit_bias:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    "bad-token-id",
                    f"logit_bias: token id {token}: expected 0 <= id < {vocab_size}, the vocabulary's size",
                    param="logit_bias",
                )


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token drawn, its log-probability and the likeliest tokens with theirs, both where logprobs were asked for.

    The log-probabilities are of the model's own logits, before penalties, bias and temperature.
    """

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


def sample(logits: Logits, params: SamplingParams, position: int, history: Sequence[int] = ()) -> Sampled:
    """Return the token for a position, given the logits of the one before and the tokens that penalties count.

    Shapes: logits f32[V], the vocabulary without padding rows.
    Raises: CheckFailed bad-activation, where a logit is NaN or infinite; RequestError bad-token-id.
    """
    check_finite(logits)
    params.check_ids(len(logits))
    scores = _adjusted(logits, params, history)
    token = int(np.argmax(scores)) if params.temperature == 0 else _draw(scores, params, uniform(params.seed, position))
    if params.logprobs is None:
        return Sampled(token, None, [])
    raw = logits.astype(np.float64)
    shift = raw.max()
    norm = float(shift + np.log(np.exp(raw - shift).sum()))
    best = _ordered(logits, params.logprobs)
    return Sampled(token, float(raw[token]) - norm, [(int(i), float(raw[i]) - norm) for i in best])


def check_finite(logits: Logits) -> None:
    """Raise CheckFailed bad-activation where a logit is NaN or infinite: a station computed garbage."""
    # A sum is one pass without a temporary; only where it is not finite is the culprit looked for.
    with np.errstate(over="ignore", invalid="ignore"):
        if math.isfinite(logits.sum(dtype=np.float64)):
            return
    wrong = int(np.argmin(np.isfinite(logits)))
    raise CheckFailed(
        "bad-activation", f"logits: token {wrong}: expected a finite number, found {float(logits[wrong])}"
    )


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) of 53 random bits that seed and position alone decide, on every machine."""
    digest = hashlib.sha256(f"{seed}:{position}".encode()).digest()
    return float(int.from_bytes(digest[:8], "little") >> 11) / float(1 << 53)


def _adjusted(logits: Logits, params: SamplingParams, history: Sequence[int]) -> Logits | npt.NDArray[np.float64]:
    """Return the logits after penalties and bias, the same array where none applies."""
    penal = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    if not params.logit_bias and not (penal and len(history)):
        return logits
    scores = logits.astype(np.float64)
    if penal and len(history):
        ids, counts = np.unique(np.asarray(history, np.int64), return_counts=True)
        inside = (ids >= 0) & (ids < len(scores))
        ids, counts = ids[inside], counts[inside]
        seen = scores[ids]
        seen = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
        scores[ids] = seen - params.presence_penalty - params.frequency_penalty * counts
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    return scores


def _draw(scores: npt.NDArray[Any], params: SamplingParams, u: float) -> int:
    """Return the token at u of the mass that top-k, top-p and min-p leave."""
    if 0 < params.top_k < len(scores):
        ids = _ordered(scores, params.top_k)
        kept = _draw_from(scores[ids], params, u, ordered=True)
        return int(ids[kept])
    return _draw_from(scores, params, u, ordered=False)


def _draw_from(scores: npt.NDArray[Any], params: SamplingParams, u: float, *, ordered: bool) -> int:
    """Return the index drawn after top-p and min-p; `ordered` where the likeliest come first already."""
    # A temperature near zero may divide to -inf, whose weight is 0 as it should be.
    with np.errstate(over="ignore"):
        weights = np.exp((scores.astype(np.float64) - scores.max()) / params.temperature)
    # min-p: against the likeliest, whose weight is 1. Like top-p it leaves the first so many of the order.
    limit = len(weights) if params.min_p == 0 else int(np.count_nonzero(weights >= params.min_p))
    if limit == len(weights) and params.top_p == 1:
        order, mass = None, np.cumsum(weights)
    else:
        enough = params.top_p * float(weights.sum())
        step = _FIRST_STEP
        while True:
            count = min(step, limit)
            order = np.arange(count) if ordered else _ordered(scores, count)
            mass = np.cumsum(weights[order])
            if count == limit or mass[-1] >= enough:
                break
            step *= 8
        if params.top_p < 1:
            mass = mass[: int(np.searchsorted(mass, enough)) + 1]
    drawn = int(np.searchsorted(mass, u * mass[-1], side="right"))
    return drawn if order is None else int(order[drawn])


def _ordered(scores: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """Return the ids of so many highest scores, in that order, the lower id first among equals."""
    ids = np.arange(len(scores))
    if count < len(scores):
        # Whatever a partition leaves at its edge is arbitrary among equals, so it only tells where the edge is.
        edge = len(scores) - count
        floor = np.partition(scores, edge)[edge] if count else np.inf
        above = np.flatnonzero(scores > floor)
        ids = np.concatenate((above, np.flatnonzero(scores == floor)[: count - len(above)]))
    return ids[np.lexsort((ids, -scores[ids]))]


def _checked_bias(bias: Mapping[Any, Any]) -> dict[int, float]:
    """Return the bias by id; ids may be written as text, as JSON's keys are."""
    if not isinstance(bias, Mapping) or len(bias) > MAX_BIASED:
        raise _refused("logit_bias", f"at most {MAX_BIASED} ids and their biases", bias)
    checked: dict[int, float] = {}
    for key, value in bias.items():
        written = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10
        token = int(key) if written else key
        if type(token) is not int or not 0 <= token < 1 << 31:
            raise _refused("logit_bias", "token ids as keys", key)
        _check_real("logit_bias", value, -100.0, 100.0)
        checked[token] = float(value)
    return checked


def _check_real(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    # bool is an int to Python, and NaN is false to every comparison
    if type(value) not in (int, float) or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        raise _refused(name, f"a number {'above' if above else 'from'} {low:g} to {high:g}", value)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise _refused(name, f"a whole number from {low} to {high}", value)


def _refused(name: str, expected: str, found: object) -> RequestError:
    return RequestError("bad-parameter", f"{name}: expected {expected}, found {_shown(found)}", param=name)


def _shown(found: object) -> str:
    if isinstance(found, int) and not -(1 << 64) < found < 1 << 64:
        return "a number beyond 64 bits"  # Python refuses to write out one of 5,000 digits
    return printable(repr(found), 60) if found is None or isinstance(found, int | float | str) else type(found).__name__
