"""`knotctl inspect`: what a file holds, by its first bytes: one function a kind of file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from knotctl.commands.console import print_json, print_table
from knotctl.commands.options import EndpointUrl
from knotctl.core.errors import FormatError, printable
from knotctl.core.sizes import format_size

if TYPE_CHECKING:
    from knotctl.core.knot.describe import Description
    from knotctl.core.source.base import ByteSource


def inspect(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A knot, a GGUF or a frame; `-` is a frame on stdin.")],
    top: Annotated[int, typer.Option(min=0, help="Of a frame of logits, show the best N ids of each row.")] = 0,
    endpoint_url: EndpointUrl = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what a knot, a GGUF or a frame holds.

    Of a model file: its header, how many bytes each phase takes over all layers and in the largest one, its tensors.
    Of a frame: kind, segments, statistics of its numbers. Only what is shown is read.

    \b
    Examples:
    $ knotctl inspect model.knot
    $ knotctl inspect logits.frame --top 5
    $ knotctl inspect --json model.knot | jq '.parts[] | select(.part == "ffn_up").largest'
    """
    from knotctl.core.magic import MAGIC_BYTES, recognise
    from knotctl.core.source.opening import open_source

    if file == "-":
        _inspect_frame(file, top, json)
        return
    source = open_source(file)
    try:
        head = source.read(0, min(MAGIC_BYTES, source.size))
        kind = recognise(head)
        if kind == "knot":
            _inspect_knot(source, json)
        elif kind == "GGUF":
            _inspect_gguf(source, json)
        elif kind == "frame":
            _inspect_frame(file, top, json)
        else:
            found = f"a {kind}" if kind else f"{head[:4]!r}" if head else "an empty file"
            raise FormatError("unknown-format", f"{source.name}: magic: expected a knot, GGUF or frame, found {found}")
    finally:
        source.close()


def _inspect_knot(source: ByteSource, as_json: bool) -> None:
    from knotctl.core.knot.describe import describe_knot
    from knotctl.core.knot.header import parse_header
    from knotctl.core.knot.reader import read_header

    _show(describe_knot(parse_header(read_header(source), source.size, source.name)), as_json)


def _inspect_gguf(source: ByteSource, as_json: bool) -> None:
    from knotctl.core.gguf.header import read_gguf
    from knotctl.core.knot.describe import describe_gguf

    _show(describe_gguf(read_gguf(source)), as_json)


def _inspect_frame(ref: str, top: int, as_json: bool) -> None:
    from knotctl.commands.frames import read_report

    report = read_report(ref, top)
    if as_json:
        print_json(report.to_json())
        return
    document = report.to_json()
    best, segments, statistics = document.pop("top"), document.pop("segments"), document.pop("statistics")
    for name, value in document.items() if statistics is None else (document | statistics).items():
        print(f"{name:16} {_one_line(value)}")
    print_table(list(segments[0]) if segments else (), [list(s.values()) for s in segments], title="Segments")
    if best:
        # Rows of logits that are not finite have fewer.
        columns = max(map(len, best))
        cells = [[f"{i} ({logit:.3f})" for i, logit in ids] + [""] * (columns - len(ids)) for ids in best]
        rows = [(row, *shown) for row, shown in enumerate(cells)]
        print_table(("row", *(f"#{i + 1}" for i in range(columns))), rows, title="Best ids (logit)")


def _show(description: Description, as_json: bool) -> None:
    if as_json:
        print_json(description.to_json())
        return
    rows = [("format", description.format), ("size", format_size(description.file_bytes))]
    for name, value in description.facts.items():
        if isinstance(value, dict):
            rows += [(f"{name}.{key}", v) for key, v in value.items() if key != "gguf"]
        else:
            rows.append((name, value))
    for name, value in rows:
        print(f"{printable(name, 60):32} {_one_line(value)}")
    print_table(
        ("part", "tensors", "bytes", "largest", "types"),
        [
            (p.part, p.tensors, format_size(p.bytes), format_size(p.largest), " ".join(p.types))
            for p in description.parts
        ],
        title="Bytes by part (largest: of one layer)",
    )
    print_table(
        ("tensor", "type", "shape", "offset", "bytes"),
        [
            (printable(t.name), t.qtype.name, "×".join(map(str, t.shape)), t.offset, t.bytes)
            for t in description.tensors
        ],
    )


def _one_line(value: object) -> str:
    if isinstance(value, dict) and "array_of" in value:
        return f"{value['length']} × {value['array_of']}"
    return printable(value, 100)
