"""`knotctl shard-embed`: one vocabulary shard's partial embedding of some tokens, as a frame."""

from __future__ import annotations

import re
from contextlib import closing
from typing import Annotated

import typer

from knotctl.commands.console import print_json, read_input, say
from knotctl.commands.frames import write_frame
from knotctl.commands.options import Json, Model, token_ids
from knotctl.commands.serving import (
    Listen,
    LogJson,
    LogRequests,
    Serve,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    UntilEof,
    Warden,
    cluster_token,
    door,
    run_node,
    tls_files,
    trusted,
)  # fmt: skip
from knotctl.commands.signals import sigterm_interrupts
from knotctl.core.errors import UsageError
from knotctl.core.sizes import parse_size


def shard_embed(
    knot: Model,
    shard: Annotated[str, typer.Option("--shard", metavar="I/N", help="Which shard of how many.")] = "0/1",
    tokens: Annotated[str | None, typer.Option("--tokens", metavar="IDS", help="Token ids: 1,2,3.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="Text to tokenise, as `tokenize` does.")] = None,
    tokens_file: Annotated[
        str | None, typer.Option("--tokens-file", metavar="FILE", help="A file of token ids; `-` is stdin.")
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FRAME", help="Where the frame goes.")] = "-",
    position: Annotated[int, typer.Option("--position", min=0, help="Position of the first token.")] = 0,
    request: Annotated[
        str, typer.Option("--request", metavar="HEX", help="Request id, up to 32 hex digits, for the frame.")
    ] = "0",
    bos: Annotated[bool, typer.Option("--bos", help="With --text: put the model's first token in front.")] = False,
    special: Annotated[bool, typer.Option("--special", help="With --text: parse special tokens.")] = False,
    warden: Warden = None,
    cache: Annotated[
        str | None,
        typer.Option(
            "--cache",
            metavar="SIZE",
            help="Memory for rows; default 256MiB for a knot at a store, 16MiB with --warden, else none.",
        ),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option("--kv", metavar="URL", help="Rows kept for a day: sqlite:///PATH, redis://HOST:PORT/N."),
    ] = None,
    serve: Serve = False,
    listen: Listen = "127.0.0.1:0",
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    until_eof: UntilEof = False,
    log_json: LogJson = False,
    log_requests: LogRequests = False,
    json: Json = False,
) -> None:
    """Embed tokens with one shard of the vocabulary: a partial embedding as a frame, or over HTTP.

    Shard I of N owns ids [I*V//N, (I+1)*V//N) of vocabulary V; the rows of other ids are zero. The partials of all N
    shards are summed by `knotctl merge`.

    With --serve the shard answers frames of ids, and with the highest logits of its rows, until SIGTERM or Ctrl-C; with
    --json one document is printed when it listens: its url, pid, role, knot_id and vocab.

    \b
    Examples:
    $ knotctl shard-embed demo.knot --shard 0/8 --text "Hello world" -o part0.frame
    $ echo 19556,905 | knotctl shard-embed demo.knot --tokens-file - -o all.frame
    $ knotctl shard-embed demo.knot --shard 0/8 --serve --listen 127.0.0.1:9100
    """
    from knotctl.core.knot.reader import Knot, open_knot
    from knotctl.core.model.embed import Shard, token_frame
    from knotctl.core.source.counted import CountedSource
    from knotctl.core.source.opening import open_source
    from knotctl.core.spans import VocabSpan
    from knotctl.core.tensor.open_rows import open_rows
    from knotctl.core.tokens.tokenizer import load_tokenizer

    division = re.fullmatch(r"(\d{1,9})/(\d{1,9})", shard)
    if division is None:
        raise UsageError("bad-shard", f"--shard {shard!r}: expected I/N, as in 0/8")
    keys, store = cluster_token(token_file), CountedSource(open_source(knot))
    index, count = int(division[1]), int(division[2])

    def opened(k: Knot) -> Shard:
        default = "16MiB" if warden else "256MiB" if "://" in knot else "0"
        span, budget = VocabSpan.shard(index, count, k.header.config.vocab_size), parse_size(cache or default)
        rows = open_rows(k, span, budget=budget, kv=kv, warden=warden, token=keys.own, tls=trusted(tls_ca))
        return Shard(k, span, rows)

    if serve:
        if [tokens, text, tokens_file].count(None) != 3:
            raise UsageError("usage", "shard-embed: with --serve the tokens come over HTTP")
        tls = tls_files(tls_cert, tls_key)
        with sigterm_interrupts(), door(listen, keys, tls) as at, open_knot(store) as k, closing(opened(k)) as mine:
            from knotctl.services.cache_metrics import CacheCollector
            from knotctl.services.shard import ShardService

            about = {"knot_id": k.id, "vocab": [mine.span.start, mine.span.end]}
            node = ShardService(mine)
            node.metrics.registry.register(CacheCollector(lambda: mine.source.counts, lambda: store))
            run_node(node, at, about, json=json, log_json=log_json, log_requests=log_requests, until_eof=until_eof)
        return
    if [tokens, text, tokens_file].count(None) != 2:
        raise UsageError("usage", "shard-embed: give one of --tokens, --text and --tokens-file")
    if not re.fullmatch(r"[0-9a-fA-F]{1,32}", request):
        raise UsageError("usage", f"--request {request!r}: expected 1 to 32 hex digits")
    if json and output == "-":
        raise UsageError("usage", "shard-embed: --json prints on stdout, so the frame needs -o FILE")
    with open_knot(store) as k, closing(opened(k)) as mine:
        span = mine.span
        if text is not None:
            tokenizer = load_tokenizer(k.tokenizer_keys())
            ids = tokenizer.encode(text, special=special)
            ids = tokenizer.with_bos(ids) if bos else ids
        else:
            given = (
                tokens if tokens is not None else read_input(tokens_file or "-", 64 << 20).decode("ascii", "replace")
            )
            ids = token_ids(given)
        frame = mine.embed(token_frame(k.id, ids, position, bytes.fromhex(request.zfill(32))))
    size = write_frame(output, frame)
    owned = sum(end - start for start, end in frame.meta["owned"])
    if json:
        print_json({"shard": shard, "vocab": [span.start, span.end], "tokens": ids, "owned": owned, "bytes": size})
    elif output != "-":
        say(f"{output}: shard {shard} (ids {span}) owns {owned} of {len(ids)} tokens; {size} bytes")
