"""`knotctl pull`: fetch a model file and check it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knotctl.commands.console import print_json, progress
from knotctl.core.errors import UsageError


def pull(
    ref: Annotated[str, typer.Argument(help="What to fetch: `demo`, the demo model.")],
    dest: Annotated[
        Path | None, typer.Argument(help="Where to put it: a folder or a file name; else in the cache folder.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Fetch a model file, check it, and print its path.

    A file that is there already and right is not fetched again.

    \b
    Examples:
    $ knotctl pull demo
    $ knotctl encode "$(knotctl pull demo)" demo.knot
    """
    from knotctl.core.caches import cache_folder
    from knotctl.core.source.demo import DEMO_BYTES, DEMO_FILE, DEMO_SHA256, fetch_demo

    if ref != "demo":
        raise UsageError("unsupported-ref", f"pull: {ref}: expected `demo`", hint="a local path needs no pull")
    dest = dest or cache_folder("models")
    folder, name = (dest, DEMO_FILE) if dest.is_dir() else (dest.parent, dest.name)
    with progress("pull demo", DEMO_BYTES) as advance:
        path = fetch_demo(folder, advance, name=name)
    if json:
        print_json({"ref": ref, "path": str(path), "bytes": DEMO_BYTES, "sha256": DEMO_SHA256})
    else:
        print(path)
