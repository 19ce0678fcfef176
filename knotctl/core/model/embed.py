"""A vocabulary shard: the embedding rows of a run of token ids, from the knot row by row, or through caches.

Every shard answers for every token of a batch: the row where it owns the id, zeros where another shard does. The sum
over all shards is the embedding (`wire/merge.py`; the seeds' Frobenius merge).

Source: seed 000 sections 1 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from knotctl.core.errors import UsageError, WrongIdentity
from knotctl.core.knot.reader import Knot
from knotctl.core.spans import VocabSpan
from knotctl.core.tensor.open_rows import default_rows
from knotctl.core.tensor.rows import RowSource, decode, embedding_table
from knotctl.core.wire.frame import Frame, Segment
from knotctl.core.wire.layout import Kind
from knotctl.core.wire.merge import partial_meta

if TYPE_CHECKING:
    # a process that only embeds has no use for numba, which comes with the kernels
    from knotctl.core.tensor.arena import Floats


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that no shard owns: negative ones, and those from the vocabulary's size on (padding rows too).

    Raises: UsageError token-out-of-range.
    """
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise UsageError("token-out-of-range", f"token {i}: id {token}: expected 0 <= id < {vocab_size}")


def token_frame(knot_id: str, tokens: Sequence[int], position: int, request_id: bytes) -> Frame:
    """Return a frame of token ids: one segment, its first token at `position`."""
    ids = np.asarray(tokens, np.int32).reshape(-1, 1)
    return Frame(Kind.TOKENS, bytes.fromhex(knot_id), (Segment(request_id, position, len(tokens)),), ids)


class Shard:
    """The embedding rows of ids [start, end) of a model's vocabulary, from the knot or from what caches it."""

    def __init__(self, knot: Knot, span: VocabSpan, source: RowSource | None = None) -> None:
        config = knot.header.config
        if span.end > config.vocab_size:
            raise UsageError("bad-shard", f"shard {span}: the vocabulary of {knot.source.name} is {config.vocab_size}")
        self.knot = knot
        self.span = span
        self.vocab_size = config.vocab_size
        self._table = embedding_table(knot)
        self.source = source or default_rows(knot, span)

    def rows(self, tokens: Sequence[int]) -> Floats:
        """Return the rows float32 [tokens, hidden_size] of ids that the shard owns, each distinct row read once."""
        distinct, where = np.unique(np.asarray(tokens, np.int64), return_inverse=True)
        taken = self.source.take(distinct.tolist())
        decoded: Floats = decode(self._table, [taken[token] for token in distinct.tolist()])[where]
        return decoded

    def close(self) -> None:
        """Finish what the caches still write; not the knot."""
        self.source.close()

    def embed(self, frame: Frame) -> Frame:
        """Return the partial embedding of a frame of token ids: owned rows, zeros elsewhere, and which are owned.

        Raises: WrongIdentity; UsageError token-out-of-range or wrong-frame.
        """
        if frame.knot_id.hex() != self.knot.id:
            raise WrongIdentity("wrong-identity", f"frame: expected knot {self.knot.id}, found {frame.knot_id.hex()}")
        if frame.kind is not Kind.TOKENS:
            raise UsageError("wrong-frame", f"frame: expected token ids, found {frame.kind.name.lower()}")
        tokens = frame.payload[:, 0]
        check_tokens(tokens.tolist(), self.vocab_size)
        owned = (tokens >= self.span.start) & (tokens < self.span.end)
        out = np.zeros((len(tokens), self._table.columns), np.float32)
        if owned.any():
            out[owned] = self.rows(tokens[owned].tolist())
        meta = dict(frame.meta) | partial_meta(tokens, self.span)
        return Frame(Kind.PARTIAL, frame.knot_id, frame.segments, out, meta, frame.flags)
