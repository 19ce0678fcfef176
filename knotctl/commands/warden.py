"""`knotctl warden`: a cache of rows or layer tensors that the shards or stations of a host share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from knotctl.commands.console import say
from knotctl.commands.options import Json, Model
from knotctl.commands.serving import (
    LogJson,
    LogRequests,
    TlsCert,
    TlsKey,
    TokenFile,
    UntilEof,
    cluster_token,
    door,
    run_node,
    tls_files,
)  # fmt: skip
from knotctl.commands.signals import sigterm_interrupts
from knotctl.core.errors import SourceError, UsageError
from knotctl.core.sizes import parse_size

if TYPE_CHECKING:
    from knotctl.core.source.kv import KeyValue


def warden(
    knot: Model,
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="A:B", help="Cache the embedding rows of ids [A, B); `:` is all.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="A:B", help="Cache the tensors of layers [A, B); `:` is all.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="SIZE", help="Memory; default 256MiB for rows, 1GiB for layers.")
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(
            "--kv",
            metavar="URL",
            help="With --rows: sqlite:///PATH, redis://HOST:PORT/N or none; default: rows/rows.db in the cache folder.",
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen; port 0 is any free one.")
    ] = "127.0.0.1:0",
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    until_eof: UntilEof = False,
    log_json: LogJson = False,
    log_requests: LogRequests = False,
    json: Json = False,
) -> None:
    """Serve a cache of a knot's rows or layer tensors to the shards or stations of a host.

    With --rows: memory (least recently used goes first), then a key-value level that outlives the process, with
    rows as float32 for a day, then the knot. With --layers: norms, embedding, output and whatever is below 1 MiB, then
    as many whole phases as the budget holds, chosen once; processes of the same machine and user map them without a
    copy. Every entry is checked when it is read. Shards and stations are pointed here with --warden URL, and go on
    without it when it fails.

    With --json one document is printed when it listens: its url, pid, role, knot_id and identity.

    \b
    Examples:
    $ knotctl warden demo.knot --layers : --listen 127.0.0.1:9300
    $ knotctl warden s3://models/demo.knot --rows : --kv redis://127.0.0.1:6379/0 --budget 64MiB
    """
    from knotctl.core.knot.reader import Knot, open_knot
    from knotctl.core.source.counted import CountedSource
    from knotctl.core.source.opening import open_source
    from knotctl.core.spans import LayerSpan, VocabSpan
    from knotctl.core.tensor import layer_policy, row_ram
    from knotctl.core.tensor.row_levels import RowLevels
    from knotctl.core.tensor.rows import embedding_table, knot_rows

    if (rows is None) == (layers is None):
        raise UsageError("usage", "warden: give --rows or --layers")
    if kv is not None and rows is None:
        raise UsageError("usage", "warden: --kv goes with --rows")
    tls = tls_files(tls_cert, tls_key)

    def opened() -> Knot:
        return open_knot(CountedSource(open_source(knot)))

    with sigterm_interrupts(), door(listen, cluster_token(token_file), tls) as at, opened() as k:
        from knotctl.services.warden import LayerWarden, RowWarden, Warden

        node: Warden
        if layers is not None:
            span = LayerSpan.parse(layers, k.header.config.n_layers)
            size = layer_policy.DEFAULT_BUDGET if budget is None else parse_size(budget)
            node = LayerWarden(k, span, size, opened)
        else:
            ids = VocabSpan.parse(str(rows), k.header.config.vocab_size)
            size = row_ram.DEFAULT_BUDGET if budget is None else parse_size(budget)
            node = RowWarden(k, ids, RowLevels(k.id, embedding_table(k), knot_rows(k), budget=size, kv=_level(kv)))
        about = {"knot_id": k.id, "identity": node.describe()["identity"]}
        run_node(node, at, about, json=json, log_json=log_json, log_requests=log_requests, until_eof=until_eof)


def _level(ref: str | None) -> KeyValue | None:
    """Return the key-value level: the one named, or the file in the cache folder, which can be done without."""
    from knotctl.core.caches import cache_folder
    from knotctl.core.source.kv import open_kv

    if ref is not None:
        return None if ref == "none" else open_kv(ref)
    try:
        return open_kv(str(cache_folder("rows") / "rows.db"))
    except SourceError as e:
        say(f"knotctl: without a key-value level: {e.message}")
        return None
