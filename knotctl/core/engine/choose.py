"""Whose next tokens a batch is to give, and the choice: by the engine over its own stations, by the tail of a route.

Both run this module, so a stream's tokens are the same wherever its logits were computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from knotctl.core.errors import CheckFailed, FrameError, KnotctlError, UsageError, as_error, printable
from knotctl.core.tokens.sampler import Logits, Sampled, SamplingParams, sample
from knotctl.core.wire.frame import Frame, Segment
from knotctl.core.wire.layout import Flags, Kind

_DEFAULTS = SamplingParams(seed=0)
_NAMES = tuple(f.name for f in fields(SamplingParams))

# The tokens of one ask, or what went wrong with that one.
Chosen = list[Sampled] | KnotctlError


@dataclass(frozen=True, slots=True)
class Ask:
    """The tokens wanted behind the last 1 + len(draft) tokens of a segment, of which those of the draft are on trial.

    `position` is that of the first token wanted; `history` the tokens before it, needed where penalties count them;
    ids from `choices` on have no text and are never chosen.
    """

    segment: int
    position: int
    choices: int
    params: SamplingParams
    draft: Sequence[int] = ()
    history: Sequence[int] = ()

    @property
    def rows(self) -> int:
        """How many tokens of the segment need logits."""
        return 1 + len(self.draft)

    @property
    def counts_history(self) -> bool:
        """Whether the choice depends on the tokens before."""
        p = self.params
        return p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0

    def to_json(self) -> dict[str, Any]:
        """Return the entry of a frame's `sample` metadata; what is as usual is left out."""
        params: dict[str, Any] = {}
        for name in _NAMES:
            value = getattr(self.params, name)
            if name == "seed" or value != getattr(_DEFAULTS, name):
                params[name] = {str(k): v for k, v in value.items()} if name == "logit_bias" else value
        out: dict[str, Any] = {"segment": self.segment, "position": self.position, "choices": self.choices}
        out["params"] = params
        if self.draft:
            out["draft"] = list(self.draft)
        if self.counts_history:
            out["history"] = list(self.history)
        return out

    @classmethod
    def from_json(cls, entry: object, segments: Sequence[Segment]) -> Ask:
        """Return the ask of a `sample` entry. Raises: UsageError bad-sample; RequestError bad-parameter."""
        match entry:
            case {
                "segment": int(segment),
                "position": int(position),
                "choices": int(choices),
                "params": {"seed": _} as params,
            } if 0 <= segment < len(segments) and position >= 0 and choices > 0 and params.keys() <= set(_NAMES):
                draft, history = _ids(entry, "draft"), _ids(entry, "history")
                if len(draft) < segments[segment].n_tokens:
                    return cls(segment, position, choices, SamplingParams(**params), draft, history)
        raise UsageError(
            "bad-sample",
            f"frame: sample {printable(entry)}: expected segment, position, choices, params with a seed, "
            "a draft shorter than the segment, history",
        )


def choose(logits: Logits, ask: Ask) -> list[Sampled]:
    """Return the tokens chosen: one behind the first row, and one more behind each draft token that was right.

    Shapes: logits float32 [1 + len(draft), vocab_size].
    """
    history = list(ask.history) if ask.counts_history else []
    chosen: list[Sampled] = []
    for i, scores in enumerate(logits):
        choice = sample(scores[: ask.choices], ask.params, ask.position + i, history)
        chosen.append(choice)
        if i == len(ask.draft) or choice.token != ask.draft[i]:
            break
        history.append(choice.token)
    return chosen


def choose_all(logits: Logits, asks: Sequence[Ask]) -> list[Chosen]:
    """Return the tokens of every ask, whose rows follow one another, or why there are none: each stands alone.

    Shapes: logits float32 [sum of the asks' rows, vocab_size].
    """
    chosen: list[Chosen] = []
    row = 0
    for ask in asks:
        try:
            chosen.append(choose(logits[row : row + ask.rows], ask))
        except Exception as e:
            chosen.append(as_error(e))
        row += ask.rows
    return chosen


def wanted_rows(asks: Sequence[Ask]) -> list[tuple[int, int]]:
    """Return the `logits` metadata of a frame with these asks."""
    return [(ask.segment, ask.rows) for ask in asks]


