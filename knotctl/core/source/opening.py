"""From what a user types to an open byte source."""

from __future__ import annotations

import re

from knotctl.core.errors import UsageError
from knotctl.core.source.base import ByteSource
from knotctl.core.source.file import FileSource

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def open_source(ref: str) -> ByteSource:
    """Return the open source that a path names.

    Raises: UsageError for a scheme that is not known, SourceError where the bytes cannot be had.
    """
    scheme = _SCHEME.match(ref)
    if scheme is None:
        return FileSource(ref)
    raise UsageError("unsupported-scheme", f"{ref}: scheme {scheme[1]}: expected a path")
