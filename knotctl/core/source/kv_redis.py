"""The key-value level on a Redis or Valkey server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from knotctl.core.errors import SourceError, UsageError, printable
from knotctl.core.source.kv import TIMEOUT_SECONDS


class RedisKv:
    """Values on a server, over connections that are made when needed; the server need not be up yet."""

    def __init__(self, url: str, name: str, ttl_seconds: int) -> None:
        self.name = name
        self._ttl = ttl_seconds
        try:
            self._client = redis.Redis.from_url(
                url,
                socket_timeout=TIMEOUT_SECONDS,
                socket_connect_timeout=TIMEOUT_SECONDS,
                # Once, for a connection that the server closed meanwhile; whoever calls has a breaker.
                retry=Retry(NoBackoff(), 1),
            )
        except ValueError as e:
            raise UsageError("bad-kv", f"{name}: {printable(e)}") from e

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the values of those keys that are there and not expired. Raises: SourceError kv-failed."""
        if not keys:
            return {}
        with self._failing():
            # One by one in a pipeline, as MGET takes a key that holds another type for absent, and we count it.
            pipe = self._client.pipeline(transaction=False)
            for key in keys:
                pipe.get(key)
            found = pipe.execute(raise_on_error=False)
            for value in found:
                if isinstance(value, redis.RedisError) and not isinstance(value, redis.ResponseError):
                    raise value
        # A key of another type answers with an error: a value that cannot be right, so that it gets deleted.
        values = (b"" if isinstance(v, redis.ResponseError) else v for v in found)
        return {key: value for key, value in zip(keys, values, strict=True) if value is not None}

    def put_many(self, items: Mapping[bytes, bytes]) -> None:
        """Keep the values for a day. Raises: SourceError kv-failed."""
        with self._failing():
            pipe = self._client.pipeline(transaction=False)
            for key, value in items.items():
                pipe.set(key, value, ex=self._ttl)
            pipe.execute()

    def delete_many(self, keys: Iterable[bytes]) -> None:
        """Forget the keys. Raises: SourceError kv-failed."""
        if keys := list(keys):
            with self._failing():
                self._client.delete(*keys)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (redis.RedisError, OSError) as e:
            raise SourceError("kv-failed", f"{self.name}: {printable(e) or type(e).__name__}") from e
