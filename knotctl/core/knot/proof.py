"""What was verified of which object: kept in a file, so that it need not be hashed again while it is the same object.

A record names the object's identity (file: device, inode, size, time of change; store: ETag) and the knot's id. A
changed file has another identity, so its record is void by itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from knotctl import __version__
from knotctl.core.atomic import write_whole
from knotctl.core.errors import FormatError, SourceError, printable
from knotctl.core.knot.entry import KnotHeader
from knotctl.core.source.base import ByteSource
from knotctl.core.strict_json import parse_json_object

_FORMAT = "knot-proof"
_SCHEMA = 1
# Records are some 200 bytes; a file of this size holds a store of knots.
_CAP = 4 << 20
_FIELDS = ("identity", "knot_id", "path", "knotctl")


class ProofFile:
    """Records by identity, in a file that need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = _read(path)

    def holds(self, source: ByteSource, header: KnotHeader) -> bool:
        """Say whether all bytes of this very object were verified before."""
        record = self._records.get(source.identity)
        return record is not None and record["knot_id"] == header.knot_id

    def add(self, source: ByteSource, header: KnotHeader) -> None:
        """Record that all bytes of this object were verified, in place of what was said of its name before.

        Raises: SourceError where the file cannot be written.
        """
        kept = [r for r in self._records.values() if r["path"] != source.name]
        values = (source.identity, header.knot_id, source.name, __version__)
        kept.append(dict(zip(_FIELDS, values, strict=True)))
        self._records = {r["identity"]: r for r in kept}
        document = {"format": _FORMAT, "schema": _SCHEMA, "verified": list(self._records.values())}
        write_whole(self.path, json.dumps(document, indent=1).encode() + b"\n")


def _read(path: Path) -> dict[str, dict[str, str]]:
    try:
        with path.open("rb") as file:
            data = file.read(_CAP + 1)
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise SourceError("read-failed", f"{printable(path)}: cannot read: {e.strerror}") from e
    # A file that is no proof is refused, not replaced: it may be a model whose name was given by mistake.
    if len(data) > _CAP or not data.startswith(b"{"):
        raise _refuse(path, "expected a JSON object")
    document = parse_json_object(data, lambda _, what: _refuse(path, what))
    records: Any = document.get("verified")
    if document.get("format") != _FORMAT or document.get("schema") != _SCHEMA or type(records) is not list:
        raise _refuse(path, f"expected format {_FORMAT}, schema {_SCHEMA}, a list under `verified`")
    for r in records:
        if type(r) is not dict or any(type(r.get(field)) is not str for field in _FIELDS):
            raise _refuse(path, f"expected records of {', '.join(_FIELDS)}")
    return {r["identity"]: r for r in records}


def _refuse(path: Path, what: str) -> FormatError:
    return FormatError(
        "bad-proof", f"{printable(path)}: no proof of verify: {what}", hint="name another file, or remove this one"
    )
