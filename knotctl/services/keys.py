"""API keys: read from a file or the environment, compared in constant time, never logged, never taken from a URL."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from knotctl.core.errors import SourceError, UsageError, printable

_FILE_BYTES = 1 << 20
_MIN_LENGTH = 8


class ApiKeys:
    """The keys that open the API; none at all leave it open, which only a loopback address may be."""

    def __init__(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        # for this process's own calls
        self.own = keys[0] if keys else None
        # Digests are equally long, so that comparing them tells nothing of the keys' lengths either.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, headers: Mapping[str, str]) -> bool:
        """Return whether `Authorization: Bearer KEY` or `x-api-key: KEY` holds one of the keys; anything, if none."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        # All are compared, whichever fits: the time tells nothing.
        return sum(hmac.compare_digest(digest, d) for d in self._digests) > 0 or not self._digests


def load_keys(
    path: Path | None, environment: Mapping[str, str] = os.environ, variable: str = "KNOTCTL_API_KEY"
) -> ApiKeys:
    """Return the keys of a file, one a line, and of a variable.

    Raises: SourceError, UsageError bad-api-key.
    """
    keys = []
    if path is not None:
        try:
            with path.open("rb") as file:
                lines = file.read(_FILE_BYTES).decode("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise SourceError("read-failed", f"{printable(path)}: {getattr(e, 'strerror', None) or 'not UTF-8'}") from e
        keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
        if not keys:
            raise UsageError("bad-api-key", f"{printable(path)}: expected keys, one a line; found none")
    if key := environment.get(variable, ""):
        keys.append(key.strip())
    if any(len(key) < _MIN_LENGTH or not key.isascii() or " " in key for key in keys):
        raise UsageError(
            "bad-api-key", f"API keys: expected at least {_MIN_LENGTH} ASCII characters, no blanks, in each"
        )
    return ApiKeys(keys)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on this host name or address."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(
    host: str, keys: ApiKeys, remedy: str = "--api-key-file FILE, or KNOTCTL_API_KEY; without one use --host 127.0.0.1"
) -> None:
    """Refuse to listen where others can reach it without a key. Raises: UsageError no-api-key."""
    if not keys and not is_loopback(host):
        raise UsageError(
            "no-api-key",
            f"{printable(host)}: listening beyond this machine needs an API key",
            hint=remedy,
        )
