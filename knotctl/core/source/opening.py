"""From what a user types to an open byte source."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from knotctl.core.errors import UsageError
from knotctl.core.source.base import ByteSource
from knotctl.core.source.file import FileSource

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def open_source(ref: str) -> ByteSource:
    """Return the open source that a path, an http(s):// URL, s3://bucket/key or hf://org/repo/file names.

    Raises: UsageError for a scheme that is not known, SourceError where the bytes cannot be had.
    """
    scheme = _SCHEME.match(ref)
    if scheme is None:
        return FileSource(ref)
    # Each with a client library that a local file does without.
    if scheme[1] in ("http", "https"):
        from knotctl.core.source.http import open_http

        return open_http(ref)
    if scheme[1] == "s3":
        from knotctl.core.source.s3 import open_s3

        return open_s3(ref)
    if scheme[1] == "hf":
        from knotctl.core.source.hub import open_hub

        return open_hub(ref)
    raise UsageError("unsupported-scheme", f"{ref}: scheme {scheme[1]}: expected a path, http(s)://, s3:// or hf://")


def expand_refs(refs: Sequence[str]) -> list[str]:
    """Return the refs with shell patterns replaced by the paths that match, sorted; a path that exists is no pattern.

    Raises: UsageError `no-match` for a pattern that nothing matches.
    """
    found = []
    for ref in refs:
        if _SCHEME.match(ref) or not glob.has_magic(ref) or Path(ref).exists():
            found.append(ref)
            continue
        matches = sorted(glob.glob(ref, recursive=True))  # noqa: PTH207 -- Path.glob takes no absolute patterns
        if not matches:
            raise UsageError("no-match", f"{ref}: no file matches")
        found += matches
    return found
