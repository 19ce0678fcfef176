"""What goes into one pass over the weights: of each request a piece of its prompt, or its next token and a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from knotctl.core.engine.choose import Ask
from knotctl.core.engine.speculate import MAX_DRAFT
from knotctl.core.engine.stream import Stream
from knotctl.core.wire.frame import Frame, Segment
from knotctl.core.wire.layout import Kind, Mode

# While others decode, a prompt enters in pieces this long, so that nobody's next token waits for all of it.
SHARED_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens that one stream brings to a pass; the logits behind the last `wanted` of them are asked for."""

    stream: Stream
    tokens: list[int]
    wanted: int

    @property
    def sampled_from(self) -> list[int]:
        """The tokens whose logits come back: one that is certain, then the draft."""
        return self.tokens[len(self.tokens) - self.wanted :]

    def segment(self) -> Segment:
        """Return the piece's entry in the frame's table."""
        decoding = bool(self.stream.tokens)
        mode = Mode.PREFILL if not decoding else Mode.VERIFY if len(self.tokens) > 1 else Mode.DECODE
        return Segment(self.stream.request_id, self.stream.in_kv, len(self.tokens), mode)


def compose(streams: Sequence[Stream], most: int, *, speculate: bool) -> list[Piece]:
    """Return the next pass: every stream has a piece, and no more than a chunk of tokens in all.

    Units: most, the tokens of a pass that a stream has for itself.
    """
    room = most if len(streams) == 1 else SHARED_CHUNK
    pieces = []
    # Those that need one token come first: a prompt takes the room they leave.
    for stream in sorted(streams, key=lambda s: len(s.pending)):
        tokens, wanted = stream.pending[: max(1, room)], 0
        if stream.in_kv + len(tokens) == len(stream.history):
            draft = stream.draft(MAX_DRAFT // len(streams)) if speculate else []
            tokens, wanted = tokens + draft, 1 + len(draft)
        room -= len(tokens)
        pieces.append(Piece(stream, tokens, wanted))
    return pieces


def frame_of(pieces: Sequence[Piece], knot_id: str) -> Frame:
    """Return the frame of token ids of a pass."""
    ids = np.asarray([t for p in pieces for t in p.tokens], np.int32).reshape(-1, 1)
    return Frame(Kind.TOKENS, bytes.fromhex(knot_id), tuple(p.segment() for p in pieces), ids)


def asks_of(pieces: Sequence[Piece], choices: int) -> list[Ask]:
    """Return the tokens that a pass is to give; ids from `choices` on are never chosen."""
    return [
        Ask(i, len(p.stream.history), choices, p.stream.params, p.sampled_from[1:], p.stream.history)
        for i, p in enumerate(pieces)
        if p.wanted
    ]
