"""`knotctl repair`: a canonical copy of a repairable knot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knotctl.commands.console import print_json, progress
from knotctl.commands.options import EndpointUrl


def repair(
    knot: Annotated[str, typer.Argument(metavar="KNOT", help="The knot to mend; it is not touched.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The canonical copy.")],
    force: Annotated[bool, typer.Option("--force", help="Replace OUT where it exists.")] = False,
    endpoint_url: EndpointUrl = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a canonical copy of a knot whose layout or header is wrong and whose bytes are right.

    Mends the layout of old encoders, wrong padding and marker, trailing bytes, gaps, the order of tensors, the old name
    of the type field, and missing digests. What cannot be mended is said, and nothing is written. Bytes are compared
    with the digests that the knot has before they are copied.

    \b
    Examples:
    $ knotctl repair old.knot new.knot
    $ knotctl repair --json old.knot new.knot | jq -r '.mended[]'
    """
    import time
    from functools import partial

    from knotctl.core.errors import printable
    from knotctl.core.knot.repair import repair_knot
    from knotctl.core.source.opening import open_source

    began = time.monotonic()
    source = open_source(knot)
    try:
        done = repair_knot(source, out, force=force, progress=partial(progress, f"repair {printable(knot, 40)}"))
    finally:
        source.close()
    if json:
        document = {"knot": str(done.path), "bytes": done.file_bytes, "knot_id": done.knot_id, "mended": done.mended}
        print_json(document | {"seconds": round(time.monotonic() - began, 3)})
    else:
        print(f"{printable(done.path, 4096)}: mended {', '.join(done.mended)}; knot_id {done.knot_id}")
