"""Wardens as services: a host's cache of layer tensors, or of embedding rows, that its stations or shards share.

Every request names whose bytes it wants; a warden of another model or part answers 409, never with its own bytes.
Source: man knot-service(5), WARDENS; seed 000 sections 4 and 7.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from knotctl.core.errors import KnotctlError, RequestError, WrongIdentity, printable
from knotctl.core.knot.reader import Knot
from knotctl.core.spans import ByteRange, LayerSpan, Span, VocabSpan
from knotctl.core.strict_json import parse_json_object
from knotctl.core.tensor.layer_cache import LayerCache
from knotctl.core.tensor.records import RecordKind, record_head
from knotctl.core.tensor.row_levels import RowLevels
from knotctl.core.tensor.warden_rows import ROWS_AT_ONCE
from knotctl.services.cache_metrics import CacheCollector
from knotctl.services.node import Node
from knotctl.services.replies import JsonReply

_Result = TypeVar("_Result")

# Requests at work; a client that hears 429 reads the store itself.
MAX_BUSY = 64
# Of a batch's tensors together: a station's largest phases, not a model.
BATCH_BYTES = 1 << 30
BATCH_NAMES = 256
_DOCUMENT_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")
RECORDS_TYPE = "application/x-knot-records"


class Warden(Node):
    """What both kinds have in common: whose bytes they hold, and that every request must name it."""

    noun = ""  # of the headers: X-NOUN-Start

    def __init__(self, knot: Knot, routes: list[Route]) -> None:
        self.knot = knot
        self._busy = 0
        super().__init__(routes)
        self.metrics.registry.register(CacheCollector(self.levels, lambda: self.knot.source))

    @property
    def part(self) -> Span:
        """The layers or ids held."""
        raise NotImplementedError

    def levels(self) -> list[Any]:
        """Return the counts of the cache's levels."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return what /health says: whose warden it is, and what its levels did."""
        part = self.part
        return {
            "knot_id": self.knot.id,
            "spans": [[part.start, part.end]],
            "identity": f"{self.identity_key}|{part.start}-{part.end}",
            "bytes": {level.tier: level.bytes for level in self.levels()},
            "cache": {level.tier: level.to_json() for level in self.levels()},
        }

    @property
    def identity_key(self) -> str:
        """What stands for the model in the warden's identity."""
        return self.knot.id

    def check_identity(self, headers: Mapping[str, str]) -> None:
        """Raise RequestError missing-identity (400), or WrongIdentity (409) where the request is for another warden."""
        part = self.part
        own = {
            "x-knot-id": self.knot.id, f"x-{self.noun}-start": str(part.start), f"x-{self.noun}-end": str(part.end),
        }  # fmt: skip
        for name, value in own.items():
            given = headers.get(name)
            if given is None:
                raise RequestError("missing-identity", f"{name}: missing", hint=f"send {', '.join(own)}")
            if given != value:
                raise WrongIdentity(
                    "wrong-identity", f"{self.role}: {name}: expected {value}, found {printable(given, 60)}",
                    hint="ask /health whose warden this is",
                )  # fmt: skip

    async def work(self, task: Callable[[], _Result]) -> _Result:
        """Return what a task gives, done in a thread. Raises: RequestError overloaded (429)."""
        if self._busy >= MAX_BUSY:
            raise RequestError("overloaded", f"{self.role}: too many requests", status=429, hint="retry later")
        self._busy += 1
        try:
            return await asyncio.to_thread(task)
        finally:
            self._busy -= 1


