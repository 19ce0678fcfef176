"""The small knot of fixtures/make_knots.py, whole or changed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from knotctl.core.knot.verify import Verification, verify_knot
from knotctl.core.source.file import FileSource

SCRIPT = Path(__file__).parents[3] / "fixtures" / "make_knots.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_knots", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def make_knots() -> ModuleType:
    """fixtures/make_knots.py: `small()` is a Draft, `BROKEN[code]()` and `TWINS[code]()` are files' bytes."""
    return load()


@pytest.fixture
def verified(tmp_path: Path) -> Callable[..., Verification]:
    """`verified(data, **options)` is what verify finds in a file of these bytes."""

    def verify(data: bytes, **options: object) -> Verification:
        path = tmp_path / "x.knot"
        path.write_bytes(data)
        source = FileSource(path)
        try:
            return verify_knot(source, **options)  # type: ignore[arg-type]
        finally:
            source.close()

    return verify
