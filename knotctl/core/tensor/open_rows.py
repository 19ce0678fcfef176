"""The row source that a shard or a row warden asks for: which levels lie above the knot."""

from __future__ import annotations

import ssl
from contextlib import ExitStack

from knotctl.core.knot.reader import Knot
from knotctl.core.source.kv import open_kv
from knotctl.core.spans import VocabSpan
from knotctl.core.tensor.row_levels import RowLevels
from knotctl.core.tensor.rows import RowSource, embedding_table, knot_rows
from knotctl.core.tensor.warden_client import WardenClient
from knotctl.core.tensor.warden_rows import WardenRows

# What all shards of a vocabulary together keep unasked of a knot at a store, where a row costs a request: a few
# thousand rows.
STORE_BUDGET = 4 << 20


def default_rows(knot: Knot, span: VocabSpan) -> RowSource:
    """Return the rows of a span as a shard reads them unasked: with a little memory where the knot is at a store."""
    return open_rows(knot, span, budget=default_budget(knot) * len(span) // knot.header.config.vocab_size)


def default_budget(knot: Knot) -> int:
    """Return the bytes of memory that shards of a whole vocabulary take unasked."""
    return STORE_BUDGET if "://" in knot.source.name else 0


def open_rows(
    knot: Knot,
    span: VocabSpan,
    *,
    budget: int = 0,
    kv: str | None = None,
    warden: str | None = None,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> RowSource:
    """Return the rows of a span: memory (of `budget` bytes), then the key-value level, the warden, the knot.

    Raises: ModelError; UsageError and SourceError of what a level's reference names; WrongIdentity.
    """
    table = embedding_table(knot)
    with ExitStack() as opened:
        source: RowSource = knot_rows(knot)
        opened.callback(source.close)
        if warden is not None:
            source = WardenRows(WardenClient(warden, "row", knot, span, token=token, tls=tls), knot.id, table, source)
            opened.callback(source.close)
        if budget or kv is not None:
            level = open_kv(kv) if kv is not None else None
            source = RowLevels(knot.id, table, source, budget=budget, kv=level)
        opened.pop_all()
    return source
