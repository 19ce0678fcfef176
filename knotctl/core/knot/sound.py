"""Whether a file is a whole model file, told by its own structure and digests."""

from __future__ import annotations

from pathlib import Path

from knotctl.core.errors import FormatError, KnotError
from knotctl.core.findings import Severity
from knotctl.core.gguf.header import read_gguf
from knotctl.core.knot.verify import verify_knot
from knotctl.core.magic import MAGIC_BYTES, recognise
from knotctl.core.source.base import ByteSource
from knotctl.core.source.file import FileSource


def check_model_file(path: Path, name: str) -> None:
    """Refuse a file that is no knot whose bytes have their digests, and no GGUF that is whole; `name` is for messages.

    Raises: KnotError, GgufError, FormatError unknown-format.
    """
    source: ByteSource = FileSource(str(path))
    try:
        source.name = name
        kind = recognise(source.read(0, min(MAGIC_BYTES, source.size)))
        if kind == "knot":
            _check_knot(source)
        elif kind == "GGUF":
            read_gguf(source)
        else:
            found = f"a {kind}" if kind else "something else" if source.size else "an empty file"
            raise FormatError("unknown-format", f"{name}: magic: expected a knot or GGUF, found {found}")
    finally:
        source.close()


def _check_knot(source: ByteSource) -> None:
    errors = [f for f in verify_knot(source, read_data=True).findings if f.severity is Severity.ERROR]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise KnotError(errors[0].code, f"{source.name}: {errors[0].message}{more}", hint="knotctl verify names all")