class LayerWarden(Warden):
    """The tensors of a run of layers. `reopen` opens the knot anew, when it is told that the file is another."""

    role = "layer-warden"
    noun = "layer"

    def __init__(self, knot: Knot, span: LayerSpan, budget: int, reopen: Callable[[], Knot]) -> None:
        self.cache = LayerCache(knot, span, budget)
        self._reopen = reopen
        self._configuring = asyncio.Lock()
        super().__init__(
            knot,
            [
                Route("/configure", self._configure, methods=["POST"]),
                Route("/tensors", self._batch, methods=["POST"]),
                Route("/tensors/{name}", self._tensor, methods=["GET"]),
                Route("/segments", self._segments, methods=["GET"]),
                Route("/segments/{name}", self._segment, methods=["GET"]),
                Route("/invalidate/{name}", self._invalidate, methods=["POST"]),
            ],
        )

    @property
    def part(self) -> LayerSpan:
        """The layers held."""
        return self.cache.span

    def levels(self) -> list[Any]:
        """Return the counts of the one level."""
        return [self.cache.counts]

    def probe(self) -> None:
        """Read the smallest tensor."""
        names = [name for _, names in self.cache.held for name in names]
        smallest = min(map(self.cache.entry, names), key=lambda e: e.length, default=None)
        if smallest is not None:
            for _ in self.cache.pieces(smallest.name):
                pass

    def describe(self) -> dict[str, Any]:
        """Return what /health says, with the budget and what is held within it."""
        held = sum(len(span) for span, _ in self.cache.held)
        return super().describe() | {"budget_bytes": self.cache.budget, "held_bytes": held}

    def close(self) -> None:
        """Forget everything, and close the knot, which may not be the one that the warden was given."""
        self.cache.close()
        self.knot.close()

    async def _configure(self, request: Request) -> Response:
        """Take another span or budget, or the file's new content; never another model than the caller names."""
        asked = await _document(request)
        key, knot_id = asked.get("knotKey", self.knot.source.name), asked.get("knotId")
        numbers = [asked.get("layerStart"), asked.get("layerEnd"), asked.get("budgetBytes", self.cache.budget)]
        match [knot_id, *numbers]:
            case [str(), int(start), int(end), int(budget)] if bool not in map(type, numbers) and budget >= 0:
                span = LayerSpan(start, end)
            case _:
                raise RequestError(
                    "bad-request", "configure: expected knotId, layerStart, layerEnd, and perhaps budgetBytes, knotKey"
                )
        if key != self.knot.source.name:
            raise WrongIdentity(
                "wrong-identity", f"configure: expected knotKey {self.knot.source.name}, found {printable(key)}",
                hint="a warden serves the knot that it was started with: start another one",
            )  # fmt: skip
        async with self._configuring:
            await self.work(lambda: self._rebind(str(knot_id), span, budget))
        return JsonReply({"identity": self.cache.identity, "budgetBytes": budget})

    def _rebind(self, knot_id: str, span: LayerSpan, budget: int) -> None:
        knot = self.knot if knot_id == self.knot.id else self._reopen()
        try:
            if knot.id != knot_id:
                raise WrongIdentity(
                    "wrong-identity", f"{knot.source.name}: expected knot {printable(knot_id, 60)}, found {knot.id}"
                )
            cache = LayerCache(knot, span, budget)
        except BaseException:
            if knot is not self.knot:
                knot.close()
            raise
        # What others map or are being sent stays as it is until they are done with it.
        old, self.cache = self.cache, cache
        old.close()
        if knot is not self.knot:
            self.knot.close()
            self.knot = knot

    async def _tensor(self, request: Request) -> Response:
        self.check_identity(request.headers)
        cache = self.cache
        entry = cache.entry(request.path_params["name"])
        headers = {"accept-ranges": "bytes", "x-knot-id": cache.knot.id}
        part = ByteRange(0, entry.length)
        if (asked := request.headers.get("range")) is not None:
            m = _RANGE.fullmatch(asked)
            if m is None or not int(m[1]) <= int(m[2]) < entry.length:
                raise RequestError("out-of-range", f"tensor {entry.name}: it has {entry.length} bytes", status=416)
            part = ByteRange(int(m[1]), int(m[2]) + 1)
            headers["content-range"] = f"bytes {part.start}-{part.end - 1}/{entry.length}"
        elif entry.sha256 is not None:
            # RFC 9530: of the whole tensor, as the knot's header has it
            digest = base64.b64encode(bytes.fromhex(entry.sha256)).decode()
            headers["content-digest"] = f"sha-256=:{digest}:"
        headers["content-length"] = str(len(part))
        pieces = await self._started(cache.pieces(entry.name, part))
        return StreamingResponse(pieces, 200 if asked is None else 206, headers, media_type="application/octet-stream")

    async def _batch(self, request: Request) -> Response:
        self.check_identity(request.headers)
        names = (await _document(request)).get("names")
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise RequestError("bad-request", "tensors: expected names, a list of tensor names")
        cache = self.cache
        entries = [cache.entry(name) for name in names]
        if len(entries) > BATCH_NAMES or sum(e.length for e in entries) > BATCH_BYTES:
            raise RequestError(
                "too-large", f"tensors: expected at most {BATCH_NAMES} names and {BATCH_BYTES} bytes", status=413
            )
        if bare := next((e.name for e in entries if e.sha256 is None), None):
            raise RequestError("no-digest", f"tensor {bare}: the knot has no sha256 of it", hint="GET /tensors/NAME")

        def pieces() -> Iterator[bytes | memoryview]:
            for e in entries:
                sha256 = bytes.fromhex(e.sha256 or "")
                yield record_head(RecordKind.STORED, bytes.fromhex(cache.knot.id), e.offset, e.length, sha256)
                yield from cache.pieces(e.name)

        return StreamingResponse(await self._started(pieces()), 200, media_type=RECORDS_TYPE)

    async def _segments(self, request: Request) -> Response:
        self.check_identity(request.headers)
        return JsonReply({"segments": [{"tensors": names, "length": len(at)} for at, names in self.cache.held]})

    async def _segment(self, request: Request) -> Response:
        self.check_identity(request.headers)
        cache, name = self.cache, request.path_params["name"]
        segment = await self.work(lambda: cache.segment(name))
        if segment is None:
            raise RequestError("not-held", f"tensor {printable(name, 128)}: served, but not held", status=404)
        return JsonReply({"name": segment.name, "offset": segment.range.start, "length": len(segment.range)})

    async def _invalidate(self, request: Request) -> Response:
        self.check_identity(request.headers)
        cache, name = self.cache, request.path_params["name"]
        return JsonReply({"invalidated": await self.work(lambda: cache.invalidate(name))})

    async def _started(self, pieces: Iterator[_Result]) -> Iterator[_Result]:
        """Return the pieces, the first of them read: until then an error can still be said."""
        first = await self.work(lambda: list(itertools.islice(pieces, 1)))
        return itertools.chain(first, pieces)


