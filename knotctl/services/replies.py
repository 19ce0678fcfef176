"""Errors as HTTP replies: OpenAI's shape under /v1, our own everywhere else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from knotctl.core.errors import KnotctlError, RequestError

# Codes whose status is not that of their class; man knot-frame(5), ERRORS.
_STATUS = {"too-large": 413, "bad-activation": 422}
# OpenAI's error types by status; others of 400 to 499 are "invalid_request_error", and of 500 on "server_error".
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class JsonReply(Response):
    """A JSON document. Text is escaped to ASCII, so that nothing a model or client wrote can fail to be encoded."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the document's bytes."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def status_of(error: KnotctlError) -> int:
    """Return the HTTP status that an error is answered with."""
    return error.status if isinstance(error, RequestError) else _STATUS.get(error.code, error.http_status)


def error_document(path: str, error: KnotctlError) -> dict[str, Any]:
    """Return the error in the shape that clients of this path expect."""
    if path != "/v1" and not path.startswith("/v1/"):
        return dict(error.to_json())
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    return {"error": {"message": message, "type": kind, "param": getattr(error, "param", None), "code": error.code}}


def error_reply(path: str, error: KnotctlError, headers: Mapping[str, str] | None = None) -> JsonReply:
    """Return the reply to a request that failed; says when to try again where that can help."""
    status = status_of(error)
    fields = dict(headers or {})
    if status in (429, 503):
        fields.setdefault("retry-after", "1")
    if status == 401:
        fields["www-authenticate"] = "Bearer"
    return JsonReply(error_document(path, error), status, fields)
