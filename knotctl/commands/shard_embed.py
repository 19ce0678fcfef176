"""`knotctl shard-embed`: one vocabulary shard's partial embedding of some tokens, as a frame."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from knotctl.commands.console import print_json, read_input, say
from knotctl.commands.frames import write_frame
from knotctl.commands.options import Json, Model, token_ids
from knotctl.core.errors import UsageError


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
    json: Json = False,
) -> None:
    """Embed tokens with one shard of the vocabulary and write the partial embedding.

    Shard I of N owns ids [I*V//N, (I+1)*V//N) of vocabulary V; the rows of other ids are zero. The partials of all N
    shards are summed by `knotctl merge`.

    \b
    Examples:
    $ knotctl shard-embed demo.knot --shard 0/8 --text "Hello world" -o part0.frame
    $ echo 19556,905 | knotctl shard-embed demo.knot --tokens-file - -o all.frame
    """
    from knotctl.core.knot.reader import open_knot
    from knotctl.core.model.embed import Shard, token_frame
    from knotctl.core.spans import VocabSpan
    from knotctl.core.tokens.tokenizer import load_tokenizer

    if [tokens, text, tokens_file].count(None) != 2:
        raise UsageError("usage", "shard-embed: give one of --tokens, --text and --tokens-file")
    division = re.fullmatch(r"(\d{1,9})/(\d{1,9})", shard)
    if division is None:
        raise UsageError("bad-shard", f"--shard {shard!r}: expected I/N, as in 0/8")
    if not re.fullmatch(r"[0-9a-fA-F]{1,32}", request):
        raise UsageError("usage", f"--request {request!r}: expected 1 to 32 hex digits")
    if json and output == "-":
        raise UsageError("usage", "shard-embed: --json prints on stdout, so the frame needs -o FILE")
    with open_knot(knot) as k:
        span = VocabSpan.shard(int(division[1]), int(division[2]), k.header.config.vocab_size)
        if text is not None:
            tokenizer = load_tokenizer(k.tokenizer_keys())
            ids = tokenizer.encode(text, special=special)
            ids = tokenizer.with_bos(ids) if bos else ids
        else:
            given = (
                tokens if tokens is not None else read_input(tokens_file or "-", 64 << 20).decode("ascii", "replace")
            )
            ids = token_ids(given)
        frame = Shard(k, span).embed(token_frame(k.id, ids, position, bytes.fromhex(request.zfill(32))))
    size = write_frame(output, frame)
    owned = sum(end - start for start, end in frame.meta["owned"])
    if json:
        print_json({"shard": shard, "vocab": [span.start, span.end], "tokens": ids, "owned": owned, "bytes": size})
    elif output != "-":
        say(f"{output}: shard {shard} (ids {span}) owns {owned} of {len(ids)} tokens; {size} bytes")
