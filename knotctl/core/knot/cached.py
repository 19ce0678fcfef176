"""Knots made from GGUFs on the way to something else, kept in the cache folder and found again by identity."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from knotctl import __version__
from knotctl.core.errors import KnotctlError
from knotctl.core.gguf.parts import GgufModel
from knotctl.core.knot.from_gguf import default_destination, encode_model
from knotctl.core.knot.verify import verify_knot
from knotctl.core.source.opening import open_source


def cached_path(model: GgufModel, folder: Path, name: str | None = None) -> Path:
    """Return where in the folder the knot of an open GGUF belongs; its name is the model's, its folder says which.

    The key holds each part's identity, so that a file that changed is another one, and our version, whose encoder
    may give other bytes.
    """
    identities = [f"{source.name}\0{source.size}\0{source.identity}" for source in model.sources]
    key = hashlib.sha256("\0".join([__version__, *identities]).encode()).hexdigest()[:16]
    return folder / key / (name or default_destination(model.sources[0].name).name)


def is_whole(path: Path) -> bool:
    """Return whether a sound knot lies there, by its header and size; writing it has proved its data."""
    if not path.is_file():
        return False
    try:
        source = open_source(str(path))
        try:
            return verify_knot(source).ok
        finally:
            source.close()
    except KnotctlError:
        return False


def encode_cached(model: GgufModel, path: Path, advance: Callable[[int], None]) -> None:
    """Encode the open GGUF to its place in the cache, where it replaces what is not whole.

    Units: advance is called with bytes, work_bytes(model) in all.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    encode_model(model, path, force=True, advance=advance)
