"""Stores to read from: moto's S3, rclone's (a sloppy one), and a server of ours that does one wrong thing at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from store_doubles import FaultyStore, free_port, point_s3_at, program, put_s3, serve


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """A store of ours, also where s3:// leads."""
    store = FaultyStore()
    point_s3_at(monkeypatch, store.url)
    yield store
    store.close()


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    port = free_port()
    yield from serve([program("moto_server"), "-p", str(port)], port)


@pytest.fixture(scope="session")
def rclone_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, folder = free_port(), tmp_path_factory.mktemp("rclone")
    address = ["--addr", f"127.0.0.1:{port}", "--auth-key", "testing,testing-secret", "--config", os.devnull]
    # Without it a change of a file is not seen for a minute.
    yield from serve([program("rclone"), "serve", "s3", *address, "--vfs-cache-mode", "off", str(folder)], port)


@pytest.fixture(params=["moto", "rclone"])
def s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bytes], str]:
    """`s3(key, data)` puts an object into a store of somebody else's and returns its reference."""
    point_s3_at(monkeypatch, request.getfixturevalue(f"{request.param}_url"))
    return put_s3
