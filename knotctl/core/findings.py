"""What `verify` reports: one finding a defect, collected and never raised.

Source: CONTRACT section 2 (`verify`), man knot(5).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much a finding matters: an error fails the check, a warning and a note do not."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect: its code, where it is, what was expected and found, and the command that repairs it.

    Units: offset in bytes from the start of the file, None where the defect has no single place.
    """

    code: str
    severity: Severity
    message: str
    offset: int | None = None
    tensor: str | None = None
    repair: str | None = None
