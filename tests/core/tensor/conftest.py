"""A tiny knot whose reads are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from knotctl.core.knot.reader import Knot, open_knot
from knotctl.core.source.counted import CountedSource
from knotctl.core.source.opening import open_source


@pytest.fixture
def knot(tiny: Callable[[str], Path]) -> Iterator[Knot]:
    """The tiny model of every quantised type; its source counts what is read after the header."""
    with open_knot(str(tiny("tiny"))) as opened:
        header = opened.header
    source = CountedSource(open_source(str(tiny("tiny"))))
    with Knot(header, source) as counted:
        yield counted
