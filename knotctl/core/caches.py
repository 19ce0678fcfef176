"""The user's cache folder: what can be made or fetched again, kept apart from what cannot.

Source: XDG Base Directory Specification; Cache Directory Tagging Specification (CACHEDIR.TAG); man knotctl(1), FILES.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from knotctl.core.errors import SourceError

# Backup tools skip a folder that holds a file of this name with these first 43 bytes.
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = "Signature: 8a477f597d28d172789f06886806bc55\n# This folder can be deleted: knotctl makes it again.\n"


def cache_folder(*parts: str) -> Path:
    """Return knotctl's cache folder, or a folder in it, created and tagged.

    It is $KNOTCTL_CACHE_DIR, else $XDG_CACHE_HOME/knotctl where that is absolute, else ~/.cache/knotctl.
    Raises: SourceError where it cannot be written.
    """
    try:
        root = _root()
        folder = root.joinpath(*parts)
        folder.mkdir(parents=True, exist_ok=True)
        tag = root / _TAG
        if not tag.exists():
            tag.write_text(_TAG_TEXT)
    # RuntimeError: the user has no home folder, as under some service managers.
    except (OSError, RuntimeError) as e:
        raise SourceError(
            "write-failed",
            f"cache folder: {e}",
            hint="set KNOTCTL_CACHE_DIR to a folder that you can write",
        ) from e
    return folder


def _root() -> Path:
    if chosen := os.environ.get("KNOTCTL_CACHE_DIR"):
        return Path(chosen).absolute()
    # A relative path is to be ignored, says the specification.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path("~/.cache").expanduser()) / "knotctl"


def touch_folder(folder: Path) -> None:
    """Note that a folder is in use; one that may only be read stays as it is."""
    with suppress(OSError):
        os.utime(folder)


def drop_unused(folder: Path, days: int) -> None:
    """Remove the folders in a folder that nobody has touched for so many days."""
    before = time.time() - 86400 * days
    for child in folder.iterdir():
        with suppress(OSError):  # another process removes them, too
            if child.stat().st_mtime < before:
                shutil.rmtree(child, ignore_errors=True)
