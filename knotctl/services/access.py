"""Who may do what at a tracker: keys of a database by scope, or keys of a file and the token between nodes.

Where none is set everything is open, which only a loopback address may be. Source: man knot-service(5), KEYS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import Request

from knotctl.core.cluster.apikeys import KeyStore, Scope
from knotctl.core.errors import RequestError
from knotctl.services.keys import ApiKeys

# Whose requests these are where no account is kept.
NOBODY = "anonymous"


class Access:
    """The doors of a tracker. `store` has API keys with accounts and scopes, where it keeps any."""

    def __init__(self, keys: ApiKeys, token: ApiKeys, store: KeyStore | None = None) -> None:
        self._keys, self._token, self._store = keys, token, store

    def edge_keys(self) -> ApiKeys:
        """Return what the edge is to know: whether there are keys at all; each endpoint asks for its own."""
        return _Inside(bool(self._keys) or bool(self._token) or self._store is not None)

    async def account(self, request: Request) -> str:
        """Return the account that a generation is for. Raises: RequestError invalid_api_key, missing-scope."""
        if self._store is None:
            if not self._keys.accept(request.headers):
                raise _refused()
            return NOBODY
        key = await asyncio.to_thread(self._store.authenticate, presented(request.headers), Scope.INFER)
        return key.account_id

    async def worker(self, request: Request) -> None:
        """Refuse whoever is no worker: it has the token between nodes, or a key of that scope."""
        await self._one_of(request, Scope.WORKER)

    async def reader(self, request: Request) -> None:
        """Refuse whoever may not see the cluster."""
        await self._one_of(request, Scope.METRICS, Scope.ADMIN, Scope.WORKER)

    async def viewer(self, request: Request) -> None:
        """Refuse whoever may not look at the dashboard: where no accounts are kept, whoever may use the API may."""
        if self._store is not None or not self._keys.accept(request.headers):
            await self.reader(request)

    async def _one_of(self, request: Request, *scopes: Scope) -> None:
        if self._token and self._token.accept(request.headers):
            return
        if self._store is None:
            # Without a token between nodes, whoever may use the API runs the cluster.
            if self._token or not self._keys.accept(request.headers):
                raise _refused()
            return
        refusal = _refused()
        for scope in scopes:
            try:
                await asyncio.to_thread(self._store.authenticate, presented(request.headers), scope)
            except RequestError as e:
                refusal = e
            else:
                return
        raise refusal


class _Inside(ApiKeys):
    """Lets everybody past the edge, to be asked for a key behind it."""

    def __init__(self, are_any: bool) -> None:
        super().__init__(())
        self._are_any = are_any

    def __bool__(self) -> bool:
        return self._are_any

    def accept(self, headers: Mapping[str, str]) -> bool:
        return True


def presented(headers: Mapping[str, str]) -> str:
    """Return the key that a request came with, empty where it has none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _refused() -> RequestError:
    return RequestError("invalid_api_key", "API key: missing or wrong", status=401, hint="Authorization: Bearer KEY")
