"""Findings as SARIF 2.1.0, for code scanning.

Source: OASIS SARIF 2.1.0; GitHub's limits: 25,000 results a run, a stable ruleId and fingerprint for each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from knotctl import __version__
from knotctl.core.findings import Finding, Severity
from knotctl.core.knot.codes import CODES
from knotctl.core.knot.verify import Verification

_RESULTS = 25_000
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}


def sarif(results: Sequence[Verification]) -> dict[str, Any]:
    """Return the SARIF log of one run; of more findings than a run may have, errors come first."""
    order = list(Severity)
    found = sorted(((r, f) for r in results for f in r.findings), key=lambda rf: order.index(rf[1].severity))
    driver = {
        "name": "knotctl",
        "semanticVersion": f"{__version__}.0" if __version__.count(".") == 1 else __version__,
        "rules": [
            {
                "id": code,
                "shortDescription": {"text": c.meaning},
                "help": {"text": f"{c.meaning} See FINDINGS in the manual page knot(5)."},
                "defaultConfiguration": {"level": _LEVELS[c.severity]},
            }
            for code, c in CODES.items()
        ],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "artifacts": [{"location": {"uri": _uri(r.path)}, "length": r.file_bytes} for r in results],
        "results": [_result(r, f) for r, f in found[:_RESULTS]],
    }
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _result(r: Verification, f: Finding) -> dict[str, Any]:
    message = f.message if f.tensor is None else f"{f.tensor}: {f.message}"
    # A binary file has no lines, but viewers want one.
    region = {"startLine": 1} | ({} if f.offset is None else {"byteOffset": f.offset, "byteLength": 0})
    same = hashlib.sha256("\0".join((f.code, r.path, f.tensor or "", str(f.offset))).encode("utf-8", "replace"))
    return {
        "ruleId": f.code,
        "ruleIndex": list(CODES).index(f.code),
        "level": _LEVELS[f.severity],
        "message": {"text": f"{message} Mend: {f.repair}" if f.repair else message},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": _uri(r.path)}, "region": region}}],
        "partialFingerprints": {"knotctlFinding/v1": same.hexdigest()},
    }


def _uri(path: str) -> str:
    return path if "://" in path else quote(path, errors="replace")
