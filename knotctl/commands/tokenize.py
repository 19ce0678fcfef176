"""`knotctl tokenize`: text or a conversation to token ids, with the tokeniser that a knot carries."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from knotctl.commands.console import print_json, read_input, read_text, say
from knotctl.commands.options import Json, Model
from knotctl.core.errors import KnotctlError, UsageError

if TYPE_CHECKING:
    from knotctl.core.tokens.tokenizer import Tokenizer

_MAX_INPUT = 64 << 20


def tokenize(
    knot: Model,
    text: Annotated[str | None, typer.Argument(help="The text; `-` is stdin, taken as it is.")] = None,
    bos: Annotated[bool, typer.Option("--bos", help="Put the beginning of sequence first, if the model asks.")] = False,
    special: Annotated[bool, typer.Option("--special", help="Parse special tokens: <|im_end|> is one id.")] = False,
    chat: Annotated[
        str | None, typer.Option("--chat", metavar="MESSAGES.json", help="Apply the chat template; `-` is stdin.")
    ] = None,
    json: Json = False,
) -> None:
    """Print the token ids of a text and the piece of text that each stands for.

    Nothing is added, and special tokens in the text are text, unless an option says otherwise. With --chat the text is
    what the model's template makes of a JSON list of messages; the template's markers become special tokens, what is
    written in the messages does not.

    \b
    Examples:
    $ knotctl tokenize demo.knot "Hello world"
    $ knotctl tokenize demo.knot - --json < prompt.txt | jq -c .tokens
    $ echo '[{"role": "user", "content": "Hi"}]' | knotctl tokenize demo.knot --chat - --json
    """
    from knotctl.core.knot.reader import open_knot
    from knotctl.core.strict_json import parse_json
    from knotctl.core.tokens.tokenizer import load_tokenizer

    if (text is None) == (chat is None):
        raise UsageError("usage", "tokenize: give a TEXT or --chat MESSAGES.json")
    if chat is not None and (bos or special):
        raise UsageError("usage", "tokenize: --bos and --special are for a TEXT; --chat does what the template says")
    if text == "-":
        text = read_text("-", _MAX_INPUT)
    messages = None if chat is None else parse_json(read_input(chat, _MAX_INPUT), _refuse)
    with open_knot(knot) as k:
        tokenizer = load_tokenizer(k.tokenizer_keys())
    prompt = None
    if text is None:
        from knotctl.core.tokens.chat import ChatTemplate, encode_chat

        if isinstance(messages, dict):
            messages = messages.get("messages")
        prompt, ids = encode_chat(tokenizer, ChatTemplate.of(tokenizer), messages)
    else:
        ids = tokenizer.encode(text, special=special)
        ids = tokenizer.with_bos(ids) if bos else ids
    if json:
        print_json({"tokens": ids, "pieces": [tokenizer.piece(i) for i in ids], "prompt": prompt})
        return
    # Lines rather than a table that is laid out as a whole: a text may have a hundred thousand tokens.
    sys.stdout.writelines(f"{i:>6}  {_shown(tokenizer, i)}\n" for i in ids)
    say(f"{len(ids)} tokens")


def _shown(tokenizer: Tokenizer, token: int) -> str:
    """Return a piece as a literal: quoted, so that spaces show, with what does not print escaped."""
    piece = tokenizer.token_bytes(token, special=True)
    try:
        return repr(piece.decode())
    except UnicodeDecodeError:
        return repr(piece)  # part of a character


def _refuse(code: str, what: str) -> KnotctlError:
    return UsageError(code, f"--chat: {what}")
