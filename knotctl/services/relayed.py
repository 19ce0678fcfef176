"""What a head tells the tracker of a stream, a JSON object a line, and its pieces as they stand in one.

A line has the `steps` behind it, so that whoever has the lines can have another head go on where one was lost; `text`
and `tokens` are what they add to the reply. Source: man knot-service(5), WORKERS.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from knotctl.core.engine.stream import Step
from knotctl.core.errors import KnotctlError, RequestError, UsageError, printable
from knotctl.services.replies import status_of
from knotctl.services.text import Delta, TokenText

LINES_TYPE = "application/x-ndjson"
# A head says something at least so often, so that one that hangs is told from one that works.
BEAT_SECONDS = 1.0


def line(document: dict[str, Any]) -> bytes:
    """Return a document as a line."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def step_json(step: Step) -> list[Any]:
    """Return a step as it stands in `steps`."""
    return [step.token, step.logprob, step.top]


def parse_steps(entries: object) -> list[Step]:
    """Return the steps of a list of them. Raises: UsageError bad-steps."""
    steps = []
    for entry in entries if isinstance(entries, list) else [None]:
        match entry:
            case [int(token), (float() | None) as logprob, list(top)]:
                steps.append(Step(token, logprob, [(int(i), float(p)) for i, p in top]))
            case _:
                raise UsageError("bad-steps", f"steps: {printable(entry)}: expected [token, logprob, top]")
    return steps


def delta_json(delta: Delta) -> dict[str, Any]:
    """Return what a delta adds to a reply; nothing of what is empty."""
    found: dict[str, Any] = {"text": delta.text} if delta.text else {}
    if delta.tokens:
        found["tokens"] = [
            [_b64(t.data), t.logprob, [[_b64(data), logprob] for data, logprob in t.top], t.offset]
            for t in delta.tokens
        ]
    return found


def parse_delta(document: dict[str, Any]) -> Delta:
    """Return the delta of a line."""
    tokens = tuple(
        TokenText(base64.b64decode(data), logprob, tuple((base64.b64decode(d), p) for d, p in top), offset)
        for data, logprob, top, offset in document.get("tokens", ())
    )
    return Delta(document.get("text", ""), tokens)


def error_json(error: KnotctlError) -> dict[str, Any]:
    """Return the line of a stream that failed."""
    param = getattr(error, "param", None)
    return {
        "error": {
            "code": error.code, "message": error.message, "hint": error.hint, "status": status_of(error),
            "param": param,
        }
    }  # fmt: skip


def parse_error(document: object) -> RequestError:
    """Return the error of an error document, whoever sent it."""
    match document:
        case {"error": {"code": str(code), "message": str(message)} as e}:
            status = e.get("status")
            return RequestError(
                printable(code, 60), printable(message, 1000), param=e.get("param"), hint=e.get("hint"),
                status=status if isinstance(status, int) and 400 <= status < 600 else 502,
            )  # fmt: skip
    return RequestError("bad-answer", "a worker did not say what went wrong", status=502)


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
