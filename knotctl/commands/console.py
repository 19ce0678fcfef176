"""What commands print with: JSON to stdout, people's text, tables and progress bars to stderr or the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from knotctl.core.errors import KnotctlError

# Called by core with the amount of work just done (bytes, or steps of the given total).
Advance = Callable[[int], None]


def print_json(document: Any) -> None:
    """Write one JSON document to stdout."""
    json.dump(document, sys.stdout, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()


def read_input(ref: str, cap: int) -> bytes:
    """Return the bytes of a file, or of stdin where ref is `-`, refused beyond `cap` bytes.

    Raises: SourceError, UsageError too-large.
    """
    from knotctl.core.errors import SourceError, UsageError, printable

    name = "stdin" if ref == "-" else printable(ref)
    try:
        if ref == "-":
            data = sys.stdin.buffer.read(cap + 1)
        else:
            with Path(ref).open("rb") as file:
                data = file.read(cap + 1)
    except (OSError, ValueError) as e:
        raise SourceError("read-failed", f"{name}: {getattr(e, 'strerror', None) or e}") from e
    if len(data) > cap:
        raise UsageError("too-large", f"{name}: expected at most {cap} bytes")
    return data


def read_text(ref: str, cap: int) -> str:
    """Return the UTF-8 text of a file, or of stdin where ref is `-`. Raises: SourceError, UsageError."""
    from knotctl.core.errors import UsageError, printable

    data = read_input(ref, cap)
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        name = "stdin" if ref == "-" else printable(ref)
        raise UsageError("bad-text", f"{name}: byte {e.start}: expected UTF-8, found 0x{data[e.start]:02X}") from None


def say(text: str) -> None:
    """Write a line for people to stderr, so that stdout stays what the command is for."""
    print(text, file=sys.stderr, flush=True)


def print_error(error: KnotctlError, as_json: bool) -> None:
    """Write an error in words to stderr, and as a document to stdout where --json was asked for."""
    say(f"knotctl: {error.message}")
    if error.hint:
        say(f"  hint: {error.hint}")
    if as_json:
        print_json(error.to_json())


@contextmanager
def progress(description: str, total: int, *, unit: str = "bytes") -> Iterator[Advance]:
    """Show a progress bar on a terminal's stderr and none otherwise; yields the function that advances it.

    Units: total in bytes, or in steps where unit is not "bytes".
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount = (DownloadColumn(binary_units=True), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.update(task, advance=done)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None) -> None:
    """Print a table to stdout; a column whose cells are all numbers is set to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(headings):
        numeric = bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(f"{c:,}" if isinstance(c, int) and not isinstance(c, bool) else str(c)) for c in row))
    # Piped output must not be wrapped to an imagined terminal of 80 columns.
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)
