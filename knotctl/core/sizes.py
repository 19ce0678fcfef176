"""Sizes in bytes as people write them: `128MiB`, `1GiB`, `4096`."""

from __future__ import annotations

import re

from knotctl.core.errors import UsageError

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Return the bytes that `128MiB`, `1.5GiB`, `64M` (binary), `500MB` (decimal) or `4096` stand for."""
    m = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)(iB|B|)", text.strip(), re.IGNORECASE)
    if m is None:
        raise UsageError("bad-size", f"size {text!r}: expected bytes or a size such as 128MiB or 1GiB")
    decimal = m[2] and m[3].upper() == "B"
    unit = 1000 ** " KMGT".index(m[2].upper()) if decimal else _UNITS[m[2].upper()]
    return int(float(m[1]) * unit) if "." in m[1] else int(m[1]) * unit


def format_size(count: int) -> str:
    """Return a byte count in the largest binary unit that keeps three digits: `46.9 MiB`."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
