"""The bill of one request: reserved before it runs, recorded before each piece is delivered, settled when it ends.

What a node did is its layers times the tokens that passed them, those of a replay too. Source: man knot-ledger(7).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from knotctl.core.cluster.credits import Usage, Work
from knotctl.core.cluster.ledger import TTL_S, Ledger
from knotctl.core.errors import Conflict, KnotctlError, RequestError

# Between signs of life: several within a hold's time to live, so that one which the database misses closes nothing.
_BEAT_SECONDS = TTL_S / 4


class Bill:
    """What a request has used so far and who served it, kept in the ledger where there is one."""

    def __init__(self, ledger: Ledger | None, account_id: str, request_id: str) -> None:
        self._ledger, self._account, self._request = ledger, account_id, request_id
        self._nodes: Sequence[tuple[str, int]] = ()
        self._tokens: dict[tuple[str, int], int] = {}
        self._prompt = self._generated = 0
        self._kept: tuple[Usage, list[Work]] = (Usage(0, 0), [])
        self._is_open = False

    async def reserve(self, model: str, prompt: int, most: int, fingerprint: str) -> None:
        """Hold what the request may cost at the most.

        Raises: RequestError insufficient-credit, operation-mismatch; Conflict in-progress, already-served.
        """
        self._prompt = prompt
        if self._ledger is None:
            return
        reserve = self._ledger.reserve
        usage = Usage(prompt, most)
        hold, is_ours = await asyncio.to_thread(
            reserve, self._account, self._request, model, usage, fingerprint=fingerprint
        )
        if not is_ours:
            code, what = _SENT_BEFORE[hold.state]
            raise Conflict(code, f"request {self._request}: {what}", hint="a new request needs a new key")
        self._is_open = True

    async def live(self) -> None:
        """Give a sign of life every so often, for as long as the request lasts: steps of it may take minutes."""
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            # A hold that is closed by now, or a database that is away: the stream itself will come upon it.
            with contextlib.suppress(KnotctlError):
                await self._keep()

    @property
    def n_tokens(self) -> int:
        """Tokens generated so far."""
        return self._generated

    def passes(self, route: Sequence[tuple[str, int]]) -> None:
        """Note the nodes that serve from now on, each with its number of layers: all tokens so far pass them."""
        self._nodes = route
        self._count(self._prompt + self._generated)

    def generated(self, tokens: int) -> None:
        """Note tokens that were generated."""
        self._generated += tokens
        self._count(tokens)

    async def record(self) -> None:
        """Keep what was used: before it is delivered. Raises: Conflict hold-closed: deliver nothing more."""
        self._kept = self._usage, self._work
        await self._keep()

    async def _keep(self) -> None:
        if self._is_open:
            assert self._ledger is not None
            await asyncio.to_thread(self._ledger.record, self._account, self._request, *self._kept)

    async def close(self) -> None:
        """Charge what was delivered, or let go of a request of which nothing was; once, whatever comes in between."""
        if not self._is_open:
            return
        self._is_open = False
        assert self._ledger is not None
        if self._generated:
            await asyncio.to_thread(self._ledger.settle, self._account, self._request, self._usage, self._work)
        else:
            await asyncio.to_thread(self._ledger.release, self._account, self._request)

    @property
    def _usage(self) -> Usage:
        return Usage(self._prompt, self._generated)

    @property
    def _work(self) -> list[Work]:
        return [Work(node, layers, tokens) for (node, layers), tokens in sorted(self._tokens.items())]

    def _count(self, tokens: int) -> None:
        for node in self._nodes:
            self._tokens[node] = self._tokens.get(node, 0) + tokens


_SENT_BEFORE = {
    "held": ("in-progress", "it was sent before, and is being served"),
    "settled": ("already-served", "it was sent before, and was served"),
    "released": ("not-served", "it was sent before, and ended with nothing delivered and nothing charged"),
}


def fingerprint_of(path: str, body: Mapping[str, Any]) -> str:
    """Return the digest of a request, by which a retry is told from another request under the same key."""
    text = json.dumps([path, body], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def request_key(headers: Mapping[str, str], request_id: str) -> str:
    """Return the id that a request is billed under: its Idempotency-Key, else the edge's id. Raises: RequestError."""
    key = headers.get("idempotency-key", "").strip()
    if not key:
        return request_id
    if not 1 <= len(key) <= 120 or not all(c.isascii() and (c.isalnum() or c in "._:-") for c in key):
        raise RequestError("bad-idempotency-key", "Idempotency-Key: expected 1 to 120 letters, digits and any of ._:-")
    # Not to be mistaken for an id that the edge made up.
    return f"key:{key}"
