"""knotctl encode: a GGUF becomes a knot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from knotctl.commands.console import print_json, print_table, progress, say
from knotctl.commands.options import EndpointUrl
from knotctl.commands.signals import sigterm_interrupts


def encode(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="A GGUF, or any part of a split one; a path, s3://, http(s):// or hf://org/repo/file."
        ),
    ],
    dest: Annotated[
        str | None,
        typer.Argument(
            metavar="DEST", help="The knot, a path or s3://; by default SRC's name with .knot.", show_default=False
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="Ids that are tokens; rows of the embedding beyond are padding that nobody owns."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, max=64, help="Threads; by default one a core.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DEST where it exists.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; show the layout, and what weights a station must hold.")
    ] = False,
    endpoint_url: EndpointUrl = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Encode a GGUF into a knot.

    Tensors are laid in the order in which they are used, so that a phase of a layer is one range of bytes, and every
    64 KiB get a digest, so that any range can be checked. The same GGUF gives the same bytes. DEST appears when it is
    whole and has been read back, or not at all; one in a store is made in the folder for temporary files and sent by
    parts, and never replaces an object unless --force says so. A model that knotctl cannot run is encoded all the same.

    \b
    Examples:
    $ knotctl encode model-q4_k_m.gguf model.knot
    $ knotctl encode model-00001-of-00003.gguf model.knot --force
    $ knotctl encode --dry-run model.gguf
    $ knotctl encode s3://models/model.gguf s3://models/model.knot
    $ knotctl encode --json model.gguf model.knot | jq -r .knot_id
    """
    import time

    from knotctl.core.errors import printable
    from knotctl.core.gguf.parts import open_gguf
    from knotctl.core.knot.from_gguf import default_destination, encode_model, work_bytes
    from knotctl.core.sizes import format_size

    began = time.monotonic()
    target = dest or str(default_destination(src))
    if dry_run:
        _show_layout(src, target, vocab_size, json)
        return
    with (
        sigterm_interrupts(),
        _placed(target, src, force) as path,
        open_gguf(src) as model,
        progress(printable(target, 40), work_bytes(model)) as advance,
    ):
        done = encode_model(model, path, force=force, jobs=jobs, vocab_size=vocab_size, advance=advance)
    seconds = time.monotonic() - began
    for warning in done.warnings:
        say(f"knotctl: warning: {warning}")
    if json:
        print_json(
            {
                "knot": target,
                "bytes": done.file_bytes,
                "knot_id": done.knot_id,
                "payload_offset": done.payload_offset,
                "tensors": done.tensors,
                "seconds": round(seconds, 3),
            }
        )
        return
    c = done.config
    sizes = f"{c.n_layers} layers, hidden {c.hidden_size}, vocabulary {c.vocab_size:,}"
    rows = (
        ("id", done.knot_id),
        ("model", f"{printable(c.architecture)}, {sizes}"),
        ("tensors", f"{done.tensors:,}, payload at byte {done.payload_offset:,}"),
        ("types", ", ".join(f"{name} {format_size(size)}" for name, size in done.bytes_by_type.items())),
        ("size", f"{format_size(done.file_bytes)} ({done.file_bytes:,} bytes) in {seconds:.1f} s"),
    )
    print_table(("knot", printable(target, 4096)), rows)


def _show_layout(src: str, target: str, vocab_size: int | None, as_json: bool) -> None:
    from knotctl.core.errors import printable
    from knotctl.core.gguf.parts import open_gguf
    from knotctl.core.knot.describe import describe_encoding
    from knotctl.core.sizes import format_size

    with open_gguf(src) as model:
        layout = describe_encoding(model, vocab_size)
    if as_json:
        print_json({"knot": target, **layout.to_json()})
        return
    print_table(
        ("part", "tensors", "bytes", "largest", "types"),
        [(p.part, p.tensors, format_size(p.bytes), format_size(p.largest), " ".join(p.types)) for p in layout.parts],
        title=f"{printable(target, 4096)} would be {layout.file_bytes:,} bytes",
    )
    least = format_size(layout.facts["station_weight_bytes"])
    print(
        f"A station holds {least} of weights at the least, one phase of a layer; less where phases are cut into tiles."
    )


@contextmanager
def _placed(target: str, src: str, force: bool) -> Iterator[Path]:
    """Yield the path to write: the target, or a file that is sent to the store in the end."""
    from knotctl.core.errors import UsageError, printable
    from knotctl.core.knot.writer import check_destination

    if "://" not in target:
        check_destination(Path(target), force=force, src=src)
        yield Path(target)
        return
    if not target.startswith("s3://"):
        raise UsageError("unsupported-scheme", f"{printable(target)}: expected a path or s3://bucket/key")
    import tempfile

    from knotctl.core.source.upload import check_object, upload_file

    check_object(target, force=force)
    with tempfile.TemporaryDirectory(prefix="knotctl-") as folder:
        path = Path(folder) / "upload.knot"
        yield path
        with progress(f"send {printable(target, 40)}", path.stat().st_size) as advance:
            upload_file(path, target, force=force, advance=advance)
