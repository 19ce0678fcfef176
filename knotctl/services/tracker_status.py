"""What the dashboard shows of a tracker: the cluster as its leader sees it, and this tracker's own streams.

Counts only: no prompt, no answer, no key and no customer's account is in it. Source: man knot-service(5), DASHBOARD.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from knotctl.core.cluster.overview import SECTIONS, fleet_sections, ledger_section
from knotctl.core.cluster.store import Database
from knotctl.core.cluster.usage import earnings_rows, usage_rows
from knotctl.core.errors import KnotctlError
from knotctl.services.dashboard import server_section
from knotctl.services.dispatch import Dispatch
from knotctl.services.flights import Flights, stages
from knotctl.services.leadership import Leadership
from knotctl.services.token_metrics import TokenMetrics

# The ledger's sums go over all that was ever booked: not every time that somebody looks.
_LEDGER_SECONDS = 5.0


class TrackerStatus:
    """Makes the document. `about` is the model's entry; `database` is there where accounts are kept."""

    def __init__(
        self, about: dict[str, Any], lead: Leadership, dispatch: Dispatch, flights: Flights, metrics: TokenMetrics,
        database: Database | None, is_draining: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._about, self._lead, self._dispatch = about, lead, dispatch
        self._flights, self._metrics, self._database = flights, metrics, database
        self._is_draining = is_draining
        self._started = time.monotonic()
        self._ledger: tuple[float, dict[str, Any]] = (float("-inf"), {})

    async def document(self, request: Request) -> dict[str, Any]:
        """Return the document; `request` is passed on to the tracker that leads, where that is another one."""
        flights = self._flights.sections()
        route = await self._dispatch.likely()
        if not flights["routes"] and route:
            flights["routes"] = [{"stages": stages([(s.node_id, len(s.span)) for s in route]), "streams": 0}]
        cluster, reason = {}, None
        try:
            cluster = await self._cluster(request)
        except KnotctlError as e:
            reason = e.message
        if reason is None and not route:
            gone = cluster["coverage"]["gaps"]
            reason = "some layer has no node" if gone else "some layer has no node that may be used"
        state = "draining" if self._is_draining() else "degraded" if reason else "ok"
        return {
            "server": server_section("tracker", state, self._started, reason),
            "models": [self._about],
            **flights,
            **self._metrics.totals(),
            **cluster,
            **await self._booked(),
        }

    async def _cluster(self, request: Request) -> dict[str, Any]:
        """Return the sections that the leader knows. Raises: KnotctlError where none does."""
        passed = await self._lead.passed_on(request)
        if passed is None:
            return await self._lead.with_fleet(fleet_sections)
        found = json.loads(bytes(passed.body))
        return {name: found[name] for name in SECTIONS if name in found}

    async def _booked(self) -> dict[str, Any]:
        if self._database is None:
            return {}
        made_at, section = self._ledger
        if time.monotonic() - made_at > _LEDGER_SECONDS:
            usage = await asyncio.to_thread(usage_rows, self._database)
            section = ledger_section(usage, await asyncio.to_thread(earnings_rows, self._database))
            self._ledger = time.monotonic(), section
        return {"ledger": section}
