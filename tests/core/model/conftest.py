"""The tiny models, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from knotctl.core.knot.reader import Knot, open_knot


@pytest.fixture(params=["tiny", "tiny-llama", "tiny-qwen3"])
def knot(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> Iterator[Knot]:
    with open_knot(str(tiny(request.param))) as k:
        yield k
