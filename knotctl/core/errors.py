"""The one tree of errors: every failure has a kebab-case code, an exit status and an HTTP status.

A message names the thing, the place, what was expected and what was found; a hint is the remedy, where there is one.
Core code raises these and nothing else. Exit statuses are a contract with scripts (man knotctl, EXIT STATUS).
"""

from __future__ import annotations

from typing import ClassVar


def printable(text: object, limit: int = 200) -> str:
    """Return text from a file or the wire made safe for a terminal or log: escaped, quoted by nobody, cut to limit."""
    s = str(text)
    cut = s if len(s) <= limit else s[: limit - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in cut)


class KnotctlError(Exception):
    """Base of every failure that knotctl names."""

    exit_code: ClassVar[int] = 70
    http_status: ClassVar[int] = 500

    def __init__(self, code: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint

    def to_json(self) -> dict[str, dict[str, str | None]]:
        """Return the error document that `--json` and every service print."""
        return {"error": {"code": self.code, "message": self.message, "hint": self.hint}}


class CheckFailed(KnotctlError):
    """The check ran and its answer is no: findings of severity error, gaps in a plan, a bench below its floor."""

    exit_code = 1
    http_status = 422


class UsageError(KnotctlError):
    """What was asked for makes no sense; nothing was tried."""

    exit_code = 2
    http_status = 400


class RequestError(UsageError):
    """A request to a service is refused; `param` names the field at fault, `status` the HTTP status."""

    def __init__(
        self, code: str, message: str, *, param: str | None = None, status: int = 400, hint: str | None = None
    ) -> None:
        super().__init__(code, message, hint=hint)
        self.param = param
        self.status = status


class FormatError(KnotctlError):
    """Bytes break a format."""

    exit_code = 3
    http_status = 400


class GgufError(FormatError):
    """Bytes that are not the GGUF they claim to be."""


class KnotError(FormatError):
    """Bytes that are not the knot they claim to be."""


class FrameError(FormatError):
    """Bytes that are not the frame they claim to be."""


class SourceError(KnotctlError):
    """Bytes could not be had, or not be put where they belong."""

    exit_code = 4
    http_status = 503


class ObjectChanged(SourceError):
    """The file or object behind an open source is not the one that was opened."""

    http_status = 409


class ModelError(KnotctlError):
    """The model cannot run here: an unsupported architecture or type, or a tensor that is missing."""

    exit_code = 5
    http_status = 501


class Conflict(KnotctlError):
    """What is asked does not fit the state that is there: a gap in positions, a session of another span."""

    exit_code = 5
    http_status = 409


class WrongIdentity(Conflict):
    """Two parties speak of different models, spans or epochs."""


class BudgetError(KnotctlError):
    """The memory budget cannot be met; the message holds the table that shows why."""

    exit_code = 6
    http_status = 507


class Cancelled(KnotctlError):
    """Whoever asked for the work has left."""

    exit_code = 130
    http_status = 499


def as_error(e: Exception) -> KnotctlError:
    """Return any exception as one of ours, to end something with: a request, a stream."""
    return e if isinstance(e, KnotctlError) else KnotctlError("internal", f"{type(e).__name__}: {e}")
