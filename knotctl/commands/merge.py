"""`knotctl merge`: partial embeddings into hidden states."""

from __future__ import annotations

from typing import Annotated

import typer

from knotctl.commands.console import print_json, say


def merge(
    frames: Annotated[list[str], typer.Argument(help="Partial embeddings, one of each shard; `-` is stdin.")],
    output: Annotated[str, typer.Option("-o", "--output", help="Where the hidden states go; `-` is stdout.")],
    degrade: Annotated[
        bool, typer.Option("--degrade", help="Let tokens that no frame owns be rows of zeros, flagged and listed.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Merge the partial embeddings of all shards into hidden states.

    Each token must be owned by exactly one of the frames; the merged row has the bits of its owner's.

    \b
    Examples:
    $ knotctl merge shard-*.frame -o embed.frame
    $ knotctl merge shard-0.frame shard-1.frame --degrade -o embed.frame
    """
    from knotctl.commands.frames import read_frame, write_frame
    from knotctl.core.errors import UsageError
    from knotctl.core.wire.merge import merge_partials

    if json and output == "-":
        raise UsageError("usage", "merge: --json prints on stdout, so the frame needs -o FILE")
    merged = merge_partials([read_frame(ref) for ref in frames], degrade=degrade)
    size = write_frame(output, merged)
    zeroed = merged.meta.get("zeroed", [])
    for request, start, end in zeroed:
        say(f"knotctl: warning: request {request}: positions {start}:{end} have no owner and are zeros")
    if json:
        print_json(
            {
                "output": output,
                "bytes": size,
                "frames": len(frames),
                "rows": merged.rows,
                "width": merged.width,
                "knot_id": merged.knot_id.hex(),
                "degraded": bool(zeroed),
                "zeroed": zeroed,
            }
        )
