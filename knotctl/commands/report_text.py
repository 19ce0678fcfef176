"""Findings as lines of text: one a finding, then a summary a knot."""

from __future__ import annotations

from collections.abc import Iterator

from knotctl.core.errors import printable
from knotctl.core.findings import Finding, Severity
from knotctl.core.knot.verify import Verification
from knotctl.core.sizes import format_size


def text_lines(result: Verification) -> Iterator[str]:
    """Yield a line a finding, `path:offset: severity: code: tensor: message (fix: command)`, then the summary."""
    path = printable(result.path, 4096)
    for f in result.findings:
        yield f"{path}{'' if f.offset is None else f':{f.offset}'}: {f.severity}: {f.code}: {_message(f)}{_fix(f)}"
    if result.unlisted:
        yield f"{path}: and {result.unlisted} more findings of these codes"
    yield f"{path}: {_summary(result)}"


def _message(found: Finding) -> str:
    return found.message if found.tensor is None else f"{printable(found.tensor)}: {found.message}"


def _fix(found: Finding) -> str:
    return "" if found.repair is None else f" (fix: {printable(found.repair, 4096)})"


def _summary(result: Verification) -> str:
    if not result.ok:
        errors = sum(f.severity is Severity.ERROR for f in result.findings)
        return f"FAILED, {errors} {'error' if errors == 1 else 'errors'}"
    assert result.header is not None  # a header that cannot be made out is an error
    what = f"{len(result.header.tensors)} tensors, {format_size(result.file_bytes)}, knot_id {result.knot_id}"
    return "; ".join([f"ok, {what}", *_looked_at(result)])


def _looked_at(result: Verification) -> Iterator[str]:
    """Yield what was looked at, so that nobody takes a check of structure for one of the bytes."""
    if result.against is not None:
        yield f"every tensor as in {printable(result.against, 4096)}"
    if result.proved_before:
        yield "payload verified before, by the proof"
    elif result.data_bytes:
        share = result.data_bytes / max(result.payload_bytes or 0, 1)
        yield f"{format_size(result.data_bytes)} of payload ({share:.0%}) as they were encoded"
    elif result.data_bytes == 0:
        yield "payload read, but without digests there was nothing to compare it with"
    elif result.against is None:
        yield "structure checked, payload bytes not read"
