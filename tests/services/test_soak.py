"""Soaks, one after another, over real processes of a real model: none leaves anything behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from soak import Held, processes, settle, soak


@pytest.mark.model
def test_after_many_streams_and_clients_that_leave_all_is_as_before(knot_of: Callable[[str], Path]) -> None:
    """By hand with 200 streams for two minutes: soak.py."""
    with processes(str(knot_of("smollm2"))) as made:
        before: dict[str, Held] = {}
        for turn in range(3):
            tally = soak(made, streams=24, seconds=4)
            assert not tally.wrong
            assert min(tally.ends["left"], tally.ends["whole"]) > 0
            assert settle(made) == {}
            # first comes what is made once: threads, connections, scratch memory, the interpreter's own
            held = made.held()
            before = before or held
            for name, now in held.items():
                grown = (now.memory - before[name].memory) / 2**20, now.files - before[name].files
                assert grown[0] < 12, f"turn {turn}: {name}: {grown[0]:.1f} MiB more"
                assert grown[1] < 10, f"turn {turn}: {name}: {grown[1]} files more"
                assert now.threads - before[name].threads < 10, f"turn {turn}: {name}"
