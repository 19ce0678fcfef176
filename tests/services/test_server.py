"""How a server ends: drained by the first signal, at once by the second."""

from __future__ import annotations

import os
import signal

import pytest

from knotctl.services.server import Server


async def nothing(*_: object) -> None: ...


def test_a_signal_while_it_drains_for_another_reason_is_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that closes stdin and sends SIGTERM asks for one end, not for an abrupt one: writes would be lost."""
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    server = Server(nothing)
    server.stop()
    server._signalled(signal.SIGTERM, None)
    assert server.should_exit
    assert left == []
    server._signalled(signal.SIGTERM, None)
    assert left == [128 + signal.SIGTERM]
