"""Options that several commands share, so that they read and parse alike everywhere."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from knotctl.core.errors import UsageError
from knotctl.core.sizes import parse_size
from knotctl.core.spans import LayerSpan

if TYPE_CHECKING:
    from knotctl.core.model.budget import Residency
    from knotctl.core.model.kv import KvType
    from knotctl.core.tensor.passing import Io

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Threads = Annotated[int | None, typer.Option("--threads", "-t", min=1, max=256, help="Threads; default: all cores.")]
MemoryBudget = Annotated[
    str | None,
    typer.Option("--memory-budget", metavar="SIZE", help="Ceiling for all it holds beside numba itself: 128MiB."),
]
ResidencyOption = Annotated[
    str, typer.Option("--residency", metavar="fluid|pinned|resident|auto", help="Which weights stay in memory.")
]
IoOption = Annotated[
    str,
    typer.Option("--io", metavar="auto|mmap|pread", help="How a local file's weights pass through; auto is mmap."),
]
KvTypeOption = Annotated[
    str, typer.Option("--kv-type", metavar="f32|f16", help="Keys and values as computed, or rounded to half the bytes.")
]


def _use_endpoint(url: str | None) -> str | None:
    """Point s3:// there, as the variable that boto3 itself reads does."""
    if url:
        os.environ["AWS_ENDPOINT_URL_S3"] = url
    return url


EndpointUrl = Annotated[
    str | None,
    typer.Option("--endpoint-url", metavar="URL", callback=_use_endpoint, help="The S3 store that s3:// is of."),
]
Database = Annotated[
    str,
    typer.Option(
        "--database",
        envvar="KNOTCTL_DATABASE",
        metavar="URL",
        help="The ledger's database: a path, sqlite:///PATH or postgresql://USER@HOST/NAME.",
    ),
]
Model = Annotated[str, typer.Argument(metavar="KNOT", help="The model's knot.")]


def budget_bytes(text: str | None) -> int | None:
    """Return --memory-budget in bytes, None where it was not given."""
    return None if text is None else parse_size(text)


def residency_of(text: str) -> Residency:
    """Return the residency of that name. Raises: UsageError."""
    from knotctl.core.model.budget import Residency

    if text not in list(Residency):
        raise UsageError("usage", f"--residency {text}: expected one of {', '.join(Residency)}")
    return Residency(text)


def io_of(text: str) -> Io:
    """Return the way of reading of that name. Raises: UsageError."""
    from knotctl.core.tensor.passing import Io

    if text not in list(Io):
        raise UsageError("usage", f"--io {text}: expected one of {', '.join(Io)}")
    return Io(text)


def kv_type_of(text: str) -> KvType:
    """Return the type of keys and values of that name. Raises: UsageError."""
    from knotctl.core.model.kv import KvType

    if text not in list(KvType):
        raise UsageError("usage", f"--kv-type {text}: expected one of {', '.join(KvType)}")
    return KvType(text)


def token_ids(text: str) -> list[int]:
    """Return ids written `1,2,3`, or separated by white space.

    Raises: UsageError bad-tokens.
    """
    words = text.replace(",", " ").split()
    if not words or not all(w.isdecimal() and len(w) <= 10 for w in words):
        raise UsageError("bad-tokens", "tokens: expected ids such as 9707,1879")
    return [int(w) for w in words]


def spans(text: str) -> list[LayerSpan]:
    """Return spans written `0:14,14:28`."""
    return [LayerSpan.parse(part) for part in text.split(",")]