def parse_asks(frame: Frame) -> list[Ask] | None:
    """Return the asks in a frame's metadata, None where its caller wants no tokens chosen.

    Raises: UsageError bad-sample; RequestError bad-parameter.
    """
    entries = frame.meta.get("sample")
    if entries is None:
        return None
    if not isinstance(entries, list):
        raise UsageError("bad-sample", f"frame: sample {printable(entries)}: expected a list")
    return [Ask.from_json(entry, frame.segments) for entry in entries]


def sampled_frame(asked: Frame, chosen: Sequence[Chosen], asks: Sequence[Ask]) -> Frame:
    """Return the frame of kind 5 that answers `asked`: a segment an ask, its tokens at their positions.

    Its metadata has `logprobs` where any was asked for: a row's own, and the likeliest as [id, log-probability]; and
    `failed`, the asks without tokens, as [index, code, message].
    Raises: the first failure, where all failed.
    """
    segments, rows, failed = [], [], []
    for i, (ask, tokens) in enumerate(zip(asks, chosen, strict=True)):
        if isinstance(tokens, KnotctlError):
            failed.append([i, tokens.code, tokens.message])
        else:
            segments.append(replace(asked.segments[ask.segment], position=ask.position, n_tokens=len(tokens)))
            rows += tokens
    if not rows:
        raise next(c for c in chosen if isinstance(c, KnotctlError))
    meta: dict[str, Any] = {key: asked.meta[key] for key in ("zeroed",) if key in asked.meta}
    if failed:
        meta["failed"] = failed
    if any(choice.logprob is not None for choice in rows):
        meta["logprobs"] = [[choice.logprob, choice.top] for choice in rows]
    ids = np.asarray([choice.token for choice in rows], np.int32).reshape(-1, 1)
    return Frame(Kind.SAMPLED, asked.knot_id, tuple(segments), ids, meta, asked.flags & Flags.DEGRADED)


def parse_sampled(frame: Frame, asks: Sequence[Ask], segments: Sequence[Segment]) -> list[Chosen]:
    """Return what a frame of kind 5 answers these asks, of a batch of these segments, with.

    Raises: FrameError bad-answer where it answers something else.
    """
    failed = _failures(frame.meta.get("failed", []), len(asks))
    logprobs = frame.meta.get("logprobs", [[None, []]] * frame.rows)
    answers = iter(frame.segments)
    if len(frame.segments) + len(failed) != len(asks) or not isinstance(logprobs, list) or len(logprobs) != frame.rows:
        raise _bad_answer("a segment for each ask")
    chosen: list[Chosen] = []
    row = 0
    for i, ask in enumerate(asks):
        if i in failed:
            chosen.append(failed[i])
            continue
        answer = next(answers)
        if answer.request_id != segments[ask.segment].request_id or answer.position != ask.position:
            raise _bad_answer("the segments of the asks, in their order")
        rows = range(row, row + answer.n_tokens)
        row = rows.stop
        tokens = [Sampled(int(frame.payload[r, 0]), *_logprobs(logprobs[r])) for r in rows]
        # however many of a draft were right follows from the tokens themselves
        right = next((n for n, d in enumerate(ask.draft) if n >= len(tokens) or tokens[n].token != d), len(ask.draft))
        if len(tokens) != right + 1 or any(t.token >= ask.choices for t in tokens):
            raise _bad_answer("the tokens that the draft leads to")
        chosen.append(tokens)
    return chosen


def _failures(entries: object, count: int) -> dict[int, KnotctlError]:
    failed: dict[int, KnotctlError] = {}
    for entry in entries if isinstance(entries, list) else [None]:
        match entry:
            case [int(i), str(code), str(message)] if 0 <= i < count:
                failed[i] = CheckFailed(printable(code, 60), printable(message))
            case _:
                raise _bad_answer("failed as a list of [index, code, message]")
    return failed


def _bad_answer(expected: str) -> FrameError:
    return FrameError("bad-answer", f"sampled frame: expected {expected}")


def _logprobs(entry: object) -> tuple[float | None, list[tuple[int, float]]]:
    match entry:
        case [(float() | None) as own, list(top)] if all(
            isinstance(t, list) and len(t) == 2 and isinstance(t[0], int) and isinstance(t[1], float) for t in top
        ):
            return own, [(t[0], t[1]) for t in top]
    raise _bad_answer("logprobs as [own, [[id, value], ...]]")


def _ids(entry: Any, key: str) -> list[int]:
    ids = entry.get(key, [])
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise UsageError("bad-sample", f"frame: sample {key} {printable(ids)}: expected token ids")
    return ids