class RowWarden(Warden):
    """The embedding rows of a run of ids."""

    role = "row-warden"
    noun = "vocab"

    def __init__(self, knot: Knot, span: VocabSpan, rows: RowLevels) -> None:
        self.rows = rows
        self._span = span
        super().__init__(
            knot,
            [
                Route("/tensors", self._take, methods=["POST"]),
                Route("/invalidate", self._invalidate, methods=["POST"]),
            ],
        )

    @property
    def part(self) -> VocabSpan:
        """The ids whose rows are held."""
        return self._span

    @property
    def identity_key(self) -> str:
        """The knot's reference."""
        return self.knot.source.name

    def levels(self) -> list[Any]:
        """Return the counts of memory and the key-value level."""
        return list(self.rows.counts)

    def probe(self) -> None:
        """Read the first row."""
        self.rows.take([self._span.start])

    def close(self) -> None:
        """Finish the writes to the key-value level."""
        self.rows.close()

    async def _take(self, request: Request) -> Response:
        self.check_identity(request.headers)
        wanted = self._row_numbers(await _document(request))
        return Response(await self.work(lambda: self._records(wanted)), media_type=RECORDS_TYPE)

    def _records(self, wanted: list[int]) -> bytes:
        taken = self.rows.take(wanted)
        return b"".join(self.rows.record(row, taken[row]) for row in wanted)

    async def _invalidate(self, request: Request) -> Response:
        self.check_identity(request.headers)
        asked = await _document(request)
        rows = self._row_numbers(asked) if asked else None
        return JsonReply({"invalidated": await self.work(lambda: self.rows.invalidate(rows))})

    def _row_numbers(self, asked: Mapping[str, Any]) -> list[int]:
        rows = asked.get("rows")
        if not isinstance(rows, list) or not all(type(r) is int for r in rows):
            raise RequestError("bad-request", "rows: expected a list of ids")
        if len(rows) > ROWS_AT_ONCE:
            raise RequestError("too-large", f"rows: expected at most {ROWS_AT_ONCE}", status=413)
        if (bad := next((r for r in rows if r not in self._span), None)) is not None:
            raise RequestError("not-owned", f"rows: id {bad}: expected ids of {self._span}")
        return rows


async def _document(request: Request) -> dict[str, Any]:
    body = await request.body()
    if len(body) > _DOCUMENT_BYTES:
        raise RequestError("too-large", f"request body: expected at most {_DOCUMENT_BYTES} bytes", status=413)

    def refuse(code: str, what: str) -> KnotctlError:
        return RequestError(code, f"request body: {what}")

    return parse_json_object(body, refuse)
