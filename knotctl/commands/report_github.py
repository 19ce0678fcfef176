"""Findings as GitHub's annotations, and a summary of the job's step.

Source: GitHub's "Workflow commands": ten annotations of a kind a step are shown, a summary is at most 1 MiB.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from knotctl.core.errors import SourceError, printable
from knotctl.core.findings import Finding, Severity
from knotctl.core.knot.verify import Verification
from knotctl.core.sizes import format_size

_KINDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
# Of ten that are shown the last says how many more there are.
_SHOWN = 9
SUMMARY_CAP = 1 << 20


def workflow_commands(results: Sequence[Verification]) -> Iterator[str]:
    """Yield workflow commands: of each kind as many findings as are shown, then one that counts the rest."""
    for severity, kind in _KINDS.items():
        found = [(r, f) for r in results for f in r.findings if f.severity is severity]
        for r, f in found[:_SHOWN]:
            yield _command(kind, r.path, f.code, _text(f))
        unlisted = sum(r.unlisted for r in results) if severity is Severity.ERROR else 0
        more = max(len(found) - _SHOWN, 0) + unlisted
        if more and found:
            yield _command(kind, found[0][0].path, "knotctl verify", f"and {more} more: see the summary of the step")


def write_summary(results: Sequence[Verification]) -> None:
    """Append the summary to the file that GitHub names, if it does."""
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        return
    path = Path(name)
    try:
        room = SUMMARY_CAP - (path.stat().st_size if path.exists() else 0)
        with path.open("a", encoding="utf-8") as file:
            file.write(summary(results, room))
    except OSError as e:
        raise SourceError("write-failed", f"{printable(name)}: cannot write the step's summary: {e.strerror}") from e


def summary(results: Sequence[Verification], room: int) -> str:
    """Return the Markdown of the step's summary, cut to `room` bytes of UTF-8."""
    lines = ["### knotctl verify", "", "| knot | result | size | knot id |", "|---|---|---|---|"]
    lines += [f"| {_cell(r.path)} | {_result(r)} | {format_size(r.file_bytes)} | {r.knot_id or ''} |" for r in results]
    if any(r.findings for r in results):
        lines += ["", "| knot | place | severity | finding | mend |", "|---|---|---|---|---|"]
        lines += [_row(r, f) for r in results for f in r.findings]
    kept, size = [], 0
    for i, line in enumerate(lines):
        size += len(line.encode()) + 1
        if size > room - 80:
            kept.append(f"\n… and {len(lines) - i} lines more")
            break
        kept.append(line)
    return "\n".join(kept) + "\n"


def _result(r: Verification) -> str:
    count = sum(f.severity is Severity.ERROR for f in r.findings) + r.unlisted
    return "ok" if r.ok else f"**{count} {'error' if count == 1 else 'errors'}**"


def _row(r: Verification, f: Finding) -> str:
    cells = (r.path, "" if f.offset is None else f.offset, f.severity, f"{f.code}: {_text(f)}", f.repair or "")
    return f"| {' | '.join(_cell(c) for c in cells)} |"


def _text(f: Finding) -> str:
    place = "" if f.offset is None else f"byte {f.offset}: "
    return printable(f"{place}{f.message}" if f.tensor is None else f"{place}{f.tensor}: {f.message}", 2000)


def _cell(value: object) -> str:
    return printable(value, 500).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("`", "&#96;")


def _command(kind: str, path: str, title: str, text: str) -> str:
    def escape(value: str, also: str = "") -> str:
        return "".join(f"%{ord(c):02X}" if c in "%\r\n" + also else c for c in value)

    return f"::{kind} file={escape(printable(path, 4096), ':,')},title={escape(title, ':,')}::{escape(text)}"
